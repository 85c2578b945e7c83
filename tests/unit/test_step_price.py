"""The price of a Step without a simulation, against the simulation of the same plan."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np
import pytest

from dataflow.graph import Graph
from engine.plan.cost.decode import DecodeBatch, schedule_decode
from engine.plan.cost.distribution import constant_length, lognormal
from engine.plan.joining_decode import PricedDecode
from engine.plan.plan import Plan
from engine.plan.priced_work import StepLengths
from engine.plan.row_lengths import RowLengths
from engine.plan.step_flow import StepFlow, time_flow
from engine.plan.step_price import step_seconds
from tests.kit.graphs import grpo_graph, small_grpo, small_ppo
from tests.kit.plans import placed
from tests.kit.simulated_rows import SCORED, SeenLengths, predicted
from tests.unit.test_cost_decode import H100, MODEL

pytestmark = pytest.mark.usefixtures("tiny")
PROMPTS, ANSWERS = constant_length(20), lognormal(100, 0.8, 400)
LENGTHS = StepLengths(PROMPTS, ANSWERS)
STEPS = 6
WIDE: dict[str, Any] = {"workers": "apart", "cores": 8, "threads": 1}


def simulate_step(plan: Plan) -> float:
    """Mean seconds of a Step, without the first and the last."""
    steps = predicted(plan, steps=STEPS, lengths=SeenLengths(PROMPTS, ANSWERS)).steps[1:-1]
    return mean(step.end - step.start for step in steps)


def grpo(**params: Any) -> Graph:
    return grpo_graph(batch=32, n=8, max_tokens=400, **params)


@pytest.mark.parametrize(
    ("graph", "asked"),
    [
        (lambda: grpo(), {"workers": "one"}),
        (lambda: grpo(), {**WIDE, "replicas": {"rollout": 4}}),
        (lambda: grpo(), {**WIDE, "chunks": {"rollout": 3}, "replicas": {"rollout": 2}}),
        (lambda: grpo(), {**WIDE, "ranks": {"train_policy": 2}}),
        (lambda: grpo(max_lag=1), {"workers": "auto"}),
        (lambda: small_grpo(), {"workers": "one"}),
        (lambda: small_ppo(), {"workers": "one"}),
    ],
    ids=["one", "replicas", "chunks", "ranks", "lag", "reference", "ppo"],
)
def test_a_step_takes_as_long_as_it_is_simulated(graph: Any, asked: dict[str, Any]) -> None:
    # Spread is what the simulation has of it in another test.
    plan = placed(graph(), **asked, spread={"rollout": 1})
    price = step_seconds(plan, LENGTHS, seconds=SCORED)
    assert price == pytest.approx(simulate_step(plan), rel=0.05)


def test_turns_are_taken_one_after_another_and_a_lag_overlaps() -> None:
    """Two nodes that share a Worker add up at any lag."""
    waiting, overlapping = (
        step_seconds(placed(grpo(max_lag=lag), workers="apart"), LENGTHS) for lag in (0, 1)
    )
    one_worker = step_seconds(placed(grpo(max_lag=1), workers="one"), LENGTHS)
    assert overlapping < 0.9 * waiting
    assert one_worker == pytest.approx(waiting, rel=0.05)


def test_rows_that_are_bound_late_wait_for_no_chunk() -> None:
    """With chunks the last rows of each run alone, whatever waits."""
    plan = placed(grpo(max_lag=2), workers="auto", threads=1, cores=8)
    seconds: list[float] = []
    for chunking in ("cohort", "ready"):
        nodes = [
            replace(node, chunking=chunking, layout=replace(node.layout, slots=128))
            if node.name == "rollout"
            else replace(node, layout=replace(node.layout, threads=8))
            for node in plan.nodes
        ]
        seconds.append(step_seconds(replace(plan, nodes=tuple(nodes)), LENGTHS))
    assert seconds[1] < seconds[0]


def test_nodes_without_a_known_price_take_no_time() -> None:
    plan = placed(grpo(), workers="one")
    whole = step_seconds(plan, LENGTHS, seconds=SCORED)
    assert step_seconds(plan, LENGTHS) == pytest.approx(whole - 256 * SCORED["score"], rel=1e-6)
    longest = step_seconds(plan)
    assert longest > 2 * step_seconds(plan, LENGTHS)


def flow_of(**fields: Any) -> StepFlow:
    return StepFlow(**{"lag": 1, "after": 0.0, "between": 0.0, "slots": 256} | fields)


def decode_of(slots: int, shared: int = 1) -> PricedDecode:
    none = np.zeros(0, np.int64)
    limits = DecodeBatch(prompts=none, answers=none, slots=slots, shared=shared)
    return PricedDecode(MODEL, H100, limits)


def test_steps_of_equal_rows_flow_as_fast_as_they_are_decoded_or_trained() -> None:
    """Where training takes longest, a Step is as long; where generation does, two Steps are
    generated at once, in as many passes as one.
    """
    rows = RowLengths(np.full(32, 50), np.full(32, 400))
    decode = schedule_decode(MODEL, H100, DecodeBatch(prompts=rows.prompts, answers=rows.answers))
    slow = flow_of(between=100.0, after=100.0)
    assert time_flow(decode_of(256), rows, slow) == pytest.approx(100.0, rel=1e-3)
    fast = time_flow(decode_of(256), rows, flow_of())
    assert fast < 0.7 * decode.seconds
    alone = time_flow(decode_of(256), rows, flow_of(lag=0, after=3.0))
    assert alone == pytest.approx(decode.seconds + 3.0, rel=1e-3)


def test_a_prompts_answers_free_their_slots_one_by_one() -> None:
    answers = ANSWERS.spread(256)
    rows = RowLengths(np.full(256, 20), answers)
    one, eight = (
        time_flow(decode_of(32), rows, flow_of(lag=2, slots=32, unit=unit)) for unit in (1, 8)
    )
    assert eight == pytest.approx(one, rel=0.05)
