"""Replicas and ranks on unlike devices: how much each has, by price and as measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Keys
from dataflow.graph import Graph
from engine.coordinator.balance import split_by_load, sum_by_part
from engine.coordinator.blocks import Blocks
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.dispatch import Dispatch
from engine.coordinator.replica_loads import ReplicaLoads
from engine.coordinator.tables import split_by_loads
from engine.coordinator.task_ledger import Outstanding
from engine.plan.cluster import Host, with_first
from engine.plan.cost.distribution import constant_length
from engine.plan.costs import plan_costs
from engine.plan.explain import explain
from engine.plan.lengths import all_lengths
from engine.plan.plan import Plan, PlannedNode
from engine.plan.priced_work import PricedWork, StepLengths
from engine.plan.replica_price import list_parts, time_part, time_unlike
from engine.simulation.prediction import Prediction
from engine.simulation.prediction_run import predict
from tests.kit.graphs import grpo_graph
from tests.kit.plans import CONFIG, planned_on
from tests.kit.simulated_rows import SCORED, SeenLengths

PROMPTS = 32
LARGE = {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
}
"""A model whose passes are longer than their launches."""


@pytest.fixture(autouse=True)
def large(tiny: None, tmp_path: Path) -> None:
    """The directory `tiny` has the header of a large model; its weights are a hole in the file."""
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG | LARGE))
    head, body = 151_936 * 1536, 1_300_000_000
    tensors = {
        "model.body": {"dtype": "BF16", "shape": [body], "data_offsets": [0, 2 * body]},
        "lm_head.weight": {
            "dtype": "BF16",
            "shape": [151_936, 1536],
            "data_offsets": [2 * body, 2 * (body + head)],
        },
    }
    header = json.dumps(tensors).encode()
    with (tmp_path / "tiny" / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * (body + head))


def make_host(name: str, kind: str, gib: int) -> Host:
    return Host(name=name, cores=16, memory=2**39, gpus=(gib * 2**30,) * 8, kind=kind)


HOSTS = (make_host("a", "H100", 80), make_host("b", "L40S", 48), make_host("c", "A100", 80))


def make_graph(beta: float = 0.0) -> Graph:
    return grpo_graph(batch=PROMPTS, n=8, max_tokens=256, beta=beta)


def plan_replicas(count: int, **asked: Any) -> Plan:
    """Rollout and reference on so many unlike devices, training on one of the first host."""
    places = ",".join(f"g{number}@{host.name}" for number, host in enumerate(HOSTS[:count]))
    workers = ",".join(f"g{number}" for number in range(count))
    pin = {"rollout": places, "reference": workers, "train_policy": "train@a"}
    asked = {"stream": "off", "pin": pin} | asked
    return planned_on(with_first(HOSTS), make_graph(beta=0.01), **asked)


def plan_ranks(count: int, **asked: Any) -> Plan:
    places = ",".join(f"t{number}@{host.name}" for number, host in enumerate(HOSTS[:count]))
    pin = {"rollout": "g@a", "train_policy": places}
    asked = {"stream": "off", "pin": pin, "ranks": {"train_policy": count}} | asked
    return planned_on(with_first(HOSTS), make_graph(), **asked)


def loaded(plan: Plan, node: str, loads: tuple[int, ...]) -> Plan:
    nodes = (replace(n, loads=loads) if n.name == node else n for n in plan.nodes)
    return replace(plan, nodes=tuple(nodes))


def divisions(parts: int) -> Iterator[tuple[int, ...]]:
    for first in product(range(PROMPTS + 1), repeat=parts - 1):
        if sum(first) <= PROMPTS:
            yield (*first, PROMPTS - sum(first))


def price_parts(plan: Plan, node: PlannedNode) -> Sequence[Sequence[float]]:
    """Seconds of each number of prompts on the device of each part."""
    assert plan.program is not None
    costs, shapes = plan_costs(plan), {}
    for model in plan.models:
        sizes = costs.sizes_of(model.name)
        assert sizes is not None
        shapes[model.name] = sizes.shape
    lengths = StepLengths(assumes_answers=True)
    greatest = all_lengths(plan.program, shapes)
    (work,) = PricedWork(plan, plan.program, greatest, lengths).list_works(node)
    seconds: list[list[float]] = []
    for worker in list_parts(node):
        times = [time_part(costs, node, work, worker, count) for count in range(1, PROMPTS + 1)]
        seconds.append([0.0, *(time.seconds for time in times)])
    longest = max(each[load] for each, load in zip(seconds, node.loads, strict=True))
    assert time_unlike(costs, node, work).seconds == pytest.approx(longest)
    return seconds


@pytest.mark.parametrize(
    ("plan_parts", "name", "count"),
    [
        (plan_replicas, "rollout", 2),
        (plan_replicas, "rollout", 3),
        (plan_replicas, "reference", 3),
        (plan_ranks, "train_policy", 2),
        (plan_ranks, "train_policy", 3),
    ],
)
def test_loads_are_the_best_of_all_divisions(plan_parts: Any, name: str, count: int) -> None:
    """By the price of the last one that ends; who is faster has more."""
    plan = plan_parts(count)
    node = plan.node(name)
    seconds = price_parts(plan, node)

    def end(loads: tuple[int, ...]) -> float:
        return max(each[load] for each, load in zip(seconds, loads, strict=True))

    best = min(map(end, divisions(count)))
    assert sum(node.loads) == PROMPTS
    assert end(node.loads) <= 1.01 * best
    assert node.loads[0] == max(node.loads) > min(node.loads)
    shown = " + ".join(map(str, node.loads))
    assert f"{shown} prompts" in explain(plan)


def simulate(plan: Plan, *, steps: int = 2, **asked: Any) -> Prediction:
    rows = SeenLengths(constant_length(512), constant_length(200))
    return predict(plan, steps=steps, lengths=rows, seconds=SCORED, **asked)


def last_step(plan: Plan) -> float:
    step = simulate(plan).steps[-1]
    return step.end - step.start


def test_a_simulated_step_is_the_shortest_of_any_division_to_one_percent() -> None:
    plan = plan_ranks(2)
    best = min(last_step(loaded(plan, "train_policy", each)) for each in divisions(2))
    assert last_step(plan) <= 1.01 * best
    assert last_step(plan) < 0.9 * last_step(plan_ranks(2, loads="equal"))


def chunk_rows(prediction: Prediction, node: str) -> list[dict[str, int]]:
    """Rows of each replica's chunk of a node, in each Step."""
    by_worker: dict[str, list[int]] = {}
    for span in prediction.spans:
        if (span.what, span.node) == ("chunk", node):
            by_worker.setdefault(span.worker, []).append(span.rows)
    return [
        dict(zip(by_worker, rows, strict=True)) for rows in zip(*by_worker.values(), strict=True)
    ]


def test_each_replica_is_told_the_chunk_that_was_cut_for_it() -> None:
    plan = plan_replicas(3)
    loads = plan.node("reference").loads
    for step in chunk_rows(simulate(plan), "reference"):
        assert step == {f"g{number}": 8 * load for number, load in enumerate(loads)}


def test_alike_devices_and_equal_loads_have_no_loads() -> None:
    pin = {"rollout": "g0@a,g1@a", "train_policy": "train@a"}
    alike = planned_on(with_first(HOSTS), make_graph(), pin=pin)
    assert not any(node.loads for node in alike.nodes)
    assert not any(node.loads for node in plan_replicas(2, loads="equal").nodes)


def test_by_measured_seconds_the_faster_one_gets_more_step_by_step() -> None:
    """From equal loads, on devices of which only the simulated kernels know that they differ."""
    plan = plan_replicas(2, loads="equal")
    steps = chunk_rows(simulate(plan, steps=6, measures_loads=True), "reference")
    assert steps[0] == {"g0": 4 * PROMPTS, "g1": 4 * PROMPTS}
    rows = [step["g0"] for step in steps]
    best = plan_replicas(2).node("reference").loads[0]
    assert rows == sorted(rows)
    assert abs(rows[-1] - 8 * best) <= 8
    unmeasured = chunk_rows(simulate(plan, steps=6), "reference")
    assert {step["g0"] for step in unmeasured} == {4 * PROMPTS}


def told_worker(plan: Plan, gone: str) -> str:
    """Who is told a chunk that was cut for g1, while one Worker is gone."""
    dispatch = Dispatch(plan, Blocks(), Outstanding(), ())
    chunk = NodeChunk(plan.node("reference"), Keys.of([0]), {})
    chunk.replica = "g1"
    dispatch.add(chunk, 1)
    (task,) = dispatch.tell(lambda node, worker: worker != gone)
    return task.worker


def test_another_takes_the_chunk_of_a_replica_that_is_gone() -> None:
    plan = plan_replicas(2)
    assert (told_worker(plan, gone=""), told_worker(plan, gone="g1")) == ("g1", "g0")


def make_chunk(node: PlannedNode, tokens: int) -> NodeChunk:
    chunk = NodeChunk(node, Keys.of([0]), {})
    chunk.written = tokens
    return chunk


def measured_loads(plan: Plan, reports: Sequence[tuple[str, float]]) -> tuple[int, ...]:
    """What follows from chunks of 1000 tokens, by who ended them and in how many seconds."""
    loads, node = ReplicaLoads(plan, measures=True), plan.node("rollout")
    for worker, seconds in reports:
        loads.note_end(make_chunk(node, 1000), worker, seconds)
    return loads.of_chunks(node)


def test_what_is_measured_counts_once_all_are_and_the_same_reports_give_the_same() -> None:
    plan = plan_replicas(2)
    priced = plan.node("rollout").loads
    assert measured_loads(plan, [("g0", 1.0), ("g0", 1.0)]) == priced
    reports = [("g0", 3.0), ("g1", 1.0), ("g1", 0.0)]
    first, second = measured_loads(plan, reports)
    assert first == pytest.approx(second / 3, rel=0.01)
    assert measured_loads(plan, reports) == (first, second)
    # A replica that has become ten times as slow has less, and never nothing.
    assert measured_loads(plan, [*reports, *[("g0", 3e4)] * 20]) == (1, 1000)


@given(
    weights=st.lists(st.integers(0, 1000), min_size=1, max_size=60),
    loads=st.lists(st.integers(0, 9), min_size=2, max_size=4).filter(any),
)
def test_parts_are_in_proportion_to_within_the_heaviest(
    weights: list[int], loads: list[int]
) -> None:
    part = split_by_load(weights, loads)
    sums = sum_by_part(np.array(weights), part, len(loads))
    for total, load in zip(sums.tolist(), loads, strict=True):
        share = sum(weights) * load / sum(loads)
        assert total <= share + max(weights) if load else total == 0
    # No item would end sooner elsewhere than where the rule put the last one.
    assert np.array_equal(part, split_by_load(weights, loads))


def test_prompts_without_tokens_are_cut_into_runs() -> None:
    positions = np.repeat(np.arange(10), 2)
    first, second, third = split_by_loads(positions, np.zeros(20, np.int64), (7, 0, 3))
    assert (first.tolist(), len(second)) == (list(range(14)), 0)
    assert third.tolist() == list(range(14, 20))


@pytest.mark.parametrize("loads", [(), (0, 0), (1, -1)])
def test_loads_that_are_none_are_refused(loads: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="expected loads"):
        split_by_load([1, 2], loads)
