"""Runs and profiles that take turns, and what a Step is said to take beside what it took.

Owns: the turns, and both medians. Does not own: the graphs (predicted.py, predicted_cases.py), the
prediction (engine/simulation).

A machine that is shared is now faster and now slower for minutes: so each profile stands between
two runs, and the median of what `simulate` says after a profile stands beside the median of what
the runs before and after it took. Rows are as long, and selections keep as many of them, as in
these runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from json import loads
from pathlib import Path
from statistics import mean, median

from benchmarks.report import SideResult
from dataflow.graph import Graph
from engine.api import plan, run
from engine.keep.run_measurements import node_seconds
from engine.plan.cost.profile import Profile
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.predict.profile.profiler import ProfileRequest, measure_profile
from engine.predict.row_statistics import seen_rows
from engine.simulation.prediction_run import predict

WARM = 2
"""Steps that do not count."""
STEPS = 8
_REQUEST = ProfileRequest(quick=True, repeats=3, longest=1.0, steps=STEPS - WARM)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedGraph:
    """A graph as it is run. options: without steps and names."""

    name: str
    graph: Graph
    options: RunOptions
    plan: Plan = field(init=False)

    def __post_init__(self) -> None:
        planned = plan(self.graph, self.options)
        assert isinstance(planned, Plan)
        object.__setattr__(self, "plan", planned)

    def ran(self, folder: Path, turn: int) -> Path:
        """Run it; returns the run's folder."""
        name = f"{self.name} {turn}".replace(" ", "-").replace(",", "").replace("=", "")
        return run(self.graph, replace(self.options, steps=STEPS, runs=folder, name=name)).folder


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Of a Step, as measured and as predicted, in each turn."""

    measured: Sequence[float]
    predicted: Sequence[float]

    @property
    def error(self) -> float:
        """Percent that the median prediction is off."""
        return 100.0 * abs(median(self.predicted) / median(self.measured) - 1.0)

    def results(self, where: str, goal: float) -> Iterator[SideResult]:
        """The medians and the error."""
        row = partial(SideResult, goal=None, least=False)
        yield row(name=f"{where}: seconds measured", value=1e3 * median(self.measured), unit="ms")
        yield row(name=f"{where}: predicted", value=1e3 * median(self.predicted), unit="ms")
        yield SideResult(name=f"{where}: error", value=self.error, unit="%", goal=goal, least=False)


def in_turns(
    graphs: Sequence[SteppedGraph], folder: Path, *, rounds: int
) -> Mapping[str, StepSeconds]:
    """Run all, profile the first, run all, and so on. The profile of the first holds for all."""
    first = graphs[0]
    measured: dict[str, list[float]] = {each.name: [] for each in graphs}
    predicted: dict[str, list[float]] = {each.name: [] for each in graphs}
    before = {each.name: each.ran(folder, 0) for each in graphs}
    for turn in range(1, rounds + 1):
        result = measure_profile(
            first.graph, [first.plan], first.options, _REQUEST, lambda what: None
        )
        after = {each.name: each.ran(folder, turn) for each in graphs}
        for each in graphs:
            pair = before[each.name], after[each.name]
            measured[each.name].append(_measured(pair))
            predicted[each.name].append(_expected(each.plan, result.profile, pair))
            _show(each.name, measured[each.name][-1], predicted[each.name][-1], pair[1])
        before = after
    return {
        each.name: StepSeconds(measured=measured[each.name], predicted=predicted[each.name])
        for each in graphs
    }


def _show(name: str, measured: float, predicted: float, folder: Path) -> None:
    nodes = {node: round(seconds, 4) for node, seconds in node_seconds(folder).items()}
    text = f"{name}: measured {measured:.4f}, predicted {predicted:.4f}; {nodes}"
    print(text, file=sys.stderr, flush=True)


def _measured(folders: Sequence[Path]) -> float:
    """Median seconds of a Step of these runs, after the warm-up."""
    return median(seconds for folder in folders for seconds in _in_pairs(_step_seconds(folder)))


def _expected(of: Plan, profile: Profile, folders: Sequence[Path]) -> float:
    """The same as `simulate` says, with rows as those of these runs: of each the mean."""
    return mean(_simulated(of, profile, folder) for folder in folders)


def _simulated(of: Plan, profile: Profile, folder: Path) -> float:
    rows = seen_rows(str(folder))
    prediction = predict(
        of, steps=STEPS, lengths=rows, profile=profile, kept=rows.kept, spans=False
    )
    return median(_in_pairs([s.end - s.start for s in prediction.steps if s.step > WARM]))


def _in_pairs(seconds: Sequence[float]) -> list[float]:
    """Means of a Step and the next: with overlap a long Step and a short one often take turns, and
    their median is one or the other.
    """
    return [mean(two) for two in pairwise(seconds)]


def _step_seconds(folder: Path) -> list[float]:
    """Seconds of each Step after the warm-up."""
    lines = map(loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["time/step"] for row in lines if row["step"] > WARM and "time/step" in row]
