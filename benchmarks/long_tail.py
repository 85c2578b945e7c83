"""Against TRL on long-tailed answers: layouts of two cores, and how near they are to their bound.

    python -m benchmarks.long_tail [--quick] [--json FILE]

Owns: which layouts are compared, the goals, what is reported. Does not own: the setting
(settings.py), the layouts (our_side.py), the bound (two_cores.py), TRL's side (sides.py).

The bound and all sides are measured once in each round, in an order that turns, so that a slow
minute affects all of them; shares and ratios are medians over rounds. TRL is synchronous: `one` and
`halves` are too and compare like with like; `lag1` trains rows that are up to a version old.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from benchmarks.report import SideResult, machine, show, write_json
from benchmarks.settings import SETTINGS, Run, prepare, shortened
from benchmarks.sides import ComparedSide, Measured, OurSide, TrlSide
from benchmarks.two_cores import StepTimes, measure_step

SETTING = "long_tail"
SYNCHRONOUS, LAGGED = ("one", "halves"), ("lag1",)
PEER = "trl"
GOAL = 0.9
"""The bound's milliseconds of a Step over those of the best synchronous layout."""
SIDES: tuple[ComparedSide, ...] = (
    *(OurSide(name, name) for name in (*SYNCHRONOUS, *LAGGED)),
    TrlSide(),
)
BOUND_ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRound:
    """What was measured within one round, by the name of the side."""

    bound: StepTimes
    sides: dict[str, Measured]

    def step_ms(self, side: str, rows: int) -> float:
        """The mean of a side's Step of so many rows."""
        return 1e3 * rows / self.sides[side].samples_per_second


def measure_rounds(run: Run, count: int) -> list[LayoutRound]:
    """Measure so many rounds, each with its own seed."""
    rounds: list[LayoutRound] = []
    for number in range(count):
        order = SIDES if number % 2 == 0 else tuple(reversed(SIDES))
        seeded = replace(run, seed=run.seed + number)
        bound = measure_step(SETTING, BOUND_ROUNDS)
        rounds.append(
            LayoutRound(bound=bound, sides={side.name: side.run(seeded) for side in order})
        )
    return rounds


def list_results(rounds: Sequence[LayoutRound], rows: int) -> list[SideResult]:
    """All numbers, for Steps of so many rows."""
    bounds = [each.bound for each in rounds]
    results = [
        _median("bound/half_generation_ms", [b.half_generation for b in bounds], "ms"),
        _median("bound/half_training_ms", [b.half_training for b in bounds], "ms"),
        _median("bound/all_generation_ms", [b.all_generation for b in bounds], "ms"),
        _median("bound/all_training_ms", [b.all_training for b in bounds], "ms"),
        _median("bound/synchronous_ms", [b.synchronous for b in bounds], "ms"),
        _median("bound/lagged_ms", [b.lagged for b in bounds], "ms"),
    ]
    for side in SIDES:
        name = side.name
        its = [each.sides[name] for each in rounds]
        results += [
            _median(f"{name}/step_ms", [each.step_ms(name, rows) for each in rounds], "ms"),
            _median(f"{name}/generation_ms", [each.generation_ms for each in its], "ms"),
            _median(f"{name}/train_ms", [each.train_ms for each in its], "ms"),
            _median(
                f"{name}/completion_tokens", [each.completion_tokens for each in its], "tokens"
            ),
        ]
    for name in (*SYNCHRONOUS, *LAGGED):
        ratios = [each.step_ms(PEER, rows) / each.step_ms(name, rows) for each in rounds]
        results.append(_median(f"{name}_to_trl/ratio", ratios, "x"))
    return results + _list_shares(rounds, rows)


def _list_shares(rounds: Sequence[LayoutRound], rows: int) -> list[SideResult]:
    """How much of its bound each layout reaches; the best of the synchronous ones has the goal."""
    shares: dict[str, float] = {}
    for name in SYNCHRONOUS:
        of_rounds = [each.bound.synchronous / each.step_ms(name, rows) for each in rounds]
        shares[name] = statistics.median(of_rounds)
    best = max(shares, key=lambda name: shares[name])
    results: list[SideResult] = []
    for name, share in shares.items():
        goal = GOAL if name == best else None
        results.append(SideResult(name=f"{name}/of_bound", value=share, unit="share", goal=goal))
    for name in LAGGED:
        lagged = [each.bound.lagged / each.step_ms(name, rows) for each in rounds]
        results.append(_median(f"{name}/of_bound", lagged, "share"))
    bound_ratios = [each.step_ms(PEER, rows) / each.bound.synchronous for each in rounds]
    results.append(_median("bound_to_trl/ratio", bound_ratios, "x"))
    return results


def _median(name: str, numbers: Sequence[float], unit: str) -> SideResult:
    return SideResult(name=name, value=statistics.median(numbers), unit=unit)


def main(*, rounds: int = 3, quick: bool = False, json: Path | None = None) -> None:
    """Compare.

    Args:
        rounds: how often the bound and each side are measured.
        quick: one round of few Steps: shows that it works; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    where = machine()
    run = prepare(SETTINGS[SETTING])
    rows = run.prompts_per_step * run.num_generations
    measured = measure_rounds(shortened(run) if quick else run, 1 if quick else rounds)
    results = list_results(measured, rows)
    show("long tail" + (", quick" if quick else ""), results, where)
    if json is not None:
        write_json(json, results, where)


if __name__ == "__main__":
    tyro.cli(main)
