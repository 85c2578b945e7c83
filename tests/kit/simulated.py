"""Simulated runs written by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.plan.cluster import Host, with_first
from engine.plan.plan import Plan
from engine.run.simulated_workers.spans import SimulatedSpan
from engine.simulation.prediction import (
    CoordinatorLoad,
    Prediction,
    SimulatedStep,
)
from tests.kit.graphs import grpo_graph
from tests.kit.plans import planned_on

GIB = 2**30


def plan_of_three(price: float = 36.0) -> Plan:
    """Two generators and a trainer on two hosts with GPUs, rewards on the cores of the first."""
    hosts = [
        Host(name=name, cores=16, memory=2**38, gpus=(80 * GIB,) * 2, kind=kind, price=price)
        for name, kind in (("a", "H100"), ("b", "L40S"))
    ]
    pins = {"rollout": "gen0@b,gen1@b", "train_policy": "train@a", "prompts": "data"}
    pins |= {"score": "data", "advantage": "data"}
    return planned_on(with_first(hosts), grpo_graph(max_lag=1), pin=pins)


def span(worker: str, what: str, node: str, *times: float, **more: Any) -> SimulatedSpan:
    """times: start and end, and when it was told, if that is not its start."""
    start, end, *told = times
    whole = {"asked": told[0] if told else start, "busy": end - start, "step": 1} | more
    return SimulatedSpan(worker=worker, what=what, node=node, start=start, end=end, **whole)


def two_steps(plan: Plan | None = None, spans: Iterable[SimulatedSpan] | None = None) -> Prediction:
    """Each Step: both generate, rewards, then training; the new weights come between."""
    made = [
        span("data", "chunk", "prompts", 0.0, 0.5),  # 0
        span("gen1", "chunk", "rollout", 0.5, 3.0, cause=0, rows=4, tokens=400),
        span("gen0", "chunk", "rollout", 0.5, 4.5, cause=0, fetch=0.5, busy=3.0),  # 2
        span("data", "chunk", "score", 4.5, 5.0, cause=2),
        span("data", "chunk", "advantage", 5.0, 5.0, 4.5, cause=3),
        span("train", "train", "train_policy", 5.0, 10.0, cause=4, fetch=1.0, busy=4.0),
        span("gen0", "load", "rollout", 10.0, 11.0, cause=5, busy=0.0, step=2),  # 6
        span("gen1", "load", "rollout", 10.0, 11.0, cause=5, busy=0.0, step=2),
        span("gen0", "chunk", "rollout", 11.0, 13.0, 10.0, cause=5, step=2),  # 8
        span("gen1", "chunk", "rollout", 11.0, 15.0, 10.0, cause=5, step=2),
        span("data", "chunk", "score", 15.0, 16.0, cause=9, step=2),  # 10
        span("train", "train", "train_policy", 16.0, 20.0, cause=10, step=2),
    ]
    steps = [
        SimulatedStep(step=i + 1, start=a, end=b, rows=8, tokens=4000, lag={"rollout": lag})
        for i, (a, b, lag) in enumerate([(0.0, 10.0, 0.0), (10.0, 20.0, 0.25)])
    ]
    return Prediction(
        plan=plan or plan_of_three(),
        seconds=20.0,
        steps=tuple(steps),
        spans=tuple(made if spans is None else spans),
        coordinator=CoordinatorLoad(events=40, instructions=60, seconds=0.002),
    )
