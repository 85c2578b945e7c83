"""Twelve graphs that differ in what makes a prediction hard, each profiled and run by itself.

Owns: the graphs and their sizes. Does not own: runs, profiles and errors (predicted_runs.py), the
table (predicted.py).

All are of small Models, whose Steps take a quarter of a second to two seconds on two cores.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from string import ascii_letters
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.predicted_runs import SteppedGraph, in_turns
from benchmarks.report import SideResult
from dataflow.graph import Graph
from engine.plan.options import RunOptions
from graphs.dapo import dapo
from graphs.distill import distill
from graphs.grpo import grpo
from graphs.ppo import ppo
from graphs.reinforce_pp import reinforce_pp
from graphs.self_play_two_models import self_play_two_models

MEDIAN_GOAL = 8.0
"""Percent: of the errors of all cases, the median may be so much."""
GOAL = 20.0
"""The same of each."""
ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFiles:
    """Directories of Models, and files of prompts: of 64 to 128 characters, of 640 to 896."""

    base: str
    teacher: str
    data: str
    long_data: str
    eval_data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedCase:
    """One graph. options: of the run."""

    name: str
    graph: Callable[[CaseFiles], Graph]
    options: Mapping[str, Any] = field(default_factory=lambda: {"workers": "one"})


def digits(completions: list[str], **columns: object) -> list[float]:
    """The share of digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def slow_digits(completions: list[str], **columns: object) -> list[float]:
    """The same after a wait, as for an answer of another machine."""
    time.sleep(0.003 * len(completions))
    return digits(completions)


def capital(completions: list[str], **columns: object) -> list[float]:
    """Whether an answer begins with a capital: of a quarter of them, so that of four answers to a
    prompt all are alike for one prompt in four.
    """
    return [float(text[:1].isupper()) for text in completions]


def _lagging(max_lag: int) -> Callable[[CaseFiles], Graph]:
    return lambda files: grpo(
        files.base, files.data, digits, n=8, batch=16, max_tokens=64, beta=0.04, max_lag=max_lag
    )


CASES = (
    PredictedCase(
        name="PPO",
        graph=lambda files: ppo(
            files.base, files.data, digits, batch=64, max_tokens=64, epochs=1, minibatches=2
        ),
    ),
    PredictedCase(
        name="two Models",
        graph=lambda files: self_play_two_models(
            files.base, files.teacher, files.data, digits, n=4, batch=8, max_tokens=48
        ),
    ),
    PredictedCase(
        name="distillation",
        graph=lambda files: distill(
            files.base, files.teacher, files.data, batch=32, max_tokens=64, top_k=16
        ),
    ),
    PredictedCase(
        name="long prompts",
        graph=lambda files: grpo(
            files.base, files.long_data, digits, n=4, batch=8, max_tokens=32, beta=0.04
        ),
    ),
    PredictedCase(
        name="long answers",
        graph=lambda files: grpo(files.base, files.data, digits, n=4, batch=4, max_tokens=512),
    ),
    PredictedCase(
        name="n=1",
        graph=lambda files: reinforce_pp(
            files.base, files.data, digits, batch=64, max_tokens=64
        ),
    ),
    PredictedCase(
        name="batch 512",
        graph=lambda files: grpo(files.base, files.data, digits, n=2, batch=512, max_tokens=16),
    ),
    PredictedCase(name="lag 1", graph=_lagging(1), options={"workers": "auto"}),
    PredictedCase(name="lag 2", graph=_lagging(2), options={"workers": "auto"}),
    PredictedCase(
        name="slow reward",
        graph=lambda files: grpo(
            files.base, files.data, slow_digits, n=8, batch=16, max_tokens=32
        ),
    ),
    PredictedCase(
        name="refill",
        graph=lambda files: dapo(
            files.base, files.data, capital, n=4, batch=16, max_tokens=64, buffer=16, minibatches=2
        ),
    ),
    PredictedCase(
        name="evaluation each Step",
        graph=lambda files: grpo(
            files.base, files.data, digits, n=8, batch=8, max_tokens=64,
            eval_data=files.eval_data, eval_every=1,
        ),
    ),
)  # fmt: skip


def prompt_file(path: Path, rows: int, least: int, most: int) -> str:
    """Prompts of so many letters with nothing in common, as `simulate` assumes."""
    draw = random.Random(path.name)
    texts = ["".join(draw.choices(ascii_letters, k=draw.randint(least, most))) for _ in range(rows)]
    pq.write_table(pa.table({"prompt": texts, "answer": texts}), path)
    return str(path)


def case_files(folder: Path, base: str, teacher: str) -> CaseFiles:
    """The files of all cases."""
    return CaseFiles(
        base=base,
        teacher=teacher,
        data=prompt_file(folder / "prompts.parquet", 1024, 64, 128),
        long_data=prompt_file(folder / "long.parquet", 256, 640, 896),
        eval_data=prompt_file(folder / "held_out.parquet", 32, 64, 128),
    )


def case_results(
    folder: Path, files: CaseFiles, names: Sequence[str], threads: int, *, quick: bool
) -> Iterator[SideResult]:
    """Each case, and the median of their errors. names: of those that are measured."""
    errors: list[float] = []
    for case in CASES:
        if case.name not in names:
            continue
        options = RunOptions(threads=threads, progress=False, **case.options)
        stepped = SteppedGraph(name=case.name, graph=case.graph(files), options=options)
        rounds = 1 if quick else ROUNDS
        seconds = in_turns([stepped], folder / "runs", rounds=rounds)[case.name]
        errors.append(seconds.error)
        yield from seconds.results(case.name, GOAL)
    if errors:
        name = f"median error of {len(errors)} cases"
        yield SideResult(name=name, value=median(errors), unit="%", goal=MEDIAN_GOAL, least=False)
