"""What this project's own coordinator gives for published runs, by `dataflow simulate`.

Owns: which of the published runs are planned as graphs of this project, and their numbers. Does not
own: the inputs (published.toml), the systems' own schedules (published.py).

AReaL's runs are planned with its numbers of GPUs, rows, lengths and tensor ranks. Where that does
not fit there is no number. StreamRL's are not planned yet, and EARL's are no runs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.gpu_plans import SCORED, GpuPlan, planned
from dataflow.errors import PlanError
from engine.plan.cost.distribution import LengthDistribution, constant_length, lognormal
from engine.plan.cost.model_passes import Sizes
from engine.predict.simulation.prediction_run import predict

STEPS = 10


@dataclass(frozen=True, slots=True)
class PublishedRows:
    """Prompts of one length, and the answers' distribution."""

    prompts: LengthDistribution
    answers: LengthDistribution


def areal_by_us(
    said: Mapping[str, Any], run: Mapping[str, Any], model: Sizes
) -> Iterator[tuple[str, float]]:
    """Names of rows, with our numbers: the Steps of both kinds, and their ratio."""
    seconds = {
        kind: _seconds(said, run, model, max_lag=max_lag)
        for kind, max_lag in (("synchronous", 0), ("asynchronous", said["eta"]))
    }
    name = f"areal/{run['model']}"
    known = {kind: value for kind, value in seconds.items() if value is not None}
    for kind, value in known.items():
        yield f"{name}/{kind}_step", value
    if len(known) == 2:
        yield f"{name}/asynchronous", known["synchronous"] / known["asynchronous"]


def _seconds(
    said: Mapping[str, Any], run: Mapping[str, Any], model: Sizes, *, max_lag: int
) -> float | None:
    """Of a Step, in the second half of a run; None where the plan does not fit."""
    share = said["generating"] if max_lag else said["generating_synchronous"]
    generating = round(run["gpus"] * share)
    asked = GpuPlan(
        model=model,
        device=said["device"],
        generating=generating,
        training=run["gpus"] - generating,
        tensor=run["tensor"],
        prompts=said["rows"] // 16,
        samples=16,
        longest=said["lengths"]["longest"],
        minibatches=said["updates"],
        max_lag=max_lag,
    )
    rows = PublishedRows(constant_length(said["prompt"]), lognormal(**said["lengths"]))
    try:
        with tempfile.TemporaryDirectory() as folder:
            plan = planned(Path(folder), asked)
            found = predict(plan, steps=STEPS, lengths=rows, seconds=SCORED, spans=False)
    except PlanError as error:
        print(f"{run['model']}, max_lag {max_lag}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return fmean(step.end - step.start for step in found.steps[STEPS // 2 :])
