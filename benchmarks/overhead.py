"""The engine's cost outside the kernels, in one process, on the demo's model and data.

    python -m benchmarks.overhead [--quick] [--json FILE]

Owns: the run that is measured, and which of its seconds are the engine's. Does not own: how results
are shown (report.py), the demo's task (examples/demo_task.py).

The model is the demo's before its warm start. Answers are cut at 6 tokens, the mean length of the
demo's: the shorter the answers, the more the engine shows. Everything that is not inside a node's
kernel counts as the engine's: the coordinator, gathering rows, metrics, sample files (written at
each Step), the trace. What of it is which is measured in a run of its own (engine_parts.py), as
that takes time as well.
"""

from __future__ import annotations

import importlib
import json as json_
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import tyro

from benchmarks.engine_parts import PARTS, measured_parts
from benchmarks.report import SideResult, machine, show, write_json
from engine.api import plan, run
from engine.plan.options import RunOptions
from engine.session.attempts import OnStep
from graphs.grpo import grpo
from operators.rewards import RewardFn

BATCH, N, MAX_TOKENS = 32, 8, 6
WARM_UP = 5
GOAL = 0.05
"""Share of a Step's time outside the kernels."""

Row = Mapping[str, float]


def measured(
    folder: Path,
    steps: int,
    reward_fn: RewardFn,
    threads: int,
    on_step: Sequence[OnStep] = (),
) -> tuple[list[Row], list[str]]:
    """The metrics of each Step after the warm-up, and the names of the nodes."""
    data, base = str(folder / "train.parquet"), str(folder / "model")
    graph = grpo(
        base, data, reward_fn, n=N, batch=BATCH, max_tokens=MAX_TOKENS, lr=5e-4, minibatches=2
    )
    options = RunOptions(
        steps=WARM_UP + steps,
        runs=folder / "runs",
        threads=threads,
        progress=False,
        overwrite=True,
    )
    result = run(graph, options, on_step=on_step)
    rows = [
        json_.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()
    ]
    return rows[WARM_UP:], [node.name for node in plan(graph, options).nodes]


def parts(folder: Path, steps: int, reward_fn: RewardFn, threads: int) -> list[Mapping[str, float]]:
    """Seconds of each part in each Step after the warm-up."""
    laps: list[Mapping[str, float]] = []
    with measured_parts() as watch:
        measured(folder, steps, reward_fn, threads, [lambda row: laps.append(watch.lap())])
    return laps[WARM_UP:]


def outside(row: Row, nodes: list[str]) -> float:
    """Seconds of a Step in which no kernel ran."""
    return row["time/step"] - sum(row.get(f"time/{name}", 0.0) for name in nodes)


def results(rows: list[Row], nodes: list[str], laps: list[Mapping[str, float]]) -> list[SideResult]:
    """All numbers; the share is over all Steps together, so that no slow Step is left out."""
    total = sum(row["time/step"] for row in rows)
    share = sum(outside(row, nodes) for row in rows) / total
    by_node = {
        name: statistics.median(row.get(f"time/{name}", 0.0) for row in rows) for name in nodes
    }
    return [
        SideResult(
            name="time outside kernels / time/step",
            value=share,
            unit="share",
            goal=GOAL,
            least=False,
        ),
        SideResult(
            name="time/step",
            value=1e3 * statistics.median(row["time/step"] for row in rows),
            unit="ms",
        ),
        SideResult(
            name="outside",
            value=1e3 * statistics.median(outside(row, nodes) for row in rows),
            unit="ms",
        ),
        SideResult(
            name="of it samples",
            value=1e3 * statistics.median(row["time/record"] for row in rows),
            unit="ms",
        ),
        *(
            SideResult(
                name=f"of it {part}",
                value=1e3 * statistics.median(lap[part] for lap in laps),
                unit="ms",
            )
            for part in PARTS
            if part != "kernels"
        ),
        *(
            SideResult(name=f"time/{name}", value=1e3 * seconds, unit="ms")
            for name, seconds in by_node.items()
            if seconds
        ),
    ]


def prepare(folder: Path, words: int) -> RewardFn:
    """The demo's model and training words; returns its reward."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    task = importlib.import_module("demo_task")
    rows = [row for word, row in task.words(words, 0).items() if not task.held_out(word)]
    task.write_prompts(folder / "train.parquet", rows)
    task.make_model(folder / "model", layers=2, hidden=128, seed=0)
    return task.exact_match


def main(*, quick: bool = False, json: Path | None = None, threads: int = 1) -> None:
    """Measure.

    Args:
        quick: fewer Steps; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        threads: of each kernel; with more, a Step is shorter relative to the engine's time.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        reward_fn = prepare(folder, 500 if quick else 3000)
        steps = 5 if quick else 40
        rows, nodes = measured(folder, steps, reward_fn, threads)
        laps = parts(folder, steps, reward_fn, threads)
    found, where = results(rows, nodes, laps), machine()
    show("the engine's share of a Step", found, where)
    if json is not None:
        write_json(json, found, where)


if __name__ == "__main__":
    tyro.cli(main)
