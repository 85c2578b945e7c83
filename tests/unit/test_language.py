"""The language: equality by content, rewrites that keep what they can, calls, public names."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dataflow
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.model import Model, cosine, linear, warmup
from dataflow.node import Node, Port, content
from dataflow.regions import find_trained_models
from dataflow.schema import Advantage, Completion, Prompt, Reward, Rollout
from dataflow.user import Columns, operator
from operators.advantage import group_advantage, overlong_penalty
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, entropy_loss, kl_loss, policy_gradient_loss
from operators.reward import reward
from operators.rewards import RewardFn
from operators.select import mixed_groups, select
from tests.kit.drawn_graphs import DrawnShape, drawn_graph
from tests.kit.graphs import BASE, DATA, graph_of, grpo_graph, policy, sampled, trained
from tests.kit.processes import ROOT
from tests.kit.rewards import brief, exact
from tests.kit.turns import example_count
from tests.right_graphs import RIGHT

# Equality


def test_graphs_that_differ_are_unequal() -> None:
    graphs = [make() for make in RIGHT]
    assert len(set(graphs)) == len(graphs)


CHANGES = {"n": 4, "batch": 32, "beta": 0.1, "lr": 1e-5, "max_lag": 1}


@pytest.mark.parametrize("name, value", [*CHANGES.items(), ("lr", linear(1e-6, 0.0, 10))], ids=str)
def test_any_parameter_counts(name: str, value: object) -> None:
    assert grpo_graph(**{name: value}) != grpo_graph()


def test_a_line_does_not_count() -> None:
    first = prompts(DATA, batch=64)
    second = prompts(DATA, batch=64)
    assert first == second
    assert first.node.origin != second.node.origin


def test_whole_numbers_flags_and_fractions_are_told_apart() -> None:
    assert len({content(value) for value in (1, 1.0, True, "1", None, [1], (1, 1))}) == 7


def test_functions_compare_by_name_and_lambdas_by_identity() -> None:
    rollout = sampled()
    assert reward(exact, rollout) == reward(exact, rollout)
    assert reward(exact, rollout) != reward(brief, rollout)
    one, two = (lambda completions: [1.0 for _ in completions] for _ in range(2))
    assert reward(one, rollout) == reward(one, rollout)
    assert reward(one, rollout) != reward(two, rollout)


def test_outputs_of_one_node_are_told_apart() -> None:
    rollout = sampled()
    score = reward(exact, rollout)
    a, b = select(rollout, score, where=mixed_groups(score))
    assert a != b
    assert a.node is b.node
    assert (a.label, b.label) == ("select.0", "select.1")
    assert (a.schema, b.schema) == (Rollout, Reward)


# Rewrites


@pytest.mark.parametrize("make", RIGHT)
def test_a_rewrite_that_changes_nothing_is_the_same_object(make: Callable[[], Graph]) -> None:
    g = make()
    assert g.replace() is g.extend() is g.renamed(g.name) is g
    for node in g.nodes:
        if node.schemas:
            assert g.replace(**{node.name: node.ports}) is g


def test_replace_may_stand_on_what_it_replaces() -> None:
    g = grpo_graph()
    rollout, score = g.port("rollout", Rollout), g.port("score", Reward)
    h = g.replace(score=overlong_penalty(rollout, score, max_tokens=512, buffer=64, name="shaped"))
    assert h.node("advantage").inputs["score"].node.name == "shaped"
    assert h.node("shaped").inputs["score"].node is g.node("score")


def test_replace_reaches_the_writer_of_what_is_below() -> None:
    h = grpo_graph().replace(prompts=prompts(DATA, batch=32))
    assert h.node("prompts").params["batch"] == 32
    assert h == grpo_graph(batch=32)


def test_nodes_come_after_what_they_stand_on() -> None:
    for make in RIGHT:
        seen = set()
        for node in make().nodes:
            assert all(id(parent) in seen for parent in node.parents)
            seen.add(id(node))


def test_what_no_sink_reaches_is_not_in_the_graph() -> None:
    rollout = sampled()
    advantage = group_advantage(rollout, reward(exact, rollout))
    reward(brief, rollout, name="forgotten")
    graph = graph_of(rollout, clipped_policy_loss(advantage))
    assert "forgotten" not in {n.name for n in graph.nodes}


SHAPES = st.builds(DrawnShape, nodes=st.integers(5, 12), models=st.just(0.0), seed=st.integers(0))
"""Of graphs whose rewards are wired at random."""


@settings(max_examples=example_count(40))
@given(SHAPES.map(drawn_graph), st.data())
def test_a_rewrite_keeps_what_it_does_not_change_and_its_reverse_gives_an_equal_graph(
    g: Graph, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([n.name for n in g.nodes if n.schemas == (Reward,)]))
    old = g.port(name, Reward)
    new = reward(brief, g.port("rollout", Rollout), name="new")
    h = g.replace(**{name: new})
    assert h != g
    below = {n.name for n in g.nodes if stands_on(n, old.node)}
    for node in h.nodes:
        if node.name == "new":
            continue
        assert (node is g.node(node.name)) == (node.name not in below)
        assert node.origin == g.node(node.name).origin
    assert h.replace(new=old) == g


def stands_on(node: Node, other: Node) -> bool:
    return any(p is other or stands_on(p, other) for p in node.parents)


@settings(max_examples=example_count(40))
@given(SHAPES.map(drawn_graph))
def test_rebuilding_on_equal_inputs_is_the_same_object(g: Graph) -> None:
    for node in g.nodes:
        assert node.rebuilt(dict(node.inputs)) is node
        assert node.changed() == node
        assert node.changed(name="another") != node


NEAR = Model("near", BASE, follows=policy)
COPY = Model("copy", BASE, follows=policy, every=0)


@pytest.mark.parametrize(
    ("reference", "states", "moving"),
    [
        (Model("far", BASE, follows=NEAR, every=10), ["near", "far"], {"near", "far"}),
        (COPY, ["copy"], set()),
        (Model("slow", BASE, follows=COPY), ["copy", "slow"], set()),
    ],
    ids=["a line of followers", "a frozen copy", "what follows a frozen copy"],
)
def test_followers_are_among_the_states_leaders_first_and_change_unless_frozen(
    reference: Model, states: list[str], moving: set[str]
) -> None:
    rollout = sampled()
    g = graph_of(rollout, kl_loss(logprobs(reference, rollout)))
    assert [s.name for s in g.states] == ["policy", *states]
    assert find_trained_models(g) == {"policy"} | moving


def test_a_frozen_copy_alone_copies() -> None:
    assert COPY.copies == policy
    assert policy.copies is None
    assert NEAR.copies is None


@pytest.mark.parametrize("given, problem", [
    ({}, "every=0 keeps a copy of the Model that it follows, and it follows none. Fix: follows="),
    ({"follows": policy, "rate": 0.5}, "so that rate=0.5 would mean nothing. Fix: every=1, or no"),
    ({"follows": policy, "every": -1}, "expected every to be a whole number >= 0, found -1"),
])  # fmt: skip
def test_a_frozen_copy_needs_a_leader_and_no_rate(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(GraphError, match=re.escape(problem)):
        Model("copy", BASE, **{"every": 0} | given)


# Losses


def advantage_of(score: RewardFn, name: str) -> Port[Advantage]:
    rollout = sampled()
    return group_advantage(rollout, reward(score, rollout, name=f"{name}_score"), name=name)


def test_losses_add_and_scale() -> None:
    advantage = advantage_of(exact, "a")
    clipped, gradient = clipped_policy_loss(advantage), policy_gradient_loss(advantage)
    loss = clipped + 0.01 * entropy_loss() + 2.0 * (gradient * 0.5)
    weights = {"clipped_policy_loss": 1.0, "entropy_loss": 0.01, "policy_gradient_loss": 1.0}
    assert {t.function.name: t.weight for t in loss.terms} == weights
    node = trained(sampled(), loss)
    ports = ["clipped_policy_loss.advantage", "policy_gradient_loss.advantage"]
    assert list(node.inputs) == ["rows", *ports]


def test_two_uses_of_one_loss_have_labels_of_their_own() -> None:
    b = advantage_of(brief, "b")
    loss = policy_gradient_loss(advantage_of(exact, "a")) + policy_gradient_loss(b)
    node = trained(sampled(), loss)
    assert node.inputs["policy_gradient_loss_2.advantage"] == b


# Schedules


def test_schedules_reach_their_ends() -> None:
    assert [linear(1.0, 0.0, 5).at(step) for step in (1, 3, 5, 9)] == [1.0, 0.5, 0.0, 0.0]
    assert cosine(1.0, 0.0, 5).at(3) == pytest.approx(0.5)
    rising = warmup(4, linear(1.0, 0.0, 5))
    assert [rising.at(step) for step in (1, 2, 4, 5, 9)] == [0.25, 0.5, 1.0, 1.0, 0.0]


# Calls


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_staleness": 2}, r".*Fix: max_lag=2\."),
        ({"do_sample": True}, r".*Fix: temperature=0\.0 for greedy decoding\."),
        ({"zzz": 1}, r".*Fix: one of: policy, prompt, n, "),
        ({"num_train_epochs": 3}, r"'num_train_epochs'.*RunOptions\(steps=\) "),
    ],
)
def test_an_unknown_parameter_names_ours(given: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=rf"generate: unknown parameter {message}") as caught:
        generate(policy, prompts(DATA, batch=64), **given)
    assert caught.value.faults[0].origin.file == __file__


def test_a_user_operator_knows_its_parameters_and_its_plain_function() -> None:
    rollout = sampled()
    score = reward(exact, rollout)
    port = longer(rollout, score, weight=0.5)
    assert port.node.params == {"weight": 0.5}
    assert port.schema is Reward
    assert port.node.origin.file == __file__
    with pytest.raises(
        GraphError, match=r"longer: unknown parameter 'wieght'\. Fix: weight=0\.5\."
    ):
        longer(rollout, score, wieght=0.5)  # type: ignore[call-arg]
    assert longer.named("longer_2")(rollout, score).node.name == "longer_2"
    assert longer.fn.__name__ == "longer"


@operator()
def longer(
    rows: Columns[Rollout], score: Columns[Reward], *, weight: float = 0.1
) -> Columns[Reward]:
    return score


def test_port_and_node_name_what_there_is() -> None:
    g = grpo_graph()
    assert g.port("rollout", Completion).schema is Rollout, "a parent's schema"
    told = r"no node 'advantag'; nodes: advantage, .*Fix: 'advantage'"
    with pytest.raises(GraphError, match=told):
        g.node("advantag")
    told = r"expected Prompt, found Rollout\. Fix: g\.port\('rollout', Rollout\)"
    with pytest.raises(GraphError, match=told):
        g.port("rollout", Prompt)
    with pytest.raises(GraphError, match="train has no output"):
        g.port("train_policy", Rollout)
    with pytest.raises(GraphError, match="it has 1 outputs, found 2"):
        g.replace(score=(g.port("score", Reward), g.port("score", Reward)))


# Public names


def test_public_names_are_sorted_and_there() -> None:
    assert dataflow.__all__ == sorted(dataflow.__all__)
    assert all(hasattr(dataflow, name) for name in dataflow.__all__)


INTERNAL = {
    "Column", "Head", "LossDeclaration", "LossFunction", "LossTerm", "OperatorDeclaration",
    "Origin",
}  # fmt: skip
"""What a graph file never names: the language makes them."""


@pytest.mark.parametrize(
    "module", ["errors", "schema", "model", "graph", "node", "loss", "user", "check"]
)
def test_every_public_class_and_decorator_of_the_language_is_exported(module: str) -> None:
    name = f"dataflow.{module}"
    classes = inspect.getmembers(importlib.import_module(name), inspect.isclass)
    public = {n for n, c in classes if c.__module__ == name and not n.startswith("_")}
    left_out = {"SourceSize", "TrainSize"} if module == "check" else INTERNAL
    assert public - left_out - set(dataflow.__all__) == set()


HEAVY = {"torch", "transformers", "vllm", "networkx", "reasoning_gym", "tokenizers"}


def test_graphs_and_their_check_load_nothing_heavy() -> None:
    code = (
        "import pyarrow, sys, tests.right_graphs as g; from dataflow import check\n"
        "columns = {'prompt': pyarrow.utf8(), 'answer': pyarrow.utf8()}\n"
        "check(g.plain_grpo(), lambda data, split: columns)\n"
        "print(*sys.modules)"
    )
    loaded = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=300)
    assert HEAVY & set(loaded.split()) == set()
