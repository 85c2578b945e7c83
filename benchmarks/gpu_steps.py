"""Where a Step's seconds go: six hypotheses, on the graph of predicted.py.

    python -m benchmarks.gpu_steps [--quick] [--json FILE] [--only PART ...]

Owns: the runs, and what is counted in them. Does not own: the graph and its Models (predicted.py),
kernels alone (gpu_uneven.py).

    part      asks
    uneven    what each node takes in Steps of a real run, and whether torch's allocator grows
    even      whether prompts of one length change that
    blocking  whether a node's seconds are another's: every kernel is waited for as it is launched
    profile   how long the device is busy, how many kernels are launched, which copies wait
    kernels   whether a profile's rows of one length say too little

The clocks are read beside it all, where nvidia-smi is. A run is of one process, so that the
allocator's counts are those of all kernels.
"""

from __future__ import annotations

import json as json_
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import tyro

from benchmarks import predicted
from benchmarks.gpu_uneven import uneven_results
from benchmarks.report import SavedResults, SideResult
from engine.api import run
from engine.plan.options import RunOptions

Part = Literal["uneven", "even", "blocking", "profile", "kernels"]
PARTS: tuple[Part, ...] = ("uneven", "profile", "kernels", "even", "blocking")
"""By worth: time may be over."""
BLOCKING = "CUDA_LAUNCH_BLOCKING"
"""Read as CUDA begins, so the part needs a process of its own."""
_WARM = 2
_PROMPT = 96
"""Tokens of each even prompt."""
_WAITS = (
    "cudaMemcpyAsync",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaMalloc",
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::nonzero",
)
"""What may wait for the device."""
_LAUNCHES = ("LaunchKernel", "GraphLaunch")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorCounts:
    """Of torch's allocator: bytes that it has of the device, its segments, failures that it tried
    again.
    """

    reserved: int = 0
    segments: int = 0
    retries: int = 0


def read_allocator() -> AllocatorCounts:
    """Read them now; zeros without a card."""
    if not torch.cuda.is_available():
        return AllocatorCounts()
    stats = torch.cuda.memory_stats()
    return AllocatorCounts(
        reserved=stats.get("reserved_bytes.all.current", 0),
        segments=stats.get("segment.all.allocated", 0),
        retries=stats.get("num_alloc_retries", 0),
    )


@dataclass(slots=True, kw_only=True)
class WatchedSteps:
    """Metrics and the allocator's counts of each Step."""

    metrics: list[Mapping[str, float]] = field(default_factory=list)
    counts: list[AllocatorCounts] = field(default_factory=list)

    def take(self, row: Mapping[str, float]) -> None:
        """A Step has ended."""
        self.metrics.append(dict(row))
        self.counts.append(read_allocator())

    def results(self, name: str) -> Iterator[SideResult]:
        """Medians of the Steps after the warm-up, the first Step, and what the allocator did."""
        late = self.metrics[_WARM:]
        for metric in sorted(name for name in late[0] if name.startswith("time/")):
            node = metric.removeprefix("time/")
            seconds = median(row.get(metric, 0.0) for row in late)
            yield SideResult(name=f"{name}: {node}", value=1e3 * seconds, unit="ms")
        first = self.metrics[0]["time/step"]
        yield SideResult(name=f"{name}: first Step", value=1e3 * first, unit="ms")
        begun, ended = self.counts[_WARM - 1], self.counts[-1]
        reserved = ended.reserved / 2**30
        yield SideResult(name=f"{name}: reserved on the device", value=reserved, unit="GiB")
        segments = ended.segments - begun.segments
        yield SideResult(name=f"{name}: segments allocated since", value=segments, unit="")
        retries = ended.retries - begun.retries
        yield SideResult(name=f"{name}: allocations tried again", value=retries, unit="")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsGraph:
    """What is run. steps: of a run; answer: tokens at most."""

    base: str
    data: str
    size: predicted.ModelSize
    steps: int
    answer: int
    folder: Path

    def watch(self, name: str, data: str) -> WatchedSteps:
        """Run it in this process."""
        watched = WatchedSteps()
        run(self.graph(data), self.options(name, self.steps), on_step=[watched.take])
        return watched

    def graph(self, data: str) -> Any:
        """The graph on these prompts."""
        return predicted.graph(self.base, data, self.size, max_tokens=self.answer)

    def options(self, name: str, steps: int) -> RunOptions:
        """Of a run in this process."""
        return RunOptions(
            threads=1,
            workers="one",
            inproc=True,
            progress=False,
            steps=steps,
            runs=self.folder / "runs",
            name=name,
            overwrite=True,
        )


def make_even(data: str, path: Path) -> str:
    """Write the same prompts, all of one length."""
    texts: list[str] = []
    for text in pq.read_table(data)["prompt"].to_pylist():
        texts.append((text * 2)[:_PROMPT])
    pq.write_table(pa.table({"prompt": texts, "answer": texts}), path)
    return str(path)


def profile_step(of: StepsGraph) -> Iterator[SideResult]:
    """One Step after the warm-up under torch's profiler; prints what took longest on the device."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    rows: list[Mapping[str, float]] = []

    def begin_or_end(row: Mapping[str, float]) -> None:
        rows.append(dict(row))
        if len(rows) == _WARM:
            profiler.start()
        if len(rows) == _WARM + 1:
            profiler.stop()

    run(of.graph(of.data), of.options("profile", _WARM + 1), on_step=[begin_or_end])
    events = profiler.key_averages()
    order = "self_cpu_time_total"
    if torch.cuda.is_available():
        order = "self_device_time_total"
    print(events.table(sort_by=order, row_limit=14, max_name_column_width=46), flush=True)
    yield from event_results(events, rows[-1]["time/step"])


def event_results(events: Sequence[Any], seconds: float) -> Iterator[SideResult]:
    """What a profile of a Step of so many seconds says."""
    busy, launches = 0.0, 0
    for event in events:
        # Operators have the time of their kernels, too, which are events of their own.
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            busy += event.self_device_time_total / 1e6
        if any(word in event.key for word in _LAUNCHES):
            launches += event.count
    yield SideResult(name="profile: a Step", value=1e3 * seconds, unit="ms")
    yield SideResult(name="profile: device busy", value=1e3 * busy, unit="ms")
    yield SideResult(name="profile: launches", value=launches, unit="")
    for event in events:
        if event.key in _WAITS:
            name = f"profile: {event.key}"
            yield SideResult(name=f"{name}, calls", value=event.count, unit="")
            milliseconds = event.cpu_time_total / 1e3
            yield SideResult(name=name, value=milliseconds, unit="ms")


@contextmanager
def watch_clocks(path: Path) -> Iterator[None]:
    """Have nvidia-smi write clock (MHz) and utilisation (%) twice a second; nothing without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield
        return
    query = "--query-gpu=clocks.sm,utilization.gpu"
    command = [program, query, "--format=csv,noheader,nounits", "--loop-ms=500"]
    with path.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def clock_results(text: str) -> Iterator[SideResult]:
    """The median clock, the least, and the mean utilisation; nothing of an empty text."""
    clocks: list[float] = []
    uses: list[float] = []
    for line in text.splitlines():
        clock, _, use = line.partition(",")
        # A line may be cut off, and a card may not tell one of them.
        if clock.strip().isdigit() and use.strip().isdigit():
            clocks.append(float(clock))
            uses.append(float(use))
    if clocks:
        yield SideResult(name="clock of the device, median", value=median(clocks), unit="MHz")
        yield SideResult(name="clock of the device, least", value=min(clocks), unit="MHz")
        yield SideResult(name="device in use", value=fmean(uses), unit="%")


def blocked_results(path: Path, *, quick: bool) -> Iterator[SideResult]:
    """The blocking part's results, of a process of its own, which writes them to this file. Raises
    CalledProcessError if it fails.
    """
    words = ["-m", "benchmarks.gpu_steps", "--only", "blocking", "--json", str(path)]
    if quick:
        words.append("--quick")
    subprocess.run([sys.executable, *words], env=os.environ | {BLOCKING: "1"}, check=True)
    for result in json_.loads(path.read_text()):
        # The clocks are read here, too.
        if result["name"].startswith("blocking"):
            yield SideResult(name=result["name"], value=result["value"], unit=result["unit"])


def part_results(part: Part, of: StepsGraph, groups: int) -> Iterator[SideResult]:
    """The results of one part."""
    if part == "kernels":
        planned = predicted.planned(of.base, of.data, of.size, 1)
        yield from uneven_results(planned, groups, of.steps // 2)
    elif part == "profile":
        yield from profile_step(of)
    elif part == "even":
        even = make_even(of.data, of.folder / "even.parquet")
        yield from of.watch("even", even).results("even prompts")
    else:
        yield from of.watch(part, of.data).results(f"{part} prompts")


def main(*, quick: bool = False, json: Path | None = None, only: tuple[Part, ...] = PARTS) -> None:
    """Measure Steps.

    Args:
        quick: the smallest Model and few Steps; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        only: the parts; by default all.
    """
    results = SavedResults(json)
    size = predicted.MODELS[0] if quick else predicted.ON_GPU[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base, data = predicted.make(folder, size)
        steps, answer, groups = (3, 8, 2) if quick else (8, 64, 64)
        of = StepsGraph(base=base, data=data, size=size, steps=steps, answer=answer, folder=folder)
        clocks = folder / "clocks.csv"
        with watch_clocks(clocks):
            for part in only:
                if part == "blocking" and os.environ.get(BLOCKING) != "1":
                    results.add(*blocked_results(folder / "blocking.json", quick=quick))
                else:
                    results.add(*part_results(part, of, groups))
        if clocks.is_file():
            results.add(*clock_results(clocks.read_text()))
    results.show("Steps on this card")


if __name__ == "__main__":
    tyro.cli(main)
