"""The price of a node: what it says of a layout, against the formulas that it stands for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dataflow.errors import PlanError
from dataflow.kernel import Layout
from engine.plan.cost import decode_curve as curves
from engine.plan.cost.decode import DecodeBatch, schedule_decode
from engine.plan.cost.decode_curve import RowDistributions, make_batch
from engine.plan.cost.devices import catalogue_place, device
from engine.plan.cost.distribution import constant_length, lognormal
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import Work
from engine.plan.cost.node_price import NodeWork, decode_rows, node_cost, place_layout
from engine.plan.costs import plan_costs
from engine.plan.priced_work import StepLengths
from engine.plan.row_lengths import RowLengths
from engine.plan.step_price import price_step
from tests.kit.graphs import grpo_graph
from tests.kit.plans import placed
from tests.unit.test_cost_decode import MODEL

LENGTHS = RowDistributions(lognormal(300, 0.5, 1000), lognormal(3000, 0.9, 20_000))
MOST = Work(lengths=Lengths(prompt=1000, completion=20_000), prompts=128, rows=2048)
DECODE = NodeWork(kind="decode", most=MOST, lengths=LENGTHS, samples=16)
TRAIN = replace(DECODE, kind="train")
FORWARD = replace(DECODE, kind="forward")
H100 = device("H100")


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("replicas", [1, 8])
@pytest.mark.parametrize("cache", [0, 20 << 30])
def test_a_generation_costs_what_the_schedule_of_its_rows_says(
    tensor: int, replicas: int, cache: int
) -> None:
    layout = Layout(replicas=replicas, inner=tensor, cache_bytes=cache, slots=128)
    where = place_layout(H100, layout)
    seconds, _ = node_cost(MODEL, H100, layout, DECODE)
    room = cache * tensor // MODEL.cached_bytes
    batch = make_batch(LENGTHS, decode_rows(where, layout, DECODE, room))
    assert len(batch.answers) == 2048 // replicas
    assert seconds == pytest.approx(schedule_decode(MODEL, where, batch).seconds, rel=0.03)


def test_more_ranks_and_replicas_are_faster_and_their_bytes_less() -> None:
    for work in (DECODE, TRAIN, FORWARD):
        one = node_cost(MODEL, H100, Layout(), work)
        two = node_cost(MODEL, H100, Layout(tensor=2), work)
        assert two[0] < one[0]
        assert two[1] < one[1]
    four = node_cost(MODEL, H100, Layout(replicas=4), DECODE)
    assert four[0] < node_cost(MODEL, H100, Layout(), DECODE)[0]
    sharded = node_cost(MODEL, H100, Layout(data=4, shard=True), TRAIN)
    assert sharded[1] < node_cost(MODEL, H100, Layout(data=4), TRAIN)[1]
    recomputed = node_cost(MODEL, H100, Layout(recompute="layers"), TRAIN)
    plain = node_cost(MODEL, H100, Layout(), TRAIN)
    assert recomputed[0] > plain[0]
    assert recomputed[1] < plain[1]


def test_chunks_of_one_replica_are_decoded_one_after_another() -> None:
    whole, halves = (
        node_cost(MODEL, H100, Layout(), replace(DECODE, chunks=chunks))[0] for chunks in (1, 2)
    )
    half = node_cost(MODEL, H100, Layout(replicas=2), DECODE)[0]
    assert halves == pytest.approx(2 * half)
    assert halves > whole


def test_a_place_has_its_own_coefficients_and_a_device_the_catalogues() -> None:
    place = catalogue_place(H100)
    slow = {
        kind: replace(each, compute=each.compute / 2, reads=each.reads / 2)
        for kind, each in place.coefficients.items()
    }
    fast_seconds, size = node_cost(MODEL, H100, Layout(), DECODE)
    seconds, same_size = node_cost(MODEL, replace(place, coefficients=slow), Layout(), DECODE)
    assert seconds > 1.5 * fast_seconds
    assert size == same_size


def test_a_row_that_no_cache_holds_has_no_price() -> None:
    with pytest.raises(PlanError, match="expected room for the longest row"):
        node_cost(MODEL, H100, Layout(cache_bytes=1 << 28), DECODE)


def test_curves_are_kept_for_other_devices_and_ranks() -> None:
    node_cost(MODEL, H100, Layout(replicas=2), DECODE)
    misses = curves._kept_curve.cache_info().misses
    for name in ("H200", "L40S"):
        for tensor in (1, 2):
            node_cost(MODEL, device(name), Layout(replicas=2, inner=tensor), DECODE)
    assert curves._kept_curve.cache_info().misses == misses


@pytest.mark.usefixtures("tiny")
def test_a_plans_nodes_cost_what_its_costs_say_of_their_rows() -> None:
    plan = placed(grpo_graph(batch=8, n=4, max_tokens=32), workers="one")
    costs = plan_costs(plan)
    rows = RowLengths(constant_length(20).spread(32), constant_length(16).spread(32))
    price = price_step(plan, StepLengths(constant_length(20), constant_length(16)))
    assert price.by_node["rollout"] == pytest.approx(costs.decode("rollout", rows).seconds)
    train = costs.train("train_policy", {"rows": rows}).seconds
    assert price.by_node["train_policy"] == pytest.approx(train)


@pytest.mark.parametrize("replicas", [2, 16])
def test_the_slowest_of_some_replicas_counts(replicas: int) -> None:
    """Rows at random, in the mean of some Steps: one replica has the longest row of all."""
    layout = Layout(replicas=replicas, slots=256)
    seconds, _ = node_cost(MODEL, H100, layout, DECODE)
    where, draw = place_layout(H100, layout), np.random.default_rng(0)
    slowest: list[float] = []
    for _ in range(4):
        answers = LENGTHS.answers.at(draw.random((replicas, 2048 // replicas)))
        batches = (
            DecodeBatch(prompts=np.full(len(each), 340), answers=each, shared=16)
            for each in answers
        )
        slowest.append(max(schedule_decode(MODEL, where, batch).seconds for batch in batches))
    assert seconds == pytest.approx(np.mean(slowest), rel=0.07)
