"""How quickly a node is priced, and how near prices are to the schedules that they stand for.

    python -m benchmarks.price [--quick] [--json FILE]

Owns: the layouts that are priced, and the goals. Does not own: how results are shown (report.py).

CPU seconds count, so that others on the machine change little. *First*: every curve of a generation
is worked out on the way; *again*: it is there, as for another device or another search.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import tyro

from benchmarks.report import SideResult, machine, show, write_json
from dataflow.kernel import Layout
from engine.plan.cost.decode import DecodeBatch, schedule_decode
from engine.plan.cost.decode_curve import RowDistributions, curve_of_batch, time_curve
from engine.plan.cost.devices import Device, catalogue_place, device
from engine.plan.cost.distribution import lognormal
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import Work
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.models import Shape
from engine.plan.cost.node_price import NodeWork, node_cost
from engine.plan.joining_decode import PricedDecode
from engine.plan.row_lengths import RowLengths

LAYOUTS_A_SECOND = 20_000
ROWS_A_SECOND = 100_000
MOST_ERROR = 0.05
DEVICES = ("H100", "H200", "A100", "L40S", "H20")
MODEL = Sizes(
    parameters=7_615_616_512,
    shape=Shape(
        layers=28,
        hidden=3584,
        intermediate=18944,
        heads=28,
        kv_heads=4,
        head_dim=128,
        vocabulary=152064,
        context=32768,
        tied=False,
    ),
)
NO_ROWS = np.zeros(0, np.int64)


def work_of(kind: str) -> NodeWork:
    """512 prompts of 16 answers, of reasoning's lengths; each call is a work of its own."""
    return NodeWork(
        kind=kind,  # type: ignore[arg-type]
        most=Work(lengths=Lengths(prompt=1000, completion=20_000), prompts=512, rows=8192),
        lengths=RowDistributions(lognormal(300, 0.5, 1000), lognormal(3000, 0.9, 20_000)),
        samples=16,
    )


def decode_layouts(cache: int, *, quick: bool) -> list[tuple[Device, Layout]]:
    """Layouts of a generation, on every device. cache: bytes of each rank's, 0 for no limit."""
    replicas = (1, 2, 4, 8, 16, 32, 64, 128)
    layouts: list[tuple[Device, Layout]] = []
    choices = product(DEVICES, (1, 2, 4, 8), replicas, (32, 64, 128, 256, 512, 1024), (1, 2, 4))
    for name, tensor, replica_count, slots, spread in choices:
        budgets = (16384,) if quick else (8192, 16384, 32768, 65536, 131072, 262144, 524288)
        for budget in budgets:
            layout = Layout(
                replicas=replica_count,
                inner=tensor,
                slots=slots,
                spread=spread,
                tokens=budget,
                cache_bytes=cache,
            )
            layouts.append((device(name), layout))
    return layouts


def training_layouts() -> list[tuple[Device, Layout]]:
    """Layouts of a train node or a forward pass, on every device."""
    ranks = (1, 2, 4, 8, 16, 32, 64, 128)
    layouts: list[tuple[Device, Layout]] = []
    for name, tensor, data, shard in product(DEVICES, (1, 2, 4, 8), ranks, (True, False)):
        for budget in (8192, 16384, 32768):
            layout = Layout(data=data, tensor=tensor, shard=shard, tokens=budget)
            layouts.append((device(name), layout))
    return layouts


def rates(name: str, kind: str, layouts: list[tuple[Device, Layout]]) -> Iterator[SideResult]:
    """Layouts a second, first and again."""
    work = work_of(kind)
    for when in ("first", "again"):
        start = time.process_time()
        for where, layout in layouts:
            node_cost(MODEL, where, layout, work)
        rate = len(layouts) / (time.process_time() - start)
        goal = LAYOUTS_A_SECOND if when == "again" else None
        yield SideResult(
            name=f"{name}/{len(layouts):,} layouts, {when}", value=rate, unit="/s", goal=goal
        )


def errors(cases: int) -> list[SideResult]:
    """How far curves are from the schedules of the same rows, drawn at random."""
    draw = np.random.default_rng(0)
    errors: list[float] = []
    for _ in range(cases):
        rows, samples = int(draw.integers(64, 1500)), int(draw.choice([1, 4, 16]))
        answers = np.clip(draw.lognormal(6.0, draw.uniform(0, 1.5), rows), 1, 8000)
        prompts = np.repeat(draw.integers(1, 900, rows), samples)[:rows]
        longest = int(answers.max()) + int(prompts.max())
        batch = DecodeBatch(
            prompts=prompts,
            answers=answers.astype(np.int64),
            shared=samples,
            slots=int(draw.choice([8, 32, 64, 256, 1024])),
            room=int(draw.choice([0, 0, 2, 8, 40]) * longest),
            copied=bool(draw.integers(2)),
        )
        where = catalogue_place(device(str(draw.choice(DEVICES))), tensor=int(draw.choice([1, 4])))
        exact = schedule_decode(MODEL, where, batch).seconds
        errors.append(abs(time_curve(MODEL, where, curve_of_batch(batch)).seconds / exact - 1.0))
    name = f"curve over schedule, {cases} random batches of 64 rows and more"
    return [
        SideResult(
            name=f"{name}/greatest error", value=max(errors), unit="", goal=MOST_ERROR, least=False
        ),
        SideResult(name=f"{name}/mean error", value=float(np.mean(errors)), unit=""),
    ]


def joined_rows(rows: int, slots: int, unit: int) -> SideResult:
    """Rows a second of a replica that gets a unit more as soon as there is room for it."""
    answers = lognormal(3000, 0.9, 20_000).spread(rows)
    prompts = np.full(rows, 400)
    limits = DecodeBatch(prompts=NO_ROWS, answers=NO_ROWS, slots=slots, shared=unit)
    decode = PricedDecode(MODEL, catalogue_place(device("H100")), limits)
    start = time.process_time()
    begun = ended = 0
    now: float | None = 0.0
    while now is not None:
        while begun < rows and begun - ended <= slots:
            more = slice(begun, begun + unit)
            decode.add(RowLengths(prompts[more], answers[more]), now)
            begun += unit
        now = decode.next_end()
        if now is not None:
            ended += len(decode.advance(now))
    rate = rows / (time.process_time() - start)
    name = f"rows that join, {unit} at a time, {slots} slots"
    return SideResult(name=name, value=rate, unit="rows/s", goal=ROWS_A_SECOND)


def main(*, quick: bool = False, json: Path | None = None) -> None:
    """Measure.

    Args:
        quick: fewer layouts, batches and rows; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    figures = [
        *rates("generation", "decode", decode_layouts(0, quick=quick)),
        *rates("generation in a cache of 20 GiB", "decode", decode_layouts(20 << 30, quick=quick)),
        *rates("training", "train", training_layouts()),
        *rates("log-probs", "forward", training_layouts()),
        *errors(20 if quick else 400),
        *(joined_rows(2000 if quick else 50_000, slots, 16) for slots in (64, 256, 1024)),
    ]
    where = machine()
    show("price", figures, where)
    if json is not None:
        write_json(json, figures, where)


if __name__ == "__main__":
    tyro.cli(main)
