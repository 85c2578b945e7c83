"""Learning curves: every on-policy algorithm on the demo's task, at equal samples.

    python -m benchmarks.curves [--quick] [--json FILE] [--picture-file FILE]

Owns: the arms, their settings, and what is compared. Does not own: the task and its warm start
(examples/demo.py), the picture (curves_picture.py), how results are shown (report.py).

Each seed has one warm start, from which each algorithm begins. What counts is the share of sampled
answers to held-out words that are right, at the last evaluation; a run ends with the Step that
reaches the samples. Samples are all answers that were generated for training, those of a baseline
and those of groups that a selection replaced too: such algorithms have fewer Steps, and their last
evaluation may come earlier.
"""

from __future__ import annotations

import importlib
import inspect
import json as json_
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.curves_picture import Curve, picture
from benchmarks.report import SideResult, machine, show, write_json
from dataflow.graph import Graph
from dataflow.model import linear
from dataflow.program import Program
from engine.api import run
from engine.plan.options import RunOptions

PARTS, EVERY = 2, 20
"""Updates per Step of the algorithms that have several, and Steps between evaluations."""

ROWS, ANSWERS = 256, 8
"""Rows a Step, and answers to a prompt where they form groups."""

GOAL = 0.8
"""Least improvement of each algorithm, as a share of GRPO's."""

SEEDS = (201, 202, 203)
UNIT = "grpo"

ARMS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"minibatches": PARTS},
    "dr_grpo": {"minibatches": PARTS},
    "dapo": {"minibatches": PARTS, "buffer": 2},
    "gspo": {"minibatches": PARTS},
    "cispo": {"minibatches": PARTS},
    "rloo": {"beta": 0.0},
    "opo": {},
    "max_rl": {},
    "remax": {},
    "reinforce_pp": {"minibatches": PARTS, "beta": 0.0},
    "reinforce_pp_baseline": {"minibatches": PARTS, "beta": 0.0},
    "ppo": {"epochs": 1, "minibatches": PARTS, "beta": 0.0, "critic_lr": 1e-3},
    "online_dpo": {},
    "best_of_n": {},
}
"""Algorithm -> its arguments besides those that all have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One run: an algorithm from the warm start of one seed."""

    algorithm: str
    seed: int
    base: str
    folder: Path
    samples: int


def graph_of(arm: Arm) -> tuple[Graph, int]:
    """The algorithm with the demo's evaluation, and the answers that it generates to a prompt."""
    demo: Any = importlib.import_module("demo")
    task: Any = importlib.import_module("demo_task")
    function = getattr(importlib.import_module(f"graphs.{arm.algorithm}"), arm.algorithm)
    taken = inspect.signature(function).parameters
    n = ANSWERS if "n" in taken and taken["n"].default > 1 else 1
    steps = arm.samples // ROWS
    known = {"n": n, "batch": ROWS // n, "max_tokens": 10, "lr": linear(5e-4, 5e-5, steps)}
    known |= ARMS[arm.algorithm]
    own = {name: value for name, value in known.items() if name in taken}
    graph = function(arm.base, str(arm.folder / "train.parquet"), task.exact_match, **own)
    generations = [node for node in graph.nodes if node.operator.traits.generates]
    test = str(arm.folder / "test.parquet")
    whole = demo.with_evaluation(graph, arm.base, test, task.exact_match, every=EVERY)
    return whole, sum(node.params["n"] for node in generations)


def learned(arm: Arm) -> Curve:
    """Run an arm until it has generated its samples."""
    graph, answers = graph_of(arm)
    points = [(0.0, 0.0)]

    def enough(row: Mapping[str, float]) -> bool:
        samples = row["data/admitted"] * answers
        if "eval/initial/sampled/exact_match" in row:
            points[0] = (0.0, row["eval/initial/sampled/exact_match"])
        if "eval/sampled/exact_match" in row:
            points.append((samples, row["eval/sampled/exact_match"]))
        return samples >= arm.samples

    with tempfile.TemporaryDirectory() as runs:
        options = RunOptions(
            steps=arm.samples // ROWS,
            seed=arm.seed,
            runs=Path(runs),
            threads=1,
            progress=False,
            samples_every=10**9,
        )
        run(graph, options, until=enough)
    print(f"{arm.algorithm} {arm.seed}: {points[0][1]:.2f} -> {points[-1][1]:.2f}", flush=True)
    return Curve(name=arm.algorithm, points=tuple(points))


def warm(seed: int, folder: Path) -> str:
    """The demo's data and warm start; returns the model directory that all arms begin from."""
    demo: Any = importlib.import_module("demo")
    recipe = demo.Recipe()
    demo.prepare(folder, recipe, seed)
    options = RunOptions(
        seed=seed, runs=folder, name="warm", threads=1, progress=False, samples_every=10**9
    )
    return str(run(Program(demo.warm_phase(folder, recipe)), options).trained["policy"])


def results(curves: Mapping[str, Sequence[Curve]]) -> list[SideResult]:
    """Each algorithm's improvement, and its share of GRPO's."""
    gains = {name: statistics.fmean(c.gain for c in of) for name, of in curves.items()}
    found = [SideResult(name=f"{n}: improvement", value=g, unit="share") for n, g in gains.items()]
    return found + [
        SideResult(name=f"{n} / {UNIT}", value=g / gains[UNIT], unit="ratio", goal=GOAL)
        for n, g in gains.items()
        if n != UNIT
    ]


def main(
    quick: bool = False,
    json: Path | None = None,
    picture_file: Path | None = None,
    steps: int = 100,
    only: tuple[str, ...] = (),
) -> None:
    """Run all arms, two at a time, and draw their curves.

    Args:
        quick: one seed and a tenth of the samples, to see that all of it works.
        json: file for the results.
        picture_file: file for the curves, an SVG; by default beside that of the results.
        steps: samples of each arm, in Steps of 256.
        only: these algorithms, and GRPO.
    """
    seeds = SEEDS[:1] if quick else SEEDS
    names = [name for name in ARMS if not only or name in (UNIT, *only)]
    samples = ROWS * (steps // 10 if quick else steps)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as made, ProcessPoolExecutor(2, mp_context=context) as pool:
        folders = {seed: Path(made) / str(seed) for seed in seeds}
        bases = dict(zip(seeds, pool.map(_warm, seeds, folders.values()), strict=True))
        arms = [
            Arm(algorithm=n, seed=s, base=bases[s], folder=folders[s], samples=samples)
            for n in names
            for s in seeds
        ]
        found = list(pool.map(_learned, arms))
    curves = {n: [c for c in found if c.name == n] for n in names}
    drawing = picture_file or (json and json.with_suffix(".svg"))
    if drawing is not None:
        drawing.write_text(picture(curves, "right answers to held-out words, sampled"))
    measured, where = results(curves), machine()
    show("learning curves", measured, where)
    if json is not None:
        write_json(json, measured, where)
        points = {n: [c.points for c in of] for n, of in curves.items()}
        json.with_suffix(".points.json").write_text(json_.dumps(points) + "\n")


def _warm(seed: int, folder: Path) -> str:
    _with_examples()
    return warm(seed, folder)


def _learned(arm: Arm) -> Curve:
    _with_examples()
    return learned(arm)


def _with_examples() -> None:
    """Two runs at a time: each has one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


if __name__ == "__main__":
    tyro.cli(main)
