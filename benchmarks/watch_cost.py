"""What a run pays for its events, and for being watched.

    python -m benchmarks.watch_cost WAY FOLDER STEPS

Owns: the run that is measured, the three ways in which it goes on, the seconds inside of the
events' own code. Does not own: who goes on beside whom (watch.py), the run's task (overhead.py).

A block is a short run on the demo's model and data, in this process. bare: nothing of the flow is
folded, counted or written. events: as every run is. watched: with a server beside it, and a client
that reads the run's stream as a page does; both have the run's core, so what they take is taken
from the run. For each core's number on its input it makes a block there, and prints a line of JSON:
the seconds of a Step, and by part what the events' own code took of each.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import engine.session.attempts as attempts
from benchmarks.overhead import BATCH, MAX_TOKENS, N, prepare
from engine.api import run
from engine.keep.flow.fold import FlowFold
from engine.plan.options import RunOptions
from engine.run.worker.counters import FlowCounts, PeakReports
from engine.run.worker.newest_rows import NewestRows
from graphs.grpo import grpo

WAYS = ("bare", "events", "watched")
WARM_UP = 3
_READER = """
import sys, time, urllib.error, urllib.request
from http.cookiejar import CookieJar
opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
entry, name = sys.argv[1:]
opener.open(entry).read()
base = entry.partition("?")[0]
while True:
    try:
        opener.open(f"{base}api/runs/{name}").read()
        break
    except urllib.error.HTTPError:  # it has not begun
        time.sleep(0.2)
for part in ("/drawing", "/samples"):
    opener.open(f"{base}api/runs/{name}{part}").read()
with opener.open(f"{base}api/runs/{name}/stream") as stream:
    while stream.read1(65536):
        pass
"""


class _Nobody:
    """A subscriber that listens to nothing."""

    takes = ()

    def take(self, event: object) -> None:
        """Nothing."""

    def meanwhile(self, now: float, doing: object) -> None:
        """Nothing."""

    def fold(self) -> None:
        """Nothing."""


@contextmanager
def without_events() -> Iterator[None]:
    """Runs fold, count and write nothing of what flows."""
    with ExitStack() as stack:
        stack.enter_context(_changed(attempts, "FlowFold", lambda *_, **__: _Nobody()))
        stack.enter_context(_changed(FlowCounts, "count_row_bytes", lambda *_: None))
        stack.enter_context(_changed(FlowCounts, "count_weight_bytes", lambda *_: None))
        stack.enter_context(_changed(NewestRows, "offer", lambda *_: None))
        stack.enter_context(_changed(PeakReports, "reports", lambda *_: []))
        stack.enter_context(_changed(PeakReports, "has_grown", lambda *_: False))
        yield


@contextmanager
def timed(spent: Counter[str]) -> Iterator[None]:
    """Adds up the seconds inside of the events' own code; calls in it are not counted twice."""
    parts = [(FlowFold, "take"), (FlowCounts, "count_row_bytes"), (FlowCounts, "reports")]
    parts += [(NewestRows, "offer"), (PeakReports, "reports"), (PeakReports, "has_grown")]
    with ExitStack() as stack:
        for where, name in parts:
            label = f"{getattr(where, '__name__', '').rpartition('.')[2]}.{name}"
            made = _clocked(getattr(where, name), spent, label)
            stack.enter_context(_changed(where, name, made))
        yield


def _clocked(call: Callable[..., Any], spent: Counter[str], name: str) -> Callable[..., Any]:
    def clocked(*args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*args)
        finally:
            spent[name] += time.perf_counter() - begin  # type: ignore[assignment]

    return clocked


@contextmanager
def _changed(where: Any, name: str, made: Any) -> Iterator[None]:
    before = getattr(where, name)
    setattr(where, name, made)
    try:
        yield
    finally:
        setattr(where, name, before)


@contextmanager
def watching(runs: Path, name: str) -> Iterator[None]:
    """A server of these runs, and a client that reads the stream of one."""
    command = [str(Path(sys.executable).parent / "dataflow"), "watch", "--root", str(runs)]
    with ExitStack() as stack:
        server = _ended(stack, [*command, "--port", "0"], out=subprocess.PIPE)
        entry = server.stdout.readline().decode().strip() if server.stdout else ""
        _ended(stack, [sys.executable, "-c", _READER, entry, name])
        yield


def _ended(
    stack: ExitStack, command: list[str], *, out: int | None = None
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


class TimedBlocks:
    """Blocks of Steps on the demo's model, and what they took."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._steps, self.runs, self._count = steps, folder / "runs", 0
        reward = prepare(folder, 2000)
        data, base = str(folder / "train.parquet"), str(folder / "model")
        sizes: dict[str, Any] = {"n": N, "batch": BATCH, "max_tokens": MAX_TOKENS}
        self._graph = grpo(base, data, reward, **sizes, lr=5e-4, minibatches=2)

    @property
    def _next(self) -> str:
        return f"block_{self._count}"

    def block(self) -> list[float]:
        """The seconds of each Step after the warm-up."""
        steps = WARM_UP + self._steps
        options = RunOptions(
            steps=steps, runs=self.runs, name=self._next, threads=1, progress=False
        )
        self._count += 1
        folder = run(self._graph, options).folder
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [row["time/step"] for row in rows][WARM_UP:]

    def in_a_way(self, way: str) -> list[float]:
        """One block, bare, with events, or watched."""
        if way == "bare":
            with without_events():
                return self.block()
        if way == "events":
            return self.block()
        with watching(self.runs, self._next):
            return self.block()


def stay_on(core: int) -> None:
    """All threads of this process, and what they start, have this core alone."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def main(way: str, folder: Path, steps: int) -> None:
    """Make blocks until the input ends."""
    folder.mkdir(exist_ok=True)
    blocks = TimedBlocks(folder, steps)
    print("ready", flush=True)
    for line in sys.stdin:
        stay_on(int(line))
        spent: Counter[str] = Counter()
        with timed(spent):
            seconds = blocks.in_a_way(way)
        made = sum(seconds) * (WARM_UP + steps) / steps
        share = {name: value / made for name, value in spent.items()}
        print(json.dumps({"step": statistics.fmean(seconds), "share": share}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
