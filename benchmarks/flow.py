"""What keeps devices busy in a Step, each against what it replaces: real runs and `simulate`.

    python -m benchmarks.flow [COMPARISON ...] [--quick] [--json FILE]

Owns: the comparisons, their goals, and what is told of them. Does not own: runs, turns and
predictions (flow_runs.py), the Model and its data (settings.py), how results are shown (report.py).

The Model and the lengths of the answers are those of the long-tailed setting against TRL: p50 8,
p90 26 tokens, which the learning rate is too small to change; but they are cut at 128 tokens, as
the tail is what this is about. For slots few rows make a Step, so that a decode step costs about
the same whatever its rows are, as on a device. Each kernel has one thread; generation and training
are in different processes, on two cores.

spread         the answers of one prompt in two replicas, against one that has them all; lag 0
ordered        `--stream ordered` against `off`; lag 0
slots          lag 1 with rows bound as slots fall free, against chunks bound at their admission
reward_lag     lag 1 with a reward that takes a tenth of a Step, against none
reward_stream  the same of `--stream ordered`; lag 0

Lines in FILE that are of other comparisons stay. Where others share the machine, `--folder` keeps
runs and profiles: with more `--turns` than before only the further ones are run.
"""

from __future__ import annotations

import json as json_
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from benchmarks.flow_runs import FlowSide, FlowTurns, step_rows, take_turns
from benchmarks.report import SideResult, machine, show, write_json
from benchmarks.rewards import even_share
from benchmarks.settings import SETTINGS, Run, prepare
from engine.plan.options import RunOptions
from graphs.grpo import grpo
from operators.rewards import RewardFn

SETTING = "long_tail"
MAX_TOKENS = 128
GOAL = 0.85
"""Measured ratio over predicted ratio."""
LEAST = 0.98
"""Measured speed over that of what is replaced."""
LEFT = 0.02
"""Share of a Step that a reward may leave of itself."""
ROW_SECONDS = 0.0002
"""Of the slow reward: with 256 rows about a tenth of a Step."""
PART_TOKENS = 768
"""About a fifth of a Step of 256 rows: on two cores each part takes 15 to 20 ms of them beside what
nodes compute, so that eighths gain nothing.
"""
_IN_PROCESSES: Mapping[str, str] = {
    "rollout": "generator",
    "score": "scorer",
    "train_policy": "trainer",
}


def slow_even_share(completions: list[str], **columns: Any) -> list[float]:
    """The same reward after a wait, as for an answer of another machine."""
    time.sleep(ROW_SECONDS * len(completions))
    return even_share(completions, **columns)


Sides = Callable[[Run], tuple[FlowSide, FlowSide]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowComparison:
    """sides: what is replaced, and what is tried. has_reward: they differ in a slow reward."""

    name: str
    sides: Sides
    has_reward: bool = False


def _make_side(
    prepared: Run,
    name: str,
    *,
    batch: int,
    n: int,
    max_lag: int = 0,
    reward_fn: RewardFn = even_share,
    **options: Any,
) -> FlowSide:
    graph = grpo(
        prepared.model_dir,
        prepared.data,
        reward_fn,
        n=n,
        batch=batch,
        max_tokens=MAX_TOKENS,
        lr=prepared.lr,
        max_lag=max_lag,
    )
    usual: dict[str, Any] = {"threads": 1, "progress": False, "samples_every": 4}
    return FlowSide(name=name, graph=graph, options=RunOptions(**usual | options))


def _spread_sides(prepared: Run) -> tuple[FlowSide, FlowSide]:
    side = partial(_make_side, prepared, batch=1, n=256)
    whole = side("whole", pin={"rollout": "g0"})
    replicas: dict[str, Any] = {"replicas": {"rollout": 2}, "pin": {"rollout": "g0,g1"}}
    return whole, side("spread", spread={"rollout": 2}, **replicas)


def _usual(prepared: Run, batch: int = 64) -> Callable[..., FlowSide]:
    return partial(_make_side, prepared, pin=dict(_IN_PROCESSES), batch=batch, n=4)


def _ordered_sides(prepared: Run) -> tuple[FlowSide, FlowSide]:
    side = _usual(prepared)
    return side("off"), side("ordered", stream="ordered", part_tokens=PART_TOKENS)


def _slots_sides(prepared: Run) -> tuple[FlowSide, FlowSide]:
    side = partial(_usual(prepared, batch=16), max_lag=1)
    return side("chunks", chunks={"rollout": 1}), side("slots")


def _reward_lag_sides(prepared: Run) -> tuple[FlowSide, FlowSide]:
    side = partial(_usual(prepared), max_lag=1)
    return side("without"), side("with", reward_fn=slow_even_share)


def _reward_stream_sides(prepared: Run) -> tuple[FlowSide, FlowSide]:
    side = partial(_usual(prepared), stream="ordered", part_tokens=PART_TOKENS)
    return side("without"), side("with", reward_fn=slow_even_share)


COMPARISONS = (
    FlowComparison(name="spread", sides=_spread_sides),
    FlowComparison(name="ordered", sides=_ordered_sides),
    FlowComparison(name="slots", sides=_slots_sides),
    FlowComparison(name="reward_lag", sides=_reward_lag_sides, has_reward=True),
    FlowComparison(name="reward_stream", sides=_reward_stream_sides, has_reward=True),
)


def results(of: FlowComparison, turns: FlowTurns) -> list[SideResult]:
    """All numbers of one comparison; what is measured is a median."""
    lines = _reward_lines(turns) if of.has_reward else _gain_lines(turns)
    milliseconds = {
        "Step, replaced": median(turns.replaced),
        "Step, tried": median(turns.tried),
        "Step, replaced, predicted": turns.replaced_expected,
        "Step, tried, predicted": turns.tried_expected,
    }
    for name, seconds in milliseconds.items():
        lines.append(SideResult(name=name, value=1e3 * seconds, unit="ms"))
    return [
        SideResult(
            name=f"{of.name}: {line.name}",
            value=line.value,
            unit=line.unit,
            goal=line.goal,
            least=line.least,
        )
        for line in lines
    ]


def _gain_lines(turns: FlowTurns) -> list[SideResult]:
    measured, predicted = turns.measured, turns.predicted
    lines = [
        SideResult(name="measured", value=measured, unit="ratio", goal=LEAST),
        SideResult(name="measured, least", value=min(turns.ratios), unit="ratio"),
        SideResult(name="measured, greatest", value=max(turns.ratios), unit="ratio"),
        SideResult(name="predicted", value=predicted, unit="ratio"),
        SideResult(
            name="measured / predicted", value=measured / predicted, unit="share", goal=GOAL
        ),
    ]
    if predicted > 1.0:
        gain = (measured - 1.0) / (predicted - 1.0)
        lines.append(SideResult(name="gain of what is predicted", value=gain, unit="share"))
    return lines


def _reward_lines(turns: FlowTurns) -> list[SideResult]:
    shares: list[float] = []
    for folder in turns.tried_folders:
        for row in step_rows(folder):
            # Rows of a Step that were generated early were scored in the Step before.
            shares.append(row.get("time/score", 0.0) / row["time/step"])
    left, expected = 1.0 - turns.measured, 1.0 - turns.predicted
    return [
        SideResult(name="the reward's own time", value=median(shares), unit="share of a Step"),
        SideResult(name="left", value=left, unit="share of a Step", goal=LEFT, least=False),
        SideResult(name="left, predicted", value=expected, unit="share of a Step"),
    ]


def keep_others(path: Path, names: Sequence[str]) -> list[SideResult]:
    """Lines of the file that are of other comparisons."""
    if not path.exists():
        return []
    lines: list[SideResult] = []
    for line in json_.loads(path.read_text()):
        if line["name"].partition(":")[0] not in names:
            least = line["holds"] is None or (line["value"] >= line["goal"]) == line["holds"]
            sizes = {key: line[key] for key in ("name", "value", "unit", "goal")}
            lines.append(SideResult(**sizes, least=least))
    return lines


def main(
    names: tyro.conf.Positional[tuple[str, ...]] = tuple(each.name for each in COMPARISONS),
    *,
    quick: bool = False,
    json: Path | None = None,
    turns: int = 5,
    steps: int = 24,
    folder: Path | None = None,
) -> None:
    """Measure.

    Args:
        names: of the comparisons.
        quick: one turn of few Steps; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        turns: how often both sides run.
        steps: Steps of a run that count.
        folder: for runs and profiles, which are not made again; none: nothing stays.
    """
    turns, steps = (1, 4) if quick else (turns, steps)
    prepared, where = prepare(SETTINGS[SETTING]), machine()
    kept = keep_others(json, names) if json is not None else []
    lines: list[SideResult] = []
    for comparison in COMPARISONS:
        if comparison.name not in names:
            continue
        with _keep_runs(folder) as where_to:
            both = comparison.sides(prepared)
            runs = where_to / comparison.name
            paired = take_turns(*both, runs, turns=turns, steps=steps, say=_say)
            lines += results(comparison, paired)
        if json is not None:
            # At once: whoever is stopped keeps what was measured.
            write_json(json, [*kept, *lines], where)
    show("devices kept busy in a Step", lines, where)


@contextmanager
def _keep_runs(folder: Path | None) -> Iterator[Path]:
    """A folder for runs: this one, or one that goes."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as created:
        yield Path(created)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    tyro.cli(main)
