"""Plans in simulated time: the coordinator is real, and kernels take what the cost model says."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from dataflow.batch import Keys
from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.set_expressions import edited
from engine.plan.cluster import Cluster
from engine.plan.cost.distribution import constant_length, lognormal
from engine.plan.cost.transfers import MESSAGE
from engine.plan.costs import plan_costs
from engine.plan.plan import Plan
from engine.plan.row_lengths import RowLengths
from engine.simulation.lengths import DrawnLengths
from engine.simulation.prediction import Prediction
from engine.simulation.prediction_run import predict
from tests.kit.graphs import grpo_graph, small_ppo
from tests.kit.plans import CONFIG, placed, planned_on
from tests.kit.simulated_rows import ROWS, SCORED, SeenLengths, predicted
from tests.kit.turns import example_count
from tests.right_graphs import RIGHT

pytestmark = pytest.mark.usefixtures("tiny")
EXACT = 2e-3
"""Of a Step: messages that come nearly together are handled together."""


def seconds(found: Prediction) -> list[float]:
    return [step.end - step.start for step in found.steps]


def test_a_step_of_one_worker_is_the_sum_of_its_nodes() -> None:
    plan = placed(grpo_graph(batch=8, n=4, max_tokens=32), workers="one")
    found = predicted(plan, lengths=SeenLengths(constant_length(20), constant_length(16)))
    costs = plan_costs(plan)
    rows = RowLengths(np.full(32, 20), np.full(32, 16))
    wanted = (
        costs.decode("rollout", rows).seconds + costs.train("train_policy", {"rows": rows}).seconds
    )
    wanted += 32 * SCORED["score"]
    wanted += (costs.function("prompts", 8) or 0.0) + (costs.function("advantage", 32) or 0.0)
    # Nodes follow each other; new weights are told with the next chunk, and later prompts are made
    # while the Step before is trained.
    messages = [len(plan.nodes), *[len(plan.nodes) - 1] * 3]
    assert seconds(found) == pytest.approx([wanted + n * MESSAGE for n in messages], rel=EXACT)
    assert [(s.rows, s.tokens) for s in found.steps] == [(32, 32 * 36)] * 4
    assert [s.lag for s in found.steps] == [{"rollout": 0.0}] * 4


@pytest.mark.long
def test_equal_seeds_give_equal_bytes() -> None:
    plan = placed(grpo_graph(max_lag=1), workers="auto")
    one, two, other = (predicted(plan, seed=seed) for seed in (3, 3, 4))
    same = replace(two, coordinator=replace(two.coordinator, seconds=one.coordinator.seconds))
    assert repr(one) == repr(same)
    assert [s.tokens for s in one.steps] != [s.tokens for s in other.steps]


@pytest.mark.parametrize(("slots", "most"), [(32, 1), (31, 4), (4, 8)])
def test_answers_leave_as_whole_groups(slots: int, most: int) -> None:
    """All at once where they fit the slots, else when they are a quarter of these, as in a run."""
    graph = grpo_graph(batch=8, n=4, max_tokens=32, max_lag=1)
    plan = placed(
        edited(graph, ["rollout.on_update=drain"]), workers="apart", chunks={"rollout": 1}
    )
    rollout = plan.node("rollout")
    fewer = replace(rollout, layout=replace(rollout.layout, slots=slots))
    nodes = tuple(fewer if node is rollout else node for node in plan.nodes)
    prediction = predicted(replace(plan, nodes=nodes))
    scored = [span.rows for span in prediction.spans if span.node == "score"]
    assert sum(scored) == 32 * len(prediction.steps)
    assert all(rows % 4 == 0 for rows in scored)
    parts = len(scored) / len(prediction.steps)
    assert parts == 1 if most == 1 else 1 < parts <= most


def test_the_answers_of_a_prompt_may_be_simulated_on_two_replicas() -> None:
    where = {"workers": "apart", "replicas": {"rollout": 2}}
    plan = placed(grpo_graph(batch=5), spread={"rollout": 2}, **where)
    assert plan.node("rollout").layout.spread == 2
    assert len(predict(plan, steps=2, lengths=ROWS, seconds=SCORED).steps) >= 2


def test_new_weights_send_out_the_groups_that_have_ended() -> None:
    """Without them all rows of a chunk leave together, as they fit the slots."""
    graph = grpo_graph(batch=8, n=4, max_tokens=32, max_lag=1)
    parts = {}
    for on_update in ("interrupt", "drain"):
        changed = edited(graph, [f"rollout.on_update={on_update}"])
        plan = placed(changed, workers="apart", chunks={"rollout": 1})
        prediction = predicted(plan, steps=6)
        scored = [span.rows for span in prediction.spans if span.node == "score"]
        assert sum(scored) == 32 * 6
        assert all(rows % 4 == 0 for rows in scored)
        parts[on_update] = len(scored)
    assert parts["drain"] == 6 < parts["interrupt"]


def test_two_replicas_or_ranks_divide_a_step_of_the_same_rows() -> None:
    graph = grpo_graph(batch=64, n=8, max_tokens=32)
    alone, replicas, ranks = (
        predicted(placed(graph, cores=8, workers="apart", threads=1, **asked))
        for asked in ({}, {"replicas": {"rollout": 2}}, {"ranks": {"train_policy": 2}})
    )
    for node, divided in (("rollout", replicas), ("train_policy", ranks)):
        one, part = (max(s.busy for s in each.spans if s.node == node) for each in (alone, divided))
        assert 0.4 < part / one < 0.75
        assert sum(seconds(divided)) < sum(seconds(alone))
        assert [s.tokens for s in divided.steps] == [s.tokens for s in alone.steps]
    whole, parts = (
        sum(s.tokens for s in each.spans if s.node == "rollout") for each in (alone, replicas)
    )
    assert whole == parts > 0


def save_any(base: Path) -> None:
    """A model directory that does for everything: long rows, scores, chats."""
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 65536}))
    sizes = {"model.body": (400_000,), "lm_head.weight": (98, 128), "score.weight": (1, 128)}
    save_file(
        {name: np.zeros(size, np.float32) for name, size in sizes.items()},
        base / "model.safetensors",
    )
    (base / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<eos>": 0}}}))
    said = {"eos_token": "<eos>", "chat_template": "{{ messages }}"}
    (base / "tokenizer_config.json").write_text(json.dumps(said))


PRICED_APART = (
    "plain_sft", "dapo", "slow_critic", "rules_and_reward_model", "language_model_judge",
    "two_turns", "online_dpo", "offline_dpo", "distillation", "reward_model",
    "reward_model_of_text",
)  # fmt: skip
"""Graphs with nodes that take their time in ways of their own; the long tests have all."""


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(build, marks=() if build.__name__ in PRICED_APART else pytest.mark.long)
        for build in RIGHT
    ],
    ids=lambda build: build.__name__,
)
def test_every_graph_can_be_simulated(build: Callable[[], Graph]) -> None:
    graph = build()
    for base in {state.base for state in graph.states if isinstance(state, Model)} - {"tiny"}:
        save_any(Path(base))
    plan = placed(graph, workers="auto")
    others = (n for n in plan.nodes if not n.traits.computes)
    functions = {n.name: 1e-4 for n in others if n.work not in ("train", "evaluate")}
    found = predict(plan, steps=2, lengths=ROWS, seconds=functions)
    assert [s.step for s in found.steps] == [1, 2]
    assert all(s.end > s.start and s.rows > 0 for s in found.steps)


def test_spans_of_a_worker_do_not_overlap_and_causes_come_before() -> None:
    found = predicted(placed(small_ppo(), workers="apart", replicas={"rollout": 2}))
    by_worker: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in found.spans:
        assert span.asked <= span.start <= span.end
        assert span.busy <= span.end - span.start + 1e-12
        if span.cause >= 0:
            assert found.spans[span.cause].start <= span.asked
        if span.what != "load":
            by_worker[span.worker].append((span.start, span.end))
    for spans in by_worker.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(spans))


@pytest.mark.parametrize(("seconds_of", "told"), [
    ({}, r"simulate: score: .* found none\. Fix: --seconds score="),
    ({"scor": 1.0}, r"seconds: expected a node .*'scor'\. Fix: score"),
    ({"score": -1.0}, "score: expected seconds a row"),
])  # fmt: skip
def test_seconds_that_are_missing_or_wrong_are_refused(
    seconds_of: dict[str, float], told: str
) -> None:
    with pytest.raises(PlanError, match=told):
        predict(placed(grpo_graph()), steps=1, seconds=seconds_of)


@pytest.mark.parametrize(("cpu", "told"), [
    ({"rollout": 0.5}, "cpu: expected a node that is a function, found 'rollout'"),
    ({"score": 1.5}, "cpu: score: expected a share from 0 to 1, found 1.5"),
])  # fmt: skip
def test_shares_that_are_wrong_are_refused(cpu: dict[str, float], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        predict(placed(grpo_graph()), steps=1, seconds=SCORED, cpu=cpu)


def test_a_gpu_that_nobody_has_measured_is_an_error() -> None:
    unknown = planned_on(Cluster(cores=8, memory=2**36, gpus=(2**36,), kind="B7"), grpo_graph())
    with pytest.raises(PlanError, match=r"rollout: nobody has measured a B7 GPU\. Fix: measure"):
        predict(unknown, steps=1, seconds=SCORED)


def test_without_lengths_rows_are_as_long_as_they_may_be() -> None:
    prediction = predict(placed(grpo_graph(batch=4, n=2, max_tokens=32)), steps=1, seconds=SCORED)
    assert prediction.steps[0].tokens == 8 * (512 + 32)


@cache
def short_answers() -> Plan:
    return placed(grpo_graph(max_tokens=32))


@settings(max_examples=example_count(50))
@given(position=st.integers(0, 2**40), seed=st.integers(0, 2**31), median=st.integers(1, 10**6))
def test_lengths_are_within_what_the_graph_allows(position: int, seed: int, median: int) -> None:
    lengths = lognormal(median, 1.0, 10**7)
    drawn = DrawnLengths(short_answers(), SeenLengths(lengths, lengths), seed)
    positions, samples = position + np.repeat(np.arange(3), 4), np.tile(np.arange(4), 3)
    keys = Keys(positions, samples, np.zeros_like(samples))
    answers, prompts = drawn.answers("rollout", keys), drawn.prompts("prompts", keys)
    assert ((answers >= 1) & (answers <= 32)).all()
    limit = drawn.greatest("prompts").limit
    assert limit == 1024 - 32
    assert ((prompts >= 1) & (prompts <= limit)).all()
    assert len(set(prompts[:4].tolist())) == 1, "a prompt is as long in every sample"
    some = [5, 2, 7]
    assert drawn.answers("rollout", keys.take(np.array(some))).tolist() == answers[some].tolist()
