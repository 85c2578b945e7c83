"""Two ways to run one graph, in turns, and what `simulate` says of both by rates of these runs.

Owns: a side of a comparison, its runs, the profile between them, both ratios. Does not own: which
sides there are, the goals (flow.py).

A turn runs both sides, the first of them now one and now the other. Runs and the profile stay in a
folder, and what is there is not measured again: so turns can be added later. The profile is of the
side that is tried, with a short run of it, so that passes take what they take in that run; lengths,
and seconds of functions, are those of the runs before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from json import loads
from pathlib import Path
from statistics import fmean, median

from benchmarks.predicted_runs import SteppedGraph
from engine.api import run
from engine.keep.metrics.metric_lines import METRICS
from engine.plan.cost.profile import Profile, read_profile, write_profile
from engine.predict.profile.profiler import ProfileRequest, measure_profile
from engine.predict.row_statistics import seen_rows
from engine.simulation.prediction_run import predict

WARM = 3
"""Steps that do not count."""
_REQUEST = ProfileRequest(quick=True, repeats=3, longest=0.5, steps=6, accept_busy=True)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSide(SteppedGraph):
    """A graph whose runs take turns with those of another."""

    def run_turn(self, folder: Path, turn: int, steps: int) -> Path:
        """Run so many Steps after the warm-up, if such a run is not there; returns its folder."""
        name = f"{self.name}-{turn}"
        if (folder / name / METRICS).exists() and len(step_rows(folder / name)) == steps:
            return folder / name
        options = replace(self.options, steps=WARM + steps, seed=turn, runs=folder, name=name)
        return run(self.graph, replace(options, overwrite=True)).folder

    def simulate(self, profile: Profile, seen: Path, steps: int) -> float:
        """Simulated seconds of a Step, with rows as those of this run."""
        rows = seen_rows(str(seen))
        prediction = predict(
            self.plan,
            steps=WARM + steps,
            lengths=rows,
            seconds=rows.seconds if "score" in rows.seconds else None,
            profile=profile,
            spans=False,
        )
        seconds: list[float] = []
        for step in prediction.steps:
            if step.step > WARM:
                seconds.append(step.end - step.start)
        return usual_seconds(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowTurns:
    """Seconds of a Step. replaced, tried: as measured, turn by turn; expected: as simulated."""

    replaced: Sequence[float]
    tried: Sequence[float]
    replaced_expected: float
    tried_expected: float
    tried_folders: Sequence[Path]

    @property
    def ratios(self) -> list[float]:
        """How often the tried way makes a Step while the replaced one makes one, turn by turn."""
        pairs = zip(self.replaced, self.tried, strict=True)
        return [replaced / tried for replaced, tried in pairs]

    @property
    def measured(self) -> float:
        """Their median."""
        return median(self.ratios)

    @property
    def predicted(self) -> float:
        """The same as simulated."""
        return self.replaced_expected / self.tried_expected


def take_turns(
    replaced: FlowSide, tried: FlowSide, folder: Path, *, turns: int, steps: int, say: Say
) -> FlowTurns:
    """Run both sides so often; profile the tried one half way, if that is still to be done."""
    folders: dict[str, list[Path]] = {replaced.name: [], tried.name: []}
    rates = folder / "profile.json"
    profile: Profile | None = read_profile(rates) if rates.exists() else None
    for turn in range(turns):
        order = (replaced, tried) if turn % 2 == 0 else (tried, replaced)
        for side in order:
            folders[side.name].append(side.run_turn(folder, turn, steps))
            say(f"{side.name}: {1e3 * step_seconds(folders[side.name][-1]):.0f} ms")
        if profile is None and 2 * (turn + 1) >= turns:
            made = measure_profile(tried.graph, [tried.plan], tried.options, _REQUEST, say)
            profile = made.profile
            write_profile(rates, profile)
    assert profile is not None

    def expect(side: FlowSide) -> float:
        # Lengths alone differ from run to run: their mean is that of all runs.
        return fmean(side.simulate(profile, each, steps) for each in folders[side.name])

    return FlowTurns(
        replaced=[step_seconds(each) for each in folders[replaced.name]],
        tried=[step_seconds(each) for each in folders[tried.name]],
        replaced_expected=expect(replaced),
        tried_expected=expect(tried),
        tried_folders=folders[tried.name],
    )


def step_seconds(folder: Path) -> float:
    """Usual seconds of a Step of a run after the warm-up."""
    return usual_seconds([row["time/step"] for row in step_rows(folder) if "time/step" in row])


def step_rows(folder: Path) -> list[dict[str, float]]:
    """The metrics of each Step after the warm-up."""
    rows: list[dict[str, float]] = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = loads(line)
        if row["step"] > WARM:
            rows.append(row)
    return rows


def usual_seconds(seconds: Sequence[float]) -> float:
    """The median of the means of a Step and the next: with overlap a long and a short one often
    take turns.
    """
    return median(fmean(two) for two in pairwise(seconds))
