"""Runs whose replicas come and go: who asks for how many, and a reward that never ends in one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.api import RunHandle, run
from tests.kit import run_graphs as graphs
from tests.kit.processes import command_of
from tests.kit.tiny_runs import TinyRuns

TOLD = "DATAFLOW_TEST_TOLD"
"""The variable with the path of a pipe, to which `hangs_in_the_second` says that it hangs, or of a
folder for what Workers note.
"""


class Scaler:
    """An on_step that asks for each of these numbers of replicas when the one before is there, and
    for the run's end after the last. seen: the numbers that there were.
    """

    def __init__(self, node: str, counts: Sequence[int]) -> None:
        self._node = node
        self._left = list(counts)
        self._asked = 0
        self.handle: RunHandle | None = None
        self.seen: list[int] = []

    def __call__(self, row: Mapping[str, float]) -> None:
        self.seen.append(int(row[f"replicas/{self._node}"]))
        if self.handle is None or self._asked not in (0, self.seen[-1]):
            return
        if not self._left:
            self.handle.stop()
            return
        self._asked = self._left.pop(0)
        self.handle.scale(**{self._node: self._asked})


def scaled(tiny: TinyRuns, scaler: Scaler, *, max_lag: int, **options: object) -> RunHandle:
    """A run that goes on until the scaler ends it."""
    graph = graphs.small(tiny.folder, batch=6, max_lag=max_lag)
    asked = tiny.options(5000, workers="auto", scaling="fixed", **options)
    handle = run(graph, asked, on_step=[scaler], wait=False)
    scaler.handle = handle
    return handle


def hangs_in_the_second(completions: Sequence[str], **columns: object) -> list[float]:
    """`vowels`, but never ends where it is first called by the Worker score-1."""
    del columns
    pipe = Path(os.environ[TOLD])
    if pipe.exists() and _worker(os.getpid()) == "score-1":
        with open(pipe, "w") as told:
            pipe.unlink()
            told.write("hangs")
        threading.Event().wait()
    return graphs.vowels(completions)


def _worker(pid: int) -> str:
    """The name of the Worker that a process descends from; empty for none."""
    while pid > 1:
        words = command_of(pid)
        if "engine.run.worker_process.worker_process" in words:
            return words[-1]
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return ""


def slow_in_the_second(completions: Sequence[str], **columns: object) -> list[float]:
    """`vowels`, for which the Worker g1 takes long, row by row; each notes its rows in a file."""
    del columns
    worker = _worker(os.getpid())
    with open(Path(os.environ[TOLD]) / worker, "a") as rows:
        rows.write("." * len(completions))
    if worker == "g1":
        time.sleep(0.03 * len(completions))  # the work of a slow machine
    return graphs.vowels(completions)
