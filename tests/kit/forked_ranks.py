"""What multiprocessing spawns, as forks of this process's fork server (forked.py).

Owns: `ForkedSpawn`, in the place of what starts and awaits such a process. Does not own: the
pickled target, which reaches it as it reaches an interpreter.
"""

from __future__ import annotations

import multiprocessing.popen_spawn_posix
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import util
from typing import Any
from unittest import mock

from tests.kit.forked import ForkedPython


class _ForkedTarget(ForkedPython):
    """vLLM sets variables for its ranks, and reads them where it needs them."""

    _in_any_environment = True


class ForkedSpawn(multiprocessing.popen_spawn_posix.Popen):
    """Starts as multiprocessing does; the process is no child of this one."""

    _process: subprocess.Popen[bytes]

    def _launch(self, process_obj: Any) -> None:
        with mock.patch.object(util, "spawnv_passfds", self._start):
            super()._launch(process_obj)  # type: ignore[misc]

    def _start(self, path: bytes, words: Sequence[Any], descriptors: Sequence[int]) -> int:
        self._process = _ForkedTarget([*map(os.fsdecode, words)], pass_fds=descriptors)
        return self._process.pid

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            process = self._process
            self.returncode = process.poll() if flag == os.WNOHANG else process.wait()
        return self.returncode


@contextmanager
def forked_spawns() -> Iterator[None]:
    """While this is open, what this process spawns is forked."""
    with mock.patch.object(multiprocessing.popen_spawn_posix, "Popen", ForkedSpawn):
        yield
