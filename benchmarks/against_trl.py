"""GRPO samples per second against TRL on CPU: paired, alternating runs at equal updates.

    python -m benchmarks.against_trl [short demo long_tail] [--quick] [--json FILE]

Owns: the pairing, the goals and what is reported. Does not own: the settings
(settings.py), how a side runs (sides.py).

Both sides get the same model, data, reward, batch, lengths, learning rate, threads and one
update per batch. Each pair runs both, in alternating order, so that a slow minute of the
machine affects both; the ratio is the median over pairs.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Our side's goal in one setting."""

    ratio: float
    """Least samples/s relative to TRL."""
    slot_waste: float | None = None
    """Greatest share of decode slots wasted."""


GOALS = {
    "short": Goal(ratio=1.6),
    "demo": Goal(ratio=2.5),
    "long_tail": Goal(ratio=2.2, slot_waste=0.12),
}
SIDES: tuple[ComparedSide, ...] = (OurSide(), TrlSide())
"""The peer is last; each other side's ratio is to the last."""

Paired = list[dict[str, Measured]]
"""One entry per pair: what each side measured, by the side's name."""


def run_paired(sides: Sequence[ComparedSide], run: Run, pairs: int) -> Paired:
    """Every side once per pair, with the pair's own seed; the order rotates from pair to pair."""
    paired: Paired = []
    for pair in range(pairs):
        order = sides if pair % 2 == 0 else list(reversed(sides))
        seeded = replace(run, seed=run.seed + pair)
        paired.append({side.name: side.run(seeded) for side in order})
    return paired


def results(setting: str, sides: Sequence[ComparedSide], paired: Paired) -> list[SideResult]:
    """All numbers of one setting: each side's medians, then the ratios to the last side."""
    found = [
        result
        for side in sides
        for result in _of_side(f"{setting}/{side.name}", [p[side.name] for p in paired])
    ]
    peer = sides[-1].name
    for side in sides[:-1]:
        found += _against(setting, side.name, peer, paired)
    return found


def _of_side(prefix: str, runs: Sequence[Measured]) -> list[SideResult]:
    units = {
        "samples_per_second": "1/s",
        "tokens_per_second": "1/s",
        "step_ms": "ms",
        "generation_ms": "ms",
        "rollout_ms": "ms",
        "train_ms": "ms",
        "prompt_tokens": "tokens",
        "completion_tokens": "tokens",
        "slot_waste": "share",
        "reward": "mean",
    }
    return [
        SideResult(
            name=f"{prefix}/{name}",
            value=statistics.median(getattr(r, name) for r in runs),
            unit=unit,
        )
        for name, unit in units.items()
    ]


def _against(setting: str, name: str, peer: str, paired: Paired) -> list[SideResult]:
    goal = GOALS[setting]
    ratios = [pair[name].samples_per_second / pair[peer].samples_per_second for pair in paired]
    spread = f"{setting}/{name}_to_{peer}"
    found = [
        SideResult(
            name=f"{spread}/ratio", value=statistics.median(ratios), unit="x", goal=goal.ratio
        ),
        SideResult(name=f"{spread}/ratio_least", value=min(ratios), unit="x"),
        SideResult(name=f"{spread}/ratio_greatest", value=max(ratios), unit="x"),
    ]
    if goal.slot_waste is not None:
        waste = statistics.median(pair[name].slot_waste for pair in paired)
        found.append(
            SideResult(
                name=f"{spread}/waste", value=waste, unit="share", goal=goal.slot_waste, least=False
            )
        )
    return found


def main(
    settings: tyro.conf.Positional[tuple[str, ...]] = tuple(SETTINGS),
    *,
    pairs: int = 3,
    quick: bool = False,
    json: Path | None = None,
) -> None:
    """Compare in these settings.

    Args:
        settings: which of short, demo, long_tail.
        pairs: how many pairs of runs.
        quick: one pair of few Steps: shows that it works; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    where = machine()
    found: list[SideResult] = []
    for name in settings:
        run = prepare(SETTINGS[name])
        paired = run_paired(SIDES, shortened(run) if quick else run, 1 if quick else pairs)
        found += results(name, SIDES, paired)
    show("against TRL" + (", quick" if quick else ""), found, where)
    if json is not None:
        write_json(json, found, where)


if __name__ == "__main__":
    tyro.cli(main)
