"""Which answers go to one replica: the planner's choice, its prices, and what may be asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.check import check
from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.kernel import Layout
from dataflow.set_expressions import edited
from engine.plan.cost.decode import DecodeBatch
from engine.plan.cost.decode_curve import RowDistributions
from engine.plan.cost.dispatch_price import (
    Deal,
    Dealing,
    DealPrices,
    DealtAnswers,
    _join_quantiles,
)
from engine.plan.cost.distribution import assumed_answers, constant_length
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import Work
from engine.plan.cost.node_price import NodeWork, node_time
from engine.plan.draft import Draft
from engine.plan.explain import explain
from engine.plan.passes import PASSES
from engine.plan.passes import dispatch as dispatch_pass
from engine.plan.passes.dispatch import choose_dispatch
from engine.plan.placement import Placing
from engine.plan.plan import Plan
from engine.plan.planned_input import PlannedInput
from tests.kit.graphs import grpo_graph
from tests.kit.plans import CLUSTER, headers, placed
from tests.kit.turns import example_count
from tests.unit.test_cost_decode import H100, MODEL

pytestmark = pytest.mark.usefixtures("tiny")
NO_ROWS = np.zeros(0, np.int64)


def bounded_graph(
    batch: int, n: int, *, prompt: int = 32, answer: int = 256, lag: int = 0
) -> Graph:
    graph = grpo_graph(batch=batch, n=n, max_tokens=answer, max_lag=lag)
    return edited(graph, [f"rollout.max_prompt_tokens={prompt}"])


def of_rollout(batch: int, n: int, *, max_lag: int = 0, **asked: Any) -> Plan:
    graph = bounded_graph(batch, n, lag=max_lag)
    return placed(graph, cores=32, threads=1, workers="apart", **asked)


def spread_of(plan: Plan) -> int:
    return plan.node("rollout").layout.spread


def notes_of(plan: Plan) -> list[str]:
    return [note for note in plan.notes if "spans (spread)" in note]


def test_one_replica_has_whole_prompts() -> None:
    plan = of_rollout(3, 16)
    assert spread_of(plan) == 1
    assert plan.node("rollout").tail == 0
    assert notes_of(plan) == []


def test_answers_are_spread_where_a_step_is_shorter_and_explain_says_so() -> None:
    """One prompt on two replicas: one of them would have none."""
    plan = of_rollout(1, 128, replicas={"rollout": 2})
    assert spread_of(plan) > 1
    (note,) = notes_of(plan)
    assert "a Step is " in note
    assert f"in {spread_of(plan)} spans (spread)" in note
    assert f"2 replicas, a prompt's answers in {spread_of(plan)} spans" in " ".join(
        explain(plan).split()
    )


def test_equal_chunks_have_an_equal_spread_on_one_replica() -> None:
    two = of_rollout(1, 128, replicas={"rollout": 2})
    one = of_rollout(1, 128, chunks={"rollout": 2})
    assert one.node("rollout").layout.replicas == 1
    assert spread_of(one) == spread_of(two)


def test_long_prompts_are_not_fed_twice() -> None:
    """Sixteen prompts are even on two replicas: to feed each twice costs more than it gains."""
    graph = bounded_graph(16, 4, prompt=900, answer=16)
    plan = placed(graph, cores=32, threads=1, workers="apart", replicas={"rollout": 2})
    assert spread_of(plan) == 1


def test_with_a_lag_answers_are_spread_only_where_a_replica_would_be_idle() -> None:
    """Two Steps of four prompts are under way at once: enough for eight replicas."""
    assert spread_of(of_rollout(4, 16, max_lag=1, replicas={"rollout": 4})) == 1
    work = NodeWork(
        kind="decode",
        most=Work(lengths=Lengths(prompt=100, completion=4000), prompts=4, rows=1024),
        lengths=RowDistributions(constant_length(100), assumed_answers(4000)),
        samples=256,
        steps=2,
    )
    gains: list[float] = []
    for replicas in (8, 32):
        whole, spread = (
            node_time(MODEL, H100, Layout(replicas=replicas, spread=count), work).seconds
            for count in (1, 4)
        )
        gains.append(1.0 - spread / whole)
    assert gains[1] > 0.1 > 0 > gains[0]


def test_what_is_asked_for_is_taken_and_counts_in_memory() -> None:
    whole = of_rollout(8, 8, replicas={"rollout": 2}, spread={"rollout": 1})
    spread = of_rollout(8, 8, replicas={"rollout": 2}, spread={"rollout": 4})
    assert (spread_of(whole), spread_of(spread)) == (1, 4)
    assert notes_of(whole) == notes_of(spread) == []
    cache, spread_cache = (p.node("rollout").estimate.bytes["kv_cache"] for p in (whole, spread))
    assert spread_cache > cache


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"spread": {"rolout": 2}}, "spread: expected a node of the plan, found 'rolout'"),
        ({"spread": {"score": 2}}, "spread: score=2, but only generations have answers"),
        ({"spread": {"rollout": 9}}, "spread: rollout=9, and a prompt has 8 answers"),
        ({"spread": {"rollout": 0}}, "Fix: rollout=1"),
        ({"tail": {"rollout": 1.0}}, "tail: rollout=1, expected a share from 0 to below 1"),
        ({"tail": {"rollout": 0.2}}, "nobody says how much its rows take"),
    ],
)
def test_what_cannot_be_had_is_refused(asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError, match=problem.replace("(", r"\(")):
        of_rollout(8, 8, replicas={"rollout": 2}, **asked)


def weighed_draft(**asked: Any) -> Draft:
    """A draft as the pass gets it, whose prompts say how long their answers will be."""
    graph = bounded_graph(32, 4, answer=512)
    tail = asked.pop("tail", {})
    placing = Placing(workers="apart", chunks={"rollout": 4}, **asked)
    draft = Draft(
        graph=check(graph, headers).graph, seed=0, cluster=CLUSTER, threads=1, placing=placing
    )
    for run in PASSES[: PASSES.index(choose_dispatch)]:
        draft = run(draft)
    weight = PlannedInput(name="weight", gate="prompts")
    nodes = [
        replace(n, inputs=(*n.inputs, weight)) if n.traits.generates else n for n in draft.nodes
    ]
    return replace(draft, nodes=tuple(nodes), placing=replace(placing, tail=tail))


def test_the_tail_is_apart_only_where_the_price_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = weighed_draft(spread={"rollout": 1})
    seconds = {0.0: 10.0, 0.1: 9.95, 0.2: 9.9, 0.3: 9.95}
    monkeypatch.setattr(DealPrices, "seconds", lambda self, deal: seconds[deal.tail])
    assert choose_dispatch(draft).node("rollout").tail == 0
    seconds[0.2] = 5.0
    chosen = choose_dispatch(draft)
    assert chosen.node("rollout").tail == 0.2
    assert any("the 20% of most weight apart (tail)" in note for note in chosen.notes)


def test_what_is_asked_for_stays_where_another_spread_has_a_lower_price(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights leave the tail to be chosen, the spread is not."""
    monkeypatch.setattr(DealPrices, "seconds", lambda self, deal: 10.0 / deal.spread)
    assert choose_dispatch(weighed_draft()).node("rollout").layout.spread > 1
    asked = choose_dispatch(weighed_draft(spread={"rollout": 1}))
    assert asked.node("rollout").layout.spread == 1


def test_by_the_price_itself_no_tail_is_apart_here_and_a_wish_is_taken() -> None:
    assert choose_dispatch(weighed_draft()).node("rollout").tail == 0
    wished = choose_dispatch(weighed_draft(tail={"rollout": 0.25}))
    assert wished.node("rollout").tail == 0.25


@settings(max_examples=example_count(40), deadline=None)
@given(
    prompts=st.integers(1, 12),
    samples=st.integers(1, 8),
    chunks=st.integers(1, 6),
    spread=st.integers(1, 8),
    tail=st.sampled_from([0.0, 0.2, 0.5]),
    is_weighed=st.booleans(),
)
def test_a_deal_gives_each_answer_to_one_replica(
    prompts: int, samples: int, chunks: int, spread: int, tail: float, is_weighed: bool
) -> None:
    lengths = RowDistributions(constant_length(50), assumed_answers(800))
    dealt = DealtAnswers(
        lengths=lengths,
        prompts=prompts,
        samples=samples,
        chunks=chunks,
        limits=DecodeBatch(prompts=NO_ROWS, answers=NO_ROWS, shared=samples),
    )
    prices = DealPrices(MODEL, H100, dealt)
    deal = Deal(spread=min(spread, samples), tail=tail, is_weighed=is_weighed)
    dealing = Dealing(prices.dealt)
    for drawn in dealing.draws:
        batches = list(dealing.deal_out(deal, drawn))
        assert len(batches) == chunks
        answers = np.concatenate([batch.answers for batch in batches])
        np.testing.assert_array_equal(np.sort(answers), np.sort(drawn.answers.reshape(-1)))
        if is_weighed:
            assert drawn.expected.shape == (prompts,)
    assert prices.seconds(deal) > 0


def test_chunks_are_balanced_by_the_answers_of_a_span_and_not_by_its_prompt() -> None:
    """Two prompts of three answers each, in spans of one and two."""
    dealt = DealtAnswers(
        lengths=RowDistributions(constant_length(50), constant_length(800)),
        prompts=2,
        samples=3,
        chunks=2,
        limits=DecodeBatch(prompts=NO_ROWS, answers=NO_ROWS, shared=3),
    )
    dealing = Dealing(DealPrices(MODEL, H100, dealt).dealt)
    batches = list(dealing.deal_out(Deal(spread=2, is_weighed=True), dealing.draws[0]))
    assert [len(batch.answers) for batch in batches] == [3, 3]


def test_quantiles_of_two_halves_are_uniform_again() -> None:
    """Else drawn answers would be longer or shorter than what they are drawn from."""
    grid = (np.arange(200) + 0.5) / 200
    one, other = np.meshgrid(grid, grid)
    quantiles = np.sort(_join_quantiles(one.reshape(-1), other.reshape(-1)))
    even = (np.arange(len(quantiles)) + 0.5) / len(quantiles)
    np.testing.assert_allclose(quantiles, even, atol=0.01)


def test_whole_prompts_of_unlike_lengths_are_worth_spreading() -> None:
    """And not if a prompt is longer than all of its answers."""
    gains: list[float] = []
    for prompt in (20, 30_000):
        dealt = DealtAnswers(
            lengths=RowDistributions(constant_length(prompt), assumed_answers(16_000)),
            prompts=32,
            samples=16,
            chunks=8,
            limits=DecodeBatch(prompts=NO_ROWS, answers=NO_ROWS, shared=16),
        )
        prices = DealPrices(MODEL, H100, dealt)
        gains.append(1.0 - prices.seconds(Deal(spread=4)) / prices.seconds(Deal()))
    assert gains[0] > 0.02 > gains[1]


def test_of_many_answers_those_of_some_replicas_are_priced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    priced: list[DealtAnswers] = []

    class NotedPrices(DealPrices):
        def __init__(self, model: Any, where: Any, dealt: DealtAnswers) -> None:
            priced.append(dealt)
            super().__init__(model, where, dealt)

    monkeypatch.setattr(dispatch_pass, "DealPrices", NotedPrices)
    monkeypatch.setattr(dispatch_pass, "_MOST_ROWS", 64)
    of_rollout(32, 4, replicas={"rollout": 8})
    assert [(dealt.prompts, dealt.samples, dealt.chunks) for dealt in priced] == [(16, 4, 4)]
    of_rollout(32, 4, replicas={"rollout": 2})
    assert len(priced) == 1
