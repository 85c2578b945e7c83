"""The price of Steps that are worked on in parts, and what is chosen by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dataflow.batch import Keys
from dataflow.check import check
from dataflow.graph import Graph
from dataflow.ragged import Ragged
from engine.plan.cluster import Cluster
from engine.plan.leaving_batches import ForeseenRows, list_batches
from engine.plan.options import (
    RunOptions,
    decode_options,
    encode_options,
    keep_choice,
    make_placing,
)
from engine.plan.plan import Plan
from engine.plan.planner import make_plan
from engine.plan.priced_work import StepLengths
from engine.plan.step_price import step_seconds
from operators.kernels.leaving_rows import ChunkRows, LeavingRows
from tests.kit.graphs import small_grpo, small_ppo
from tests.kit.plans import headers, placed
from tests.kit.simulated_rows import SCORED
from tests.unit.test_step_price import LENGTHS, WIDE, grpo, simulate_step

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.mark.parametrize(
    ("graph", "asked"),
    [
        (lambda: grpo(), {"stream": "ordered", "part_tokens": 500}),
        (lambda: grpo(), {"stream": "ordered", "part_tokens": 16384}),
        (lambda: grpo(), {"stream": "ordered", "part_tokens": 3000, "replicas": {"rollout": 4}}),
        (lambda: grpo(), {"stream": "arrival", "part_tokens": 500, "replicas": {"rollout": 4}}),
        (
            lambda: grpo(),
            {
                "stream": "ordered",
                "part_tokens": 3000,
                "chunks": {"rollout": 3},
                "replicas": {"rollout": 2},
            },
        ),
        (lambda: grpo(), {"stream": "ordered", "part_tokens": 500, "ranks": {"train_policy": 2}}),
        (
            lambda: small_grpo(batch=32, n=8, max_tokens=400),
            {"stream": "ordered", "part_tokens": 3000},
        ),
        (lambda: small_ppo(batch=256, max_tokens=400), {"stream": "ordered", "part_tokens": 3000}),
    ],
    ids=["small", "large", "replicas", "arrival", "chunks", "ranks", "reference", "ppo"],
)
def test_a_step_in_parts_takes_as_long_as_it_is_simulated(
    graph: Any, asked: dict[str, Any]
) -> None:
    plan = placed(graph(), **WIDE, **asked, spread={"rollout": 1})
    price = step_seconds(plan, LENGTHS, seconds=SCORED)
    assert price == pytest.approx(simulate_step(plan), rel=0.05)


def test_small_parts_cost_a_pass_each() -> None:
    """Each part of a train node that is as slow as generation costs a micro-batch."""
    seconds = {
        tokens: step_seconds(
            placed(grpo(), **WIDE, stream="ordered", part_tokens=tokens, ranks={"train_policy": 2}),
            LENGTHS,
        )
        for tokens in (500, 6400)
    }
    assert seconds[500] > 1.05 * seconds[6400]


# --- the choice -----------------------------------------------------------------------------------


def chosen(graph: Graph, *, cores: int = 16, threads: int | None = 1, **options: Any) -> Plan:
    placing = make_placing(RunOptions(**options))
    cluster = Cluster(cores=cores, memory=2**35)
    return make_plan(
        check(graph, headers), seed=0, threads=threads, placing=placing, cluster=cluster
    )


def large() -> Graph:
    return small_grpo(batch=256, n=8, max_tokens=900)


def notes_on_streams(plan: Plan) -> str:
    return "\n".join(note for note in plan.notes if "stream" in note or "parts while" in note)


def test_a_step_is_streamed_where_the_price_says_so() -> None:
    plan = chosen(large(), workers="apart")
    (source,) = plan.sources
    assert source.stream == "ordered"
    assert source.part_tokens >= plan.node("train_policy").layout.tokens
    assert "shorter by its price" in notes_on_streams(plan)
    assert plan == chosen(large(), workers="apart")
    whole = chosen(large(), workers="apart", stream="off")
    assert step_seconds(plan, StepLengths(assumes_answers=True)) < 0.97 * step_seconds(
        whole, StepLengths(assumes_answers=True)
    )


@pytest.mark.long
def test_the_gain_of_a_chosen_stream_is_simulated() -> None:
    options: dict[str, Any] = {"workers": "apart"}
    plan, whole = chosen(large(), **options), chosen(large(), **options, stream="off")
    assert simulate_step(plan) < 0.97 * simulate_step(whole)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({}, "the Worker that generates does everything else"),
        ({"workers": "apart", "threads": None}, "would share 16 cores"),
        ({"workers": "apart", "batch": 32}, "less than 3% gained"),
    ],
    ids=["one", "cores", "gain"],
)
def test_a_step_is_not_streamed_and_why(asked: dict[str, Any], why: str) -> None:
    batch = asked.pop("batch", 256)
    plan = chosen(small_grpo(batch=batch, n=8, max_tokens=900 * batch // 256), **asked)
    assert [source.stream for source in plan.sources] == ["off"]
    assert not any(node.in_parts for node in plan.nodes)
    assert why in notes_on_streams(plan)


def test_with_a_lag_nothing_is_said_of_streams() -> None:
    assert notes_on_streams(chosen(grpo(max_lag=1), workers="apart")) == ""


def test_the_choice_is_kept_for_a_resume() -> None:
    plan = chosen(large(), workers="apart")
    kept = keep_choice(RunOptions(workers="apart"), [plan])
    (source,) = plan.sources
    assert (kept.stream, kept.part_tokens) == (source.stream, source.part_tokens)
    decoded, _ = decode_options(encode_options(kept), {})
    again = chosen(large(), workers="apart", stream=decoded.stream, part_tokens=decoded.part_tokens)
    assert again.sources == plan.sources
    off = chosen(grpo())
    assert keep_choice(RunOptions(), [off]).stream == "off"
    # Before there was the option no Step was streamed.
    assert decode_options("{}", {})[0].stream == "off"


def test_sums_of_gradients_are_counted() -> None:
    whole, parts = (
        placed(grpo(), **WIDE, stream=stream, part_tokens=500).node("train_policy")
        for stream in ("off", "ordered")
    )
    assert "sums" not in whole.estimate.bytes
    assert parts.estimate.bytes["sums"] == 4 * 452_480
    assert "gradients" not in parts.estimate.bytes


# --- rows that leave ------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_seconds", [0.01, 0.125])
@pytest.mark.parametrize("part_tokens", [0, 1, 40, 100])
def test_rows_are_foreseen_to_leave_as_the_kernel_lets_them(
    part_tokens: int, pass_seconds: float
) -> None:
    """In the batches of operators/kernels/leaving_rows.py, which is interrupted each second."""
    answers = np.random.default_rng(0).integers(1, 60, 24)
    groups = np.repeat(np.arange(6), 4)
    node = placed(grpo(), **WIDE, stream="ordered", part_tokens=500).node("rollout")
    node = replace(node, layout=replace(node.layout, part_tokens=part_tokens))
    ends = pass_seconds * answers
    rows = ForeseenRows(starts=np.zeros(24), ends=ends, groups=groups, answers=answers)
    foreseen = [(now, sorted(batch.tolist())) for now, batch in list_batches(node, rows)]
    now = 0
    leaving = LeavingRows(
        node.layout.slots, flows=False, tokens=part_tokens, lengths=lambda: np.minimum(answers, now)
    )
    prompts = Ragged(np.zeros(6, np.int32), np.arange(7))
    keys = Keys.of(range(6)).expand(4)
    leaving.add(ChunkRows(prompts=prompts, counts=np.full(6, 4), keys=keys, numbers=np.arange(24)))
    left: list[tuple[float, list[int]]] = []
    for now in range(1, 61):
        moment = pass_seconds * now
        ended = np.flatnonzero(answers == now)
        beats = [ended[:0]] if part_tokens and moment % 1.0 == 0.0 and leaving.chunks else []
        batches: list[int] = []
        for numbers in [ended, *beats] if len(ended) else beats:
            for _, batch in leaving.gather(iter([numbers])):
                batches += batch.tolist()
        if batches or beats:
            left.append((moment, sorted(batches)))
    assert left == foreseen
    assert len(left) > 1 or not part_tokens
