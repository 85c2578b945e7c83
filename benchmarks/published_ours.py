"""What this project's own coordinator gives for published runs, by `dataflow simulate`.

Owns: which of the published runs are planned as graphs of this project, and their numbers. Does not
own: the inputs (published.toml), the systems' own schedules (published.py).

AReaL's runs are planned with its numbers of GPUs, rows, lengths and tensor ranks, StreamRL's with
those of its numbers and at the split of the devices that its own schedule takes; of the ways to
split training that fit, each is simulated, and the fastest counts. Where none fits there is no
number. EARL's are no runs. Steps count from the middle of a run to its last
Step beside which rows are still generated.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.gpu_plans import SCORED, GpuPlan, planned
from benchmarks.ppo_plans import PpoPlan, plan_ppo
from dataflow.errors import PlanError
from engine.plan.cost.distribution import LengthDistribution, constant_length, lognormal
from engine.plan.cost.model_passes import Sizes
from engine.plan.plan import Plan
from engine.simulation.prediction_run import predict

STEPS = 12
"""Of a run that count or come before these, and further ones for a lag."""


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
        microbatch=said["microbatch"],
        max_lag=max_lag,
    )
    return _mean_seconds(said, run, max_lag, lambda folder: [planned(folder, asked)])


def streamrl_by_us(
    said: Mapping[str, Any], run: Mapping[str, Any], model: Sizes, splits: StreamSplits
) -> Iterator[tuple[str, float]]:
    """Names of rows, with the seconds of our Steps: streamed, one step off, asynchronous."""
    asked = PpoPlan(
        model=model,
        device=said["device"],
        generating=splits.streamed,
        training=run["gpus"] - splits.streamed,
        tensor=tuple(run["tensor"]),
        rows=said["rows"],
        longest=said["lengths"]["longest"],
        longest_prompt=said["prompt"],
        microbatch=said["microbatch"],
    )
    late = replace(asked, generating=splits.overlapped, training=run["gpus"] - splits.overlapped)
    plans = {
        "streamed_step": replace(asked, stream="arrival"),
        "streamed_in_order_step": replace(asked, stream="ordered"),
        "one_step_off_step": replace(late, max_lag=1, stream="ordered"),
        "asynchronous_step": replace(late, max_lag=said["eta"], stream="ordered"),
    }
    for kind, each in plans.items():
        seconds = _mean_seconds(said, run, each.max_lag, partial(plan_ppo, asked=each))
        if seconds is not None:
            yield f"streamrl/{run['model']}/{kind}", seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSplits:
    """Devices that generate, at the best of StreamRL's own splits of each kind."""

    streamed: int
    overlapped: int


def _mean_seconds(
    said: Mapping[str, Any],
    run: Mapping[str, Any],
    max_lag: int,
    make: Callable[[Path], Sequence[Plan]],
) -> float | None:
    """Of a Step, in the second half of a run by the fastest plan; None where none fits."""
    rows = PublishedRows(constant_length(said["prompt"]), lognormal(**said["lengths"]))
    steps = STEPS + max_lag
    seconds: list[float] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for plan in make(Path(folder)):
                simulated = predict(plan, steps=steps, lengths=rows, seconds=SCORED, spans=False)
                counted = simulated.steps[STEPS // 2 : STEPS]
                seconds.append(fmean(step.end - step.start for step in counted))
    except PlanError as error:
        print(f"{run['model']}, max_lag {max_lag}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return min(seconds)
