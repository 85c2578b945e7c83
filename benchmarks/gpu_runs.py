"""Real runs on one card whose Workers take turns, or share it, and what their Steps consist of.

Owns: the run, and seconds by Step from metrics and the timeline. Does not own: the Models
(gpu_models.py), goals (gpu_grpo.py, gpu_weights.py).

A run ends as its last Step does, without the checkpoint that would follow: to write 20 GB says
nothing of a Step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from dataflow.graph import Graph
from engine.api import run
from engine.keep.trace.timeline import read_trace
from engine.plan.options import RunOptions

GENERATING, TRAINING = "gen", "train"
PINS: Mapping[str, str] = {
    "prompts": GENERATING,
    "rollout": GENERATING,
    "score": GENERATING,
    "advantage": GENERATING,
    "train_policy": TRAINING,
}
"""Two Workers."""
_WARM = 1
"""Steps that do not count: they compile, and capture graphs of kernels."""
_NODE_SECONDS, _STEP_SECONDS = "time/", "time/step"
_OUTSIDE_SECONDS = "time/outside"
_LOADED_SECONDS = "weights/policy/offered_to_loaded"
_NOT_NODES = ("step", "outside", "engine", "record", "checkpoint")
"""What `time/` is followed by, too, in docs/metrics.md."""


class _EnoughSteps(Exception):
    """Ends a run as its last Step has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSpan:
    """Something that a Worker did. args: of the span, such as a version."""

    worker: str
    node: str
    name: str
    start: float
    end: float
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRun:
    """metrics: of each Step that counts."""

    metrics: Sequence[Mapping[str, float]]
    spans: Sequence[CardSpan]

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a Step."""
        return fmean(row[_STEP_SECONDS] for row in self.metrics)

    def node_seconds(self) -> dict[str, float]:
        """Node -> mean seconds of a Step, in which it had its Worker."""
        names = {name for row in self.metrics for name in row if name.startswith(_NODE_SECONDS)}
        means: dict[str, float] = {}
        for name in sorted(names):
            node = name.removeprefix(_NODE_SECONDS)
            if node not in _NOT_NODES:
                means[node] = fmean(row.get(name, 0.0) for row in self.metrics)
        return means

    def outside_seconds(self) -> float:
        """Mean seconds of a Step in which no kernel was at work: of a run that does not tell them,
        what its nodes did not take.
        """
        if all(_OUTSIDE_SECONDS in row for row in self.metrics):
            return fmean(row[_OUTSIDE_SECONDS] for row in self.metrics)
        return max(0.0, self.step_seconds - sum(self.node_seconds().values()))

    def medians(self, prefix: str) -> dict[str, float]:
        """Metric -> its median over Steps, of those whose names begin so."""
        names = {name for row in self.metrics for name in row if name.startswith(prefix)}
        medians: dict[str, float] = {}
        for name in sorted(names):
            medians[name] = median(row[name] for row in self.metrics if name in row)
        return medians

    def other_seconds(self) -> dict[str, float]:
        """Mean seconds of a Step in which a Worker did something else than its kernels' rows, by
        the first word of it: sleep, wake, offer, load, probe.
        """
        sums: dict[str, float] = {}
        for span in self.spans:
            if span.name != span.node:
                word = span.name.partition(" ")[0]
                sums[word] = sums.get(word, 0.0) + span.end - span.start
        return {word: seconds / len(self.metrics) for word, seconds in sorted(sums.items())}

    def offered_to_loaded(self) -> list[float]:
        """Seconds of each version from its offer until its reader has loaded it: as metrics say; of
        a run without, from the beginning of the offer's span to the end of the load's.
        """
        measured = [row[_LOADED_SECONDS] for row in self.metrics if _LOADED_SECONDS in row]
        return measured or self._spans_to_loaded()

    def _spans_to_loaded(self) -> list[float]:
        offered = {
            span.args.get("version"): span.start
            for span in self.spans
            if span.name.startswith("offer ")
        }
        durations: list[float] = []
        for span in self.spans:
            begun = offered.get(span.args.get("version"))
            if span.name.startswith("load ") and begun is not None:
                durations.append(span.end - begun)
        return durations


def run_on_card(
    graph: Graph,
    folder: Path,
    *,
    steps: int,
    turns: bool,
    each: Callable[[CardRun], None] = lambda card_run: None,
) -> CardRun:
    """Run so many Steps that count after one that does not. turns: whether generation and training
    take turns on the card, one asleep; else both stay on it. each: called after a Step that counts
    with all of them so far, without spans.
    """
    rows: list[Mapping[str, float]] = []

    def count_steps(row: Mapping[str, float]) -> None:
        rows.append(dict(row))
        if len(rows) > _WARM:
            each(CardRun(metrics=rows[_WARM:], spans=()))
        if len(rows) == _WARM + steps:
            raise _EnoughSteps

    name = "turns" if turns else "beside"
    options = RunOptions(
        steps=_WARM + steps + 1,
        name=name,
        runs=folder,
        overwrite=True,
        workers="apart",
        pin=PINS,
        turns=((GENERATING, TRAINING),) if turns else (),
        threads=1,
        samples_every=10**9,
        checkpoint_minutes=0.0,
        progress=False,
    )
    with contextlib.suppress(_EnoughSteps):
        run(graph, options, on_step=[count_steps])
    spans = list(_read_spans(folder / name))
    # Steps end one after another with their training, at lag 0.
    ends = [span.end for span in spans if span.name == "train_policy"]
    begun = sorted(ends)[_WARM - 1]
    counted_spans = [span for span in spans if span.start >= begun]
    return CardRun(metrics=rows[_WARM:], spans=counted_spans)


def _read_spans(folder: Path) -> Iterator[CardSpan]:
    """What Workers did, in seconds of the timeline's clock."""
    (path,) = (folder / "trace").iterdir()
    events = read_trace(path)
    workers: dict[int, str] = {}
    nodes: dict[int, str] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_name":
            workers[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "M":
            nodes[event["tid"]] = event["args"]["name"]
    for event in events:
        if event["ph"] != "X" or workers[event["pid"]] not in (GENERATING, TRAINING):
            continue
        start = event["ts"] / 1e6
        yield CardSpan(
            worker=workers[event["pid"]],
            node=nodes[event["tid"]],
            name=event["name"],
            start=start,
            end=start + event["dur"] / 1e6,
            args=event.get("args", {}),
        )
