"""Checks that nothing of a run is left: processes, descriptors, shared memory, sockets."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.kit.processes import children, ended, marked, shown

GONE_WITHIN = 10.0
"""Seconds within which every process of a run must be gone after its end."""
_SHARED = "/dev/shm"
_IN_MAPS = re.compile(rf" {_SHARED}/(\S+)$", re.MULTILINE)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Use it with `pytestmark = pytest.mark.usefixtures("nothing_is_left")`."""
    before = set(children())
    yield
    end = time.monotonic() + GONE_WITHIN
    # A server of forks reaps what has ended a moment later.
    while (left := set(children()) - before) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, [shown(pid) for pid in left]


def require_ended(pids: Iterable[int], seconds: float = 20.0) -> None:
    """Wait until the kernel has ended these processes."""
    for pid in pids:
        assert ended(pid, seconds), f"process {pid} outlived its run"


def require_gone(mark: str) -> None:
    """Wait until no process with this mark is left, as long as that may take."""
    end = time.monotonic() + GONE_WITHIN
    # A process that is just executing its program has no environment, so one look may miss it.
    while (left := marked(mark)) and time.monotonic() < end:
        ended(left[0], end - time.monotonic())
    outlived = [shown(pid) for pid in left]
    assert not left, f"processes outlived their run by {GONE_WITHIN:g} s: {outlived}"


def descriptors() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def shared_memory() -> set[str]:
    """Names in shared memory, of any program, but for the semaphores of multiprocessing's pools:
    nothing that a run starts makes one, and a test beside this one may.
    """
    return {name for name in os.listdir(_SHARED) if not name.startswith("sem.mp-")}


def left_in_shared_memory(before: set[str]) -> set[str]:
    """Names that are new and that no other process holds.

    What runs beside this process has names of its own there (vLLM, Ray and Chromium do), and holds
    them; what is left is held by nobody, or by this process.
    """
    new_names = shared_memory() - before
    if not new_names:
        return set()
    return (new_names - _held_by_others()) & shared_memory()


def require_nothing_in_shared_memory(before: set[str]) -> None:
    """Wait until no such name is left: of a process that was killed, here or in a test beside this
    one, Python's resource tracker unlinks them a moment later.
    """
    end = time.monotonic() + GONE_WITHIN
    while (left := left_in_shared_memory(before)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, f"names of nobody in shared memory: {sorted(left)}"


def _held_by_others() -> set[str]:
    """Names in shared memory that another process has open or mapped."""
    names: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        # It may end while we look, or be another user's.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            names |= set(_IN_MAPS.findall((process / "maps").read_text(errors="replace")))
            names |= set(_open_names(process))
    return names


def _open_names(process: Path) -> Iterator[str]:
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while we look
            folder, _, name = os.readlink(descriptor).rpartition("/")
            if folder == _SHARED:
                yield name


def require_no_sockets(folder: Path) -> None:
    """No socket or pipe is in the folder."""
    left = [path for path in folder.rglob("*") if path.is_socket() or path.is_fifo()]
    assert not left, f"sockets are left: {left}"
