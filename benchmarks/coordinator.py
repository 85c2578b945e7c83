"""The coordinator alone: CPU time of an event, of a cohort, and bytes told to a rank.

    python -m benchmarks.coordinator [--quick] [--json FILE] [--picture-to FILE]

Owns: what is measured, and the goals. Does not own: the Workers that answer (coordinator_world.py),
the picture (coordinator_picture.py), how results are shown (report.py).

Each event that brings rows brings one. `alone`: it is handled by itself; else so many messages wait
whenever the coordinator looks. The curves have Steps of 10,000 prompts with 4 samples on more and
more Workers; each has a chunk at a time, of 5,000 at most: two prompts each, so that of 10,000
Workers half have one under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import tyro

from benchmarks.coordinator_picture import picture
from benchmarks.coordinator_world import CoordinatorWorld, WorldLoad
from benchmarks.report import SideResult, machine, show, write_json
from engine.run.control.wire import encode_message

TOGETHER = {"alone": 1, "32 together": 32, "128 together": 128}
GOALS = {"alone": 120.0, "32 together": 50.0, "128 together": 35.0}
"""Microseconds an event."""
CASES = {
    "512 x 16": WorldLoad(prompts=512, samples=16, steps=4),
    "8,192 x 16": WorldLoad(prompts=8192, samples=16),
    "8,192 x 16, bound late": WorldLoad(prompts=8192, samples=16, late=True),
}
WORKERS = (8, 64, 512, 4096, 10_000)
MOST_DEARER, FIRST = 1.5, 64
"""An event with the most Workers, in those of an event with this many."""
COHORT, COHORT_SECONDS = 10_000, 1.5
RANK_BYTES, ROW_BYTES = 256, 40
_QUICK = 12_000
"""Events of each case."""


def crowd(workers: int, prompts: int) -> WorldLoad:
    """A Step of the curves."""
    chunks = min(workers, prompts // 2)
    return WorldLoad(prompts=prompts, samples=4, workers=workers, chunks=chunks)


def cases(most: int) -> Iterator[SideResult]:
    """Events on 64 Workers, with their goals."""
    for name, load in CASES.items():
        for how, together in TOGETHER.items():
            each = CoordinatorWorld(load, together).run(most).each
            yield SideResult(
                name=f"{name}/{how}", value=each, unit="us/event", goal=GOALS[how], least=False
            )


def in_turns(prompts: int) -> Iterator[SideResult]:
    """Pairs of Workers that take turns with a device: with the most of them, and with few."""
    for how, together in TOGETHER.items():
        each = {
            workers: CoordinatorWorld(
                replace(crowd(workers // 2, prompts), workers=workers, turns=True), together
            )
            .run()
            .each
            for workers in (FIRST, WORKERS[-1])
        }
        for workers, microseconds in each.items():
            name = f"{workers // 2:,} devices with two Workers each/{how}"
            yield SideResult(name=name, value=microseconds, unit="us/event")
        yield SideResult(
            name=f"{WORKERS[-1] // 2:,} such devices to {FIRST // 2}/{how}",
            value=each[WORKERS[-1]] / each[FIRST],
            unit="ratio",
            goal=MOST_DEARER,
            least=False,
        )


def curves(prompts: int) -> dict[str, list[tuple[int, float]]]:
    """(Workers, microseconds an event), by how many wait together."""
    found: dict[str, list[tuple[int, float]]] = {how: [] for how in TOGETHER}
    for workers in WORKERS:
        for how, together in TOGETHER.items():
            spent = CoordinatorWorld(crowd(workers, prompts), together).run()
            found[how].append((workers, spent.each))
    return found


def of_curves(found: dict[str, list[tuple[int, float]]]) -> Iterator[SideResult]:
    """Each point, and how much dearer an event is with the most Workers."""
    for how, points in found.items():
        for workers, each in points:
            yield SideResult(name=f"{workers:,} Workers/{how}", value=each, unit="us/event")
        each = dict(points)
        yield SideResult(
            name=f"{WORKERS[-1]:,} Workers to {FIRST}/{how}",
            value=each[WORKERS[-1]] / each[FIRST],
            unit="ratio",
            goal=MOST_DEARER,
            least=False,
        )


def cohort(size: int) -> float:
    """CPU seconds of the dearest turn where a cohort of so many chunks gets as many replicas."""
    load = WorldLoad(prompts=size, samples=2, workers=size, chunks=size)
    return CoordinatorWorld(load, 128).run(2 * size).longest


def told_to_a_rank(prompts: int, ranks: int) -> SideResult:
    """Bytes of what one rank is told of a Step: of all ranks, those that are nearest to the goal or
    farthest beyond.
    """
    world = CoordinatorWorld(WorldLoad(prompts=prompts, samples=16, ranks=ranks), 128)
    world.run()
    most = {told.worker: RANK_BYTES + ROW_BYTES * len(told.keys) for told in world.assignments}
    sizes = {told.worker: len(encode_message(told)) for told in world.assignments}
    rank = max(sizes, key=lambda worker: sizes[worker] - most[worker])
    return SideResult(
        name=f"told to one of {ranks:,} ranks of a Step of {prompts:,} x 16",
        value=sizes[rank],
        unit="bytes",
        goal=most[rank],
        least=False,
    )


def main(*, quick: bool = False, json: Path | None = None, picture_to: Path | None = None) -> None:
    """Measure.

    Args:
        quick: the first events of each case, and smaller sizes of the rest; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        picture_to: also draw the curves there, as SVG.
    """
    most = _QUICK if quick else 1 << 62
    lines = curves(400 if quick else 10_000)
    size, prompts, ranks = (2000, 128, 16) if quick else (COHORT, 4096, 1024)
    found = [
        *cases(most),
        *of_curves(lines),
        *in_turns(400 if quick else 10_000),
        SideResult(
            name=f"a cohort of {size:,} chunks on {size:,} replicas",
            value=cohort(size),
            unit="s",
            goal=COHORT_SECONDS,
            least=False,
        ),
        told_to_a_rank(prompts, ranks),
    ]
    where = machine()
    show("coordinator", found, where)
    if json is not None:
        write_json(json, found, where)
    if picture_to is not None:
        picture_to.write_text(picture(lines))


if __name__ == "__main__":
    tyro.cli(main)
