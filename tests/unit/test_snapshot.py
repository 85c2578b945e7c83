"""Snapshots: a graph read back is the graph that was written, and what cannot be read says so."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.loss import Now, Tensors, Terms, loss
from dataflow.model import Buffer, Model, Schedule
from dataflow.node import Node, Port
from dataflow.operator import Fresh, Input, Nothing, Operator
from dataflow.schema import Advantage, Completion, Reward, Rollout, Schema, column
from dataflow.snapshot import FORMAT, decode, encode, fingerprint, from_json, to_json
from dataflow.user import Columns, operator
from graphs.grpo import grpo
from operators.advantage import add, gae, group_advantage, whiten
from operators.data import prompts
from operators.forward import logprobs, values
from operators.generate import generate
from operators.losses import clipped_policy_loss, value_loss
from operators.optimizers import AdamW
from operators.reward import reward
from operators.rewards import verl_reward
from operators.select import best_of, select
from operators.train import evaluate, train
from tests.kit.graphs import graph_of, sampled
from tests.kit.rewards import brief, exact
from tests.kit.turns import example_count


class Noted(Reward):
    """A user's own schema."""

    note = column(pa.utf8())


@operator(scope="group")
def diverse(
    rollout: Columns[Rollout], score: Columns[Reward], *, weight: float = 0.1
) -> Columns[Noted]:
    return score.set(note=["" for _ in range(len(rollout))])  # type: ignore[return-value]


@loss(scope="token")
def plain_loss(now: Now, advantage: Tensors[Advantage], *, power: float = 1.0) -> Terms:
    return Terms(-now.logprobs * advantage["advantage"] ** power)


MEMORY = ("buffer",)
STORE = Operator(
    path=f"{__name__}:STORE",
    name="store",
    work="store",
    rows=Nothing(),
    inputs=(Input(name="rows", schema=Schema),),
    writes=MEMORY,
)
REPLAY = Operator(
    path=f"{__name__}:REPLAY",
    name="replay",
    work="replay",
    rows=Fresh(),
    outputs=(Rollout, Reward),
    reads=MEMORY,
)

numbers = st.one_of(
    st.floats(1e-9, 1.0),
    st.builds(
        Schedule,
        kind=st.sampled_from(["linear", "cosine"]),
        start=st.floats(0, 1),
        stop=st.floats(0, 1),
        steps=st.integers(1, 99),
        warmup=st.integers(0, 9),
    ),
)


def store(rows: Port[Any], capacity: object) -> Node:
    return Node(STORE, "store", inputs={"rows": rows}, params={"capacity": capacity})


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """An algorithm of the vocabulary and of the operators above, with random values; legal or not.
    Other shapes: test_declarations.py, test_graphs.py.
    """
    share = st.floats(0.1, 1.0)
    policy = Model("policy", "base", trainable=True, dtype="bfloat16")
    source = prompts(draw(st.text("abc/", min_size=1)), batch=draw(st.integers(1, 64)))
    rollout = generate(policy, source, n=2, max_tokens=8, stop=("a", "b"), name="rollout")
    rewarded = reward([exact, brief], rollout, weights=[1.0, 0.5], name="score")
    score = diverse(rollout, rewarded, weight=draw(share))
    score = add(score, score, weights=[0.5, 2.0])
    rollout, score = select(rollout, score, where=best_of(score))
    sinks: list[Node] = []
    if draw(st.booleans()):
        sinks.append(write := store(rollout, 3))
        memory = Buffer("memory", writer=write)
        rollout, score = Node(REPLAY, "replay", states={"buffer": memory}).ports
    critic = Model("critic", "base", trainable=True, head="scalar")
    advantage = gae(rollout, score, values(critic, rollout), lam=draw(share))
    reference = logprobs(Model("target", "base", follows=policy, rate=0.25, every=3), rollout)
    clipped = clipped_policy_loss(
        whiten(advantage, rollout), reference=reference, clip=(0.2, 0.28), beta=draw(numbers)
    )
    held = generate(policy, prompts("held", name="held_out"), max_tokens=8, name="held")
    optimizer = AdamW(betas=(0.9, 0.99))
    loss = draw(share) * clipped + plain_loss(advantage, power=draw(share))
    sinks += [
        train(critic, rollout, loss=value_loss(advantage), lr=draw(numbers)),
        train(policy, rollout, loss=loss, lr=draw(numbers), optimizer=optimizer),
        evaluate(policy, reward(brief, held, name="held_score"), every=5),
    ]
    return Graph(draw(st.text(min_size=1, max_size=5)), *draw(st.permutations(sinks)))


@settings(max_examples=example_count(60))
@given(graphs())
def test_a_graph_read_back_is_the_graph_written(graph: Graph) -> None:
    written = to_json(graph)
    again = from_json(written)
    assert again == graph
    assert to_json(again) == written
    for old, new in zip(graph.nodes, again.nodes, strict=True):
        assert new.operator is old.operator
        assert new.schemas == old.schemas


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSettings:
    """A user's own frozen settings."""

    betas: tuple[float, float]
    note: str = ""


VALUES = [
    None, True, 0, -3, 1.0, 0.1, (True, 1, 1.0), float("inf"), "a\u00e9\n",
    (), [], (1,), [1], (1, [2.0, (3,)]), {}, {"a": (1,), 2: [None]}, {(1, 2): "x"},
    pa.int32(), pa.large_list(pa.float32()), pa.timestamp("us", "UTC"),
    pa.struct([pa.field("role", pa.utf8(), nullable=False)]),
    np.float32(0.1), np.int64(3), np.dtype("float16"), Completion, Noted, exact,
    Schedule(kind="linear", start=1.0, stop=0.0, steps=3), FrozenSettings(betas=(0.9, 0.95)),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: getattr(value, "__name__", repr(value)))
def test_values_keep_their_kind(value: Any) -> None:
    again = decode(json.loads(json.dumps(encode(value, "here"))), "here")
    assert again == value
    assert type(again) is type(value)
    if isinstance(value, (list, tuple)):
        assert [type(v) for v in again] == [type(v) for v in value]


def test_what_has_no_written_form_is_refused_with_its_node() -> None:
    told = r"node 'store', parameter 'capacity': a set has no written form. Fix: "
    with pytest.raises(GraphError, match=told):
        to_json(Graph("g", store(sampled(), {1, 2})))


def test_what_no_process_can_import_is_written_and_refused_when_read() -> None:
    def local(completions: list[str]) -> list[float]:
        return [0.0 for _ in completions]

    @operator()
    def halved(score: Columns[Reward]) -> Columns[Reward]:
        return score

    @loss()
    def nothing(now: Now, advantage: Tensors[Advantage]) -> Terms:
        return Terms(advantage["advantage"])

    rollout = sampled()
    score = halved(reward([lambda completions: [1.0], local], rollout, name="score"))
    written = to_json(graph_of(rollout, nothing(group_advantage(rollout, score))))
    with pytest.raises(GraphError) as caught:
        from_json(written)
    nodes = ["halved", "score", "score", "train_policy"]
    assert sorted(fault.where for fault in caught.value.faults) == [f"node '{n}'" for n in nodes]
    for part in (
        "node 'score': it holds '",
        "<lambda>' (test_snapshot.py:",
        "Fix: a def or class at the top level of a module",
    ):
        assert part in str(caught.value)


def test_the_fingerprint_is_of_what_a_graph_means_and_not_of_where_it_stands() -> None:
    def graph(lr: float) -> Graph:
        return grpo("m", "d.parquet", lambda completions, **kwargs: [0.0] * len(completions), lr=lr)

    assert graph(1e-6) != graph(1e-6)  # two lambdas
    assert fingerprint(graph(1e-6)) == fingerprint(graph(1e-6))
    assert fingerprint(graph(1e-6)) != fingerprint(graph(1e-5))


def test_a_function_of_verl_is_a_value() -> None:
    one, two = (grpo("m", "d.parquet", verl_reward(exact)) for _ in range(2))
    assert one == two == from_json(to_json(one))
    assert one != grpo("m", "d.parquet", verl_reward(brief))


def edited(change: Any) -> str:
    """A snapshot of which something else is made."""
    document = json.loads(to_json(grpo("b", "d", brief)))
    change(document)
    return json.dumps(document)


def test_a_newer_format_is_refused() -> None:
    told = rf"it has format {FORMAT + 1}, and this version reads up to {FORMAT}. Fix: "
    with pytest.raises(GraphError, match=told):
        from_json(edited(lambda d: d.update(format=FORMAT + 1)))


@pytest.mark.parametrize("path, told", [
    ("operators.generate:GENERAT", ".* has no 'GENERAT'. Fix: 'GENERATE' is there"),
    ("operators.generat:GENERATE", ".*no module 'operators.generat'. Fix: "),
    ("operators.generate:Literal", "expected an operator at operators.generate:Literal, found"),
])  # fmt: skip
def test_an_unknown_operator_is_named(path: str, told: str) -> None:
    with pytest.raises(GraphError, match=f"node 'rollout': {told}"):
        from_json(edited(lambda d: d["nodes"][1].update(operator=path)))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "1"}', '{"format": 1}'])
def test_other_text_is_no_snapshot(text: str) -> None:
    told = r"snapshot: expected .*Fix: give the graph.json of a run folder"
    with pytest.raises(GraphError, match=told):
        from_json(text)
