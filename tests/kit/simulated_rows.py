"""Plans simulated by the cost model, with rows and a reward that most tests have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.plan.cost.distribution import LengthDistribution, constant_length, lognormal
from engine.plan.plan import Plan
from engine.simulation.prediction import Prediction
from engine.simulation.prediction_run import predict

SCORED = {"score": 1e-4}
"""Seconds a row of the reward."""


@dataclass(frozen=True)
class SeenLengths:
    """Of prompts and answers; None: as long as the graph allows."""

    prompts: LengthDistribution | None = None
    answers: LengthDistribution | None = None


ROWS = SeenLengths(constant_length(20), lognormal(10, 0.6, 32))


def predicted(plan: Plan, **asked: Any) -> Prediction:
    """Four Steps; asked: parameters of `predict`."""
    return predict(plan, **{"steps": 4, "lengths": ROWS, "seconds": SCORED} | asked)
