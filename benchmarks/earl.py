"""EARL's choice of tensor ranks by live tokens: its published grid, this cost model, and a run.

    python -m benchmarks.earl [--quick] [--json FILE]

    grid        the published rates as a table: in how many cells it has the faster layout
    catalogue   the cost model alone, nothing fitted: in how many cells the sign is right
    run         72B, 1K to 32K, by the grid: seconds, switches and rows that are sent back
    planning    seconds of CPU that `--relayout auto` takes

Owns: the table of the grid, what is compared. Does not own: the grid (published.toml), the cost
model's cells (published.py), the run (earl_run.py).

A cell is (answers of a replica, context); its live tokens are the product. The catalogue's TP 8
gives more a device only where TP 4's cache is full: without that each device reads the same bytes a
token, and TP 8 adds messages. So every cell that it has wrong is one in which TP 8 gains a little
(`of_the_cache` is live tokens over the room of TP 4 with nine tenths of the memory).
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import tyro

from benchmarks.earl_run import (
    GrowingRun,
    list_contexts,
    make_grid_table,
    plan_layouts,
    simulate_run,
)
from benchmarks.gpu_plans import GpuPlan, make_graph, write_inputs
from benchmarks.published import UNTUNED, earl, gpus, inputs, sizes
from benchmarks.published_schedules import cache_room
from benchmarks.report import SideResult, machine, show, write_json
from engine.plan.layout_table import LayoutTable, RunLayout, measured_table
from engine.plan.options import RunOptions
from engine.session.planning import find_layouts

TP4, TP8 = 0, 1
MOST_OVER_BEST = 1.03
"""Times the seconds of the best layout at every Step."""


def list_cells() -> Iterator[tuple[int, int, float]]:
    """(context, answers, gain of TP 8 over TP 4) of each published cell."""
    grid, counts = inputs()["earl"]["grid"], inputs()["earl"]["answers"]
    for context, row in grid.items():
        for answers, gain in zip(counts, row, strict=False):
            yield int(context), answers, gain / 100.0


def measure_table(*, switch_seconds: float = 0.0) -> LayoutTable:
    """The grid as measured rates: seconds of a Step that takes 1 s with TP 4, where cells of equal
    live tokens count together.
    """
    gains: dict[int, list[float]] = defaultdict(list)
    for context, answers, gain in list_cells():
        gains[context * answers].append(gain)
    grid = {live: (1.0, 1.0 / (1.0 + sum(each) / len(each))) for live, each in gains.items()}
    context, answers = inputs()["earl"]["does_not_fit"]
    grid[context * answers] = (math.inf, grid[context * answers // 2][TP8])
    layouts = (RunLayout(text="tensor.rollout=4"), RunLayout(text="tensor.rollout=8"))
    return measured_table(layouts, grid, switch_seconds=switch_seconds)


def show_grid() -> Iterator[SideResult]:
    """What the table chooses in each cell."""
    table, right = measure_table(), 0
    cells = list(list_cells())
    for context, answers, gain in cells:
        bucket = table.buckets[table.bucket_at(context * answers)]
        right += bucket.best == (TP8 if gain > 0 else TP4)
    yield SideResult(name="grid/cells chosen right", value=right, unit="cells", goal=len(cells))
    context, answers = inputs()["earl"]["does_not_fit"]
    refused = not table.fits(TP4, context * answers) and table.fits(TP8, context * answers)
    yield SideResult(
        name="grid/the cell that does not fit, refused", value=refused, unit="", goal=1
    )


def show_catalogue() -> Iterator[SideResult]:
    """Signs by the cost model, and each cell whose sign is wrong."""
    predicted = {row.name: row.simulated for row in earl(inputs(), UNTUNED)}
    settings = inputs()["earl"]
    where = gpus(settings["device"], tensor=settings["tensor"][0])
    room = cache_room(sizes(inputs(), settings["model"]), where, settings["memory"])
    cells = list(list_cells())
    yield SideResult(
        name=f"catalogue/signs of {len(cells)}", value=predicted["earl/signs"], unit="cells"
    )
    for context, answers, gain in cells:
        ours = predicted[f"earl/{context}x{answers}"] / 100.0
        if (ours > 0) != (gain > 0):
            name = f"catalogue/wrong/{context}x{answers}"
            yield SideResult(name=f"{name}/published", value=100.0 * gain, unit="%")
            yield SideResult(name=f"{name}/computed", value=100.0 * ours, unit="%")
            full = context * answers / room
            yield SideResult(name=f"{name}/of_the_cache", value=full, unit="x")


def show_run(folder: Path, *, steps: int) -> Iterator[SideResult]:
    """A run with each layout alone, and one that switches."""
    plans = plan_layouts(folder)
    table, contexts = make_grid_table(plans), list_contexts(steps)
    four, eight = (simulate_run(plans, table, contexts, layout=layout) for layout in (TP4, TP8))
    switching = simulate_run(plans, table, contexts)
    best = sum(map(min, four.seconds, eight.seconds))
    title = f"run/{steps} steps from 1K to 32K"
    runs: dict[str, GrowingRun] = {"TP 4": four, "TP 8": eight, "switching": switching}
    for name, each in runs.items():
        seconds = sum(each.seconds)
        yield SideResult(name=f"{title}/{name}", value=seconds, unit="s")
        yield SideResult(name=f"{title}/{name}/over the best", value=seconds / best, unit="x")
    yield SideResult(
        name=f"{title}/switching/over the best, with what switches take",
        value=(sum(switching.seconds) + switching.switching) / best,
        unit="x",
        goal=MOST_OVER_BEST,
        least=False,
    )
    yield SideResult(name=f"{title}/switches", value=len(switching.switches), unit="", goal=1)
    yield SideResult(name=f"{title}/TP 4/rows sent back", value=four.sent_back, unit="rows", goal=1)
    yield SideResult(
        name=f"{title}/switching/rows sent back",
        value=switching.sent_back,
        unit="rows",
        goal=0,
        least=False,
    )


def show_planning(folder: Path, *, quick: bool) -> Iterator[SideResult]:
    """What `--relayout auto` takes."""
    runs = [("7B", 1, 8, 0)] if quick else [("7B", 1, 64, 0), ("7B", 2, 64, 1)]
    for name, hosts, prompts, lag in runs:
        files = write_inputs(folder / name, sizes(inputs(), name), "H100", hosts=hosts)
        asked = GpuPlan(
            model=sizes(inputs(), name),
            device="H100",
            generating=0,
            training=0,
            tensor=1,
            prompts=prompts,
            samples=16,
            longest=16384,
            max_lag=lag,
        )
        options = RunOptions(cluster=files.hosts, kernel={"rollout": "vllm"}, relayout="auto")
        begun = time.process_time()
        table = find_layouts(make_graph(files.base, files.data, asked), options, simulated=True)
        seconds = time.process_time() - begun
        assert table is not None
        title = f"planning/{name}, {prompts * 16} rows, {hosts * 8} H100, lag {lag}"
        yield SideResult(name=f"{title}/search of all points", value=seconds, unit="s")
        yield SideResult(name=f"{title}/layouts", value=len(table.layouts), unit="")


def list_results(folder: Path, *, quick: bool) -> Iterator[SideResult]:
    """All of them."""
    yield from show_grid()
    yield from show_catalogue()
    yield from show_run(folder / "run", steps=60 if quick else 120)
    yield from show_planning(folder, quick=quick)


def main(*, quick: bool = False, json: Path | None = None) -> None:
    """Measure.

    Args:
        quick: a shorter run and one search; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = list(list_results(Path(folder), quick=quick))
    where = machine()
    show("earl", results, where)
    if json is not None:
        write_json(json, results, where)


if __name__ == "__main__":
    tyro.cli(main)
