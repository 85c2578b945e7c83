"""Checks that nothing of a run is left: processes, descriptors, shared memory, sockets."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.kit.processes import children, command_of, ended, marked

GONE_WITHIN = 10.0
"""Seconds within which every process of a run must be gone after its end."""


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Use it with `pytestmark = pytest.mark.usefixtures("nothing_is_left")`."""
    before = set(children())
    yield
    assert set(children()) <= before


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
    shown = [" ".join(command_of(pid))[:120] or f"{pid} (gone)" for pid in left]
    assert not left, f"processes outlived their run by {GONE_WITHIN:g} s: {shown}"


def descriptors() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def shared_memory() -> set[str]:
    """Names in shared memory, of any program, but for the semaphores of multiprocessing's pools:
    nothing that a run starts makes one, and a test beside this one may.
    """
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def require_no_sockets(folder: Path) -> None:
    """No socket or pipe is in the folder."""
    left = [path for path in folder.rglob("*") if path.is_socket() or path.is_fifo()]
    assert not left, f"sockets are left: {left}"
