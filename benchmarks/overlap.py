"""The gain from overlapping generation and training: one Worker at lag 0 against several at lag 1.

    python -m benchmarks.overlap [--quick] [--json FILE]

Owns: the paired runs, the overlap in their traces, and the simulator's prediction for the same
plans. Does not own: how results are shown (report.py), the demo's task (examples/demo_task.py).

The model is the demo's before its warm start, with answers long enough that generation and training
take about the same time, one thread each: then overlap gains most, at best twice the speed. Both
runs of a pair share a seed and alternate in order. Next to the measured ratio is the one that
engine/simulation predicts for both plans from the synchronous runs' seconds. It knows
neither transport nor cores that disturb each other; they explain the difference. How much longer
kernels take side by side is a line of its own, and so is what is fetched: beside kernels, or while
one waits for it.
"""

from __future__ import annotations

import json as json_
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.overhead import prepare
from benchmarks.report import SideResult, machine, show, write_json
from dataflow.graph import Graph
from engine.api import plan, run
from engine.coordinator.coordinator import Settings
from engine.keep.trace.timeline import read_trace
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.protocol.messages import StepClosed
from engine.run.simulated_workers.behaviour import Durations, Outcomes
from engine.run.simulated_workers.simulation import Simulation
from engine.run.worker.timing import FETCH
from graphs.grpo import grpo
from operators.rewards import RewardFn

BATCH, N, MAX_TOKENS = 16, 6, 48
WARM_UP = 5
GOAL = 1.5
"""Samples per second at lag 1, relative to the synchronous run."""
WORDS = 3000
GENERATE, TRAIN = "rollout", "train_policy"
ROWS_AWAITED, FETCHED, LOADED = f"time/{TRAIN}/rows", "weights/policy/fetch", "weights/policy/load"
"""Seconds of a Step: until rows were there, of a version beside decoding, within decoding."""
_NOT_WORK = ("imports", "open", "load ", "fetch ", FETCH)

Mode = Literal["one", "auto"]
Row = Mapping[str, float]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """One run after its warm-up. spans: (start, end) in seconds of all work, by node."""

    rows: Sequence[Row]
    spans: Mapping[str, Sequence[Interval]]

    @property
    def samples_per_second(self) -> float:
        """Trained rows divided by the time of all Steps, so that no slow Step is left out."""
        return (
            sum(row["data/prompts"] for row in self.rows)
            * N
            / sum(row["time/step"] for row in self.rows)
        )

    def seconds(self, node: str) -> float:
        """The mean seconds per Step in which a node computes."""
        return statistics.fmean(row.get(f"time/{node}", 0.0) for row in self.rows)

    @property
    def overlap(self) -> float:
        """The share of training's time during which generation ran, too."""
        train = merged(self.spans.get(TRAIN, ()))
        total = sum(end - start for start, end in train)
        return common(train, merged(self.spans.get(GENERATE, ()))) / total if total else 0.0

    def mean(self, metric: str) -> float:
        """The mean of a metric over the Steps that have it; 0 if none has."""
        values = [row[metric] for row in self.rows if metric in row]
        return statistics.fmean(values) if values else 0.0

    @property
    def fetched_on_the_path(self) -> float:
        """The share of the Steps' time in which rows for training were waited for, or a version was
        loaded by the generator: of it no part travels beside a kernel.
        """
        waited = sum(row.get(ROWS_AWAITED, 0.0) for row in self.rows)
        loaded = sum(row.get(LOADED, 0.0) for row in self.rows)
        return (waited + loaded) / sum(row["time/step"] for row in self.rows)

    @property
    def lag(self) -> float:
        """The greatest lag of any trained row."""
        return max(row["policy/lag/max"] for row in self.rows)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times, as intervals that neither touch nor overlap, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def common(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Seconds that are in both; each is merged."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in some for c, d in others)


def spans_of(events: Iterable[Mapping[str, Any]], since: float) -> dict[str, list[Interval]]:
    """Spans that start at `since` (trace seconds) or later, except opening and loading, by node."""
    node_of: dict[tuple[int, int], str] = {}
    found: dict[str, list[Interval]] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] == "thread_name":
            node_of[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X" and not event["name"].startswith(_NOT_WORK):
            start = event["ts"] / 1e6
            if start >= since:
                found.setdefault(node_of[event["pid"], event["tid"]], []).append(
                    (start, start + event["dur"] / 1e6)
                )
    return found


def the_graph(folder: Path, reward_fn: RewardFn, max_lag: int) -> Graph:
    """GRPO on the demo's words."""
    data, base = str(folder / "train.parquet"), str(folder / "model")
    return grpo(
        base,
        data,
        reward_fn,
        n=N,
        batch=BATCH,
        max_tokens=MAX_TOKENS,
        lr=5e-4,
        minibatches=2,
        max_lag=max_lag,
    )


def options_of(folder: Path, mode: Mode, steps: int, seed: int) -> RunOptions:
    """One Worker, or the plan's placement; one thread for each kernel."""
    name = f"{mode}-{seed}"
    return RunOptions(
        steps=WARM_UP + steps,
        seed=seed,
        runs=folder / "runs",
        name=name,
        threads=1,
        workers=mode,
        progress=False,
    )


def measured(folder: Path, reward_fn: RewardFn, mode: Mode, steps: int, seed: int) -> Overlap:
    """One run: in one Worker at lag 0, or in several at lag 1."""
    graph = the_graph(folder, reward_fn, 0 if mode == "one" else 1)
    result = run(graph, options_of(folder, mode, steps, seed))
    rows = [
        json_.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()
    ]
    events = [
        event for path in sorted((result.folder / "trace").iterdir()) for event in read_trace(path)
    ]
    ends = [
        event["ts"] / 1e6 + event.get("dur", 0.0) / 1e6 for event in events if event["ph"] == "X"
    ]
    measuring = [row for row in rows if row["step"] > WARM_UP]
    since = max(ends) - sum(row["time/step"] for row in measuring)
    return Overlap(rows=measuring, spans=spans_of(events, since))


def predicted(the_plan: Plan, durations: Durations, steps: int) -> float:
    """Simulated seconds per Step after the warm-up."""
    settings = Settings(steps=WARM_UP + steps)
    rows = {source.name: WORDS for source in the_plan.sources}
    simulation = Simulation(the_plan, settings, rows=rows, durations=durations, outcomes=Outcomes())
    simulation.run()
    closed = {
        told.step: when
        for when, told in simulation.history.instructions
        if isinstance(told, StepClosed)
    }
    return (closed[WARM_UP + steps] - closed[WARM_UP]) / steps


def durations_of(the_plan: Plan, runs: Sequence[Overlap]) -> Durations:
    """Measured seconds for the simulator: decode rows take the whole chunk, others take turns."""

    def seconds(node: str) -> float:
        return statistics.median(one.seconds(node) for one in runs)

    row = {
        n.name: seconds(n.name) / (1 if n.work == "decode" else BATCH * n.inner)
        for n in the_plan.nodes
    }
    record = statistics.median(
        statistics.fmean(row["time/record"] for row in one.rows) for one in runs
    )
    return Durations(
        row=row, tail=0.0, train=seconds(TRAIN), load=0.0, store=record, slots=BATCH * N
    )


def results(one: Sequence[Overlap], auto: Sequence[Overlap], prediction: float) -> list[SideResult]:
    """All numbers; ratios are medians over pairs."""
    pairs = list(zip(one, auto, strict=True))
    ratio = statistics.median(b.samples_per_second / a.samples_per_second for a, b in pairs)
    overlap = statistics.median(each.overlap for each in auto)
    lag = max(each.lag for each in auto)
    found = [
        SideResult(
            name="samples/s, Workers at lag 1 / one at lag 0", value=ratio, unit="ratio", goal=GOAL
        ),
        SideResult(name="predicted by the simulator", value=prediction, unit="ratio"),
        SideResult(name="measured / predicted", value=ratio / prediction, unit="share"),
        SideResult(name="greatest lag", value=lag, unit="versions", goal=1.0, least=False),
        SideResult(name="training's time with generation under way", value=overlap, unit="share"),
        SideResult(
            name="fetches that a kernel waited for",
            value=statistics.median(each.fetched_on_the_path for each in auto),
            unit="share",
        ),
    ]
    for metric in (ROWS_AWAITED, FETCHED, LOADED):
        seconds = statistics.median(each.mean(metric) for each in auto)
        found.append(SideResult(name=f"{metric}, Workers", value=1e3 * seconds, unit="ms"))
    for node in (GENERATE, TRAIN):
        slower = statistics.median(b.seconds(node) / a.seconds(node) for a, b in pairs)
        found.append(
            SideResult(name=f"time/{node}, side by side / alone", value=slower, unit="ratio")
        )
    for where, runs in (("one", one), ("Workers", auto)):
        speed = statistics.median(each.samples_per_second for each in runs)
        found.append(SideResult(name=f"samples/s, {where}", value=speed, unit="rows/s"))
        found.append(
            SideResult(name=f"time/step, {where}", value=1e3 * BATCH * N / speed, unit="ms")
        )
        for node in (GENERATE, TRAIN):
            seconds = statistics.median(each.seconds(node) for each in runs)
            found.append(SideResult(name=f"time/{node}, {where}", value=1e3 * seconds, unit="ms"))
    return found


def main(*, quick: bool = False, json: Path | None = None, pairs: int = 5) -> None:
    """Measure.

    Args:
        quick: two pairs of few Steps; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        pairs: how often both are run.
    """
    pairs, steps = (2, 10) if quick else (pairs, 40)
    found: dict[Mode, list[Overlap]] = {"one": [], "auto": []}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        reward_fn = prepare(folder, WORDS)
        for seed in range(pairs):
            order: tuple[Mode, Mode] = ("one", "auto") if seed % 2 == 0 else ("auto", "one")
            for mode in order:
                found[mode].append(measured(folder, reward_fn, mode, steps, seed))
        one = plan(the_graph(folder, reward_fn, 0), options_of(folder, "one", steps, 0))
        auto = plan(the_graph(folder, reward_fn, 1), options_of(folder, "auto", steps, 0))
        timing = durations_of(one, found["one"])
        prediction = predicted(one, timing, steps) / predicted(auto, timing, steps)
    lines, where = results(found["one"], found["auto"], prediction), machine()
    show("generation beside training", lines, where)
    if json is not None:
        write_json(json, lines, where)


if __name__ == "__main__":
    tyro.cli(main)
