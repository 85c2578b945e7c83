"""The language: equality by content, rewrites that keep what they can, calls, public names."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dataflow
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.loss import Loss, Now, Tensors, Terms, loss
from dataflow.model import Model, cosine, linear, warmup
from dataflow.node import Node, Port, content
from dataflow.regions import trained_models
from dataflow.schema import Advantage, Completion, Logprobs, Prompt, Reward, Rollout
from dataflow.user import Columns, operator
from graphs.grpo import grpo
from operators.advantage import add, group_advantage, overlong_penalty
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, entropy_loss, policy_gradient_loss
from operators.reward import reward
from operators.select import mixed_groups, select
from operators.train import train
from tests.kit.edited_graphs import ppo_from_grpo
from tests.kit.rewards import brief, exact
from tests.right_graphs import RIGHT

ROOT = Path(__file__).parent.parent.parent
BASE, DATA = "models/tiny", "data/train.parquet"

policy = Model("policy", BASE, trainable=True)


def sampled(n: int = 8, name: str = "rollout") -> Port[Rollout]:
    return generate(policy, prompts(DATA, batch=64), n=n, max_tokens=64, name=name)


def trained(rows: Port[Completion], advantage: Port[Advantage]) -> Node:
    return train(policy, rows, loss=clipped_policy_loss(advantage), lr=1e-6)


# Equality


@pytest.mark.parametrize("make", RIGHT, ids=lambda f: f.__name__)
def test_a_graph_made_twice_is_equal_to_itself(make: Callable[[], Graph]) -> None:
    first, second = make(), make()
    assert first is not second
    assert first == second
    assert hash(first) == hash(second)


def test_graphs_that_differ_are_unequal() -> None:
    graphs = [make() for make in RIGHT]
    assert len(set(graphs)) == len(graphs)


CHANGES = {"n": 4, "batch": 32, "beta": 0.1, "lr": 1e-5, "max_lag": 1}


@pytest.mark.parametrize("name, value", [*CHANGES.items(), ("lr", linear(1e-6, 0.0, 10))], ids=str)
def test_any_parameter_counts(name: str, value: object) -> None:
    assert grpo(BASE, DATA, exact, **{name: value}) != grpo(BASE, DATA, exact)


def test_a_name_counts_and_a_line_does_not() -> None:
    assert sampled() == sampled()
    assert sampled().node.origin is not None
    assert sampled(name="other") != sampled()


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


def test_a_rewrite_that_changes_nothing_is_the_same_object() -> None:
    g = grpo(BASE, DATA, exact)
    assert g.replace() is g
    assert g.extend() is g
    assert g.renamed("grpo") is g
    assert g.replace(advantage=g.port("advantage", Advantage)) is g


@pytest.mark.parametrize("make", RIGHT, ids=lambda f: f.__name__)
def test_replacing_any_node_by_itself_is_the_same_object(make: Callable[[], Graph]) -> None:
    g = make()
    for node in g.nodes:
        if node.schemas:
            assert g.replace(**{node.name: node.ports}) is g


def test_a_rewrite_keeps_the_objects_that_it_does_not_change() -> None:
    g = grpo(BASE, DATA, exact)
    rollout, score = g.port("rollout", Rollout), g.port("score", Reward)
    h = g.replace(advantage=group_advantage(rollout, score, scale="none", name="plain"))
    assert h is not g
    for name in ("prompts", "rollout", "score", "reference"):
        assert h.node(name) is g.node(name)
    assert h.node("train_policy") is not g.node("train_policy")
    assert h.node("train_policy").origin == g.node("train_policy").origin


def test_replace_may_stand_on_what_it_replaces() -> None:
    g = grpo(BASE, DATA, exact)
    rollout, score = g.port("rollout", Rollout), g.port("score", Reward)
    h = g.replace(score=overlong_penalty(rollout, score, max_tokens=512, buffer=64, name="shaped"))
    assert h.node("advantage").inputs["score"].node.name == "shaped"
    assert h.node("shaped").inputs["score"].node is g.node("score")


def test_replace_reaches_the_writer_of_what_is_below() -> None:
    g = grpo(BASE, DATA, exact)
    h = g.replace(prompts=prompts(DATA, batch=32))
    assert h.node("prompts").params["batch"] == 32
    assert h == grpo(BASE, DATA, exact, batch=32)


def test_ppo_is_an_edit_of_grpo() -> None:
    g, ppo = grpo(BASE, DATA, exact, n=1, batch=256), ppo_from_grpo(BASE, DATA, exact)
    before, after = ({n.name: n.operator.name for n in graph.nodes} for graph in (g, ppo))
    assert after.keys() - before.keys() == {"values", "gae", "train_critic"}
    assert before.keys() - after.keys() == {"advantage"}
    assert before["advantage"] == "group_advantage"
    assert "group_advantage" not in after.values()
    assert {m.name for m in ppo.states if isinstance(m, Model)} == {"policy", "reference", "critic"}
    loss_port = ppo.node("train_policy").inputs["clipped_policy_loss.advantage"]
    assert loss_port.node is ppo.node("train_critic").inputs["value_loss.returns"].node
    assert [s.name for s in ppo.sinks] == ["train_policy", "train_critic"]


def test_nodes_come_after_what_they_stand_on() -> None:
    for make in RIGHT:
        seen: set[int] = set()
        for node in make().nodes:
            assert all(id(parent) in seen for parent in node.parents)
            seen.add(id(node))


def test_what_no_sink_reaches_is_not_in_the_graph() -> None:
    rollout = sampled()
    advantage = group_advantage(rollout, reward(exact, rollout))
    reward(brief, rollout, name="forgotten")
    assert "forgotten" not in {n.name for n in Graph("g", trained(rollout, advantage)).nodes}


@st.composite
def random_graphs(draw: st.DrawFn) -> Graph:
    """A policy trained on sums of sums of rewards, wired at random."""
    rollout = sampled(n=draw(st.integers(2, 4)))
    scores: list[Port[Reward]] = [reward(exact, rollout, name="score_0")]
    for name in [f"score_{i}" for i in range(1, draw(st.integers(1, 6)))]:
        if draw(st.booleans()):
            parts = draw(st.lists(st.sampled_from(scores), min_size=1, max_size=3))
            scores.append(add(*parts, weights=[0.5] * len(parts), name=name))
        else:
            limits, score = (
                {"max_tokens": draw(st.integers(65, 99)), "buffer": 8},
                st.sampled_from(scores),
            )
            scores.append(overlong_penalty(rollout, draw(score), name=name, **limits))
    advantage = group_advantage(rollout, draw(st.sampled_from(scores)), name="advantage")
    return Graph("random", trained(rollout, advantage))


@settings(max_examples=40, deadline=None)
@given(random_graphs(), st.data())
def test_a_rewrite_and_its_reverse_give_back_an_equal_graph(g: Graph, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([n.name for n in g.nodes if n.name.startswith("score")]))
    old = g.port(name, Reward)
    new = reward(brief, g.port("rollout", Rollout), name="new")
    h = g.replace(**{name: new})
    assert h != g
    below = {n.name for n in g.nodes if stands_on(n, old.node)}
    for node in h.nodes:
        kept = node.name not in below and node.name != "new"
        assert (any(node is n for n in g.nodes)) == kept
    assert h.replace(new=old) == g


def stands_on(node: Node, other: Node) -> bool:
    return any(p is other or stands_on(p, other) for p in node.parents)


@settings(max_examples=40, deadline=None)
@given(random_graphs())
def test_rebuilding_on_equal_inputs_is_the_same_object(g: Graph) -> None:
    for node in g.nodes:
        assert node.rebuilt(dict(node.inputs)) is node
        assert node.changed() == node
        assert node.changed(name="another") != node


def test_a_line_of_followers_is_among_the_states_leaders_first() -> None:
    near = Model("near", BASE, follows=policy)
    far = Model("far", BASE, follows=near, every=10)
    rollout = sampled()
    loss = policy_gradient_loss(group_advantage(rollout, reward(exact, rollout)))
    g = Graph("g", train(policy, rollout, loss=loss + anchored(logprobs(far, rollout)), lr=1e-6))
    assert [s.name for s in g.states] == ["policy", "near", "far"]
    assert trained_models(g) == {"policy", "near", "far"}


def test_a_frozen_copy_does_not_change_nor_does_what_follows_it() -> None:
    copy = Model("copy", BASE, follows=policy, every=0)
    rollout = sampled()
    loss = policy_gradient_loss(group_advantage(rollout, reward(exact, rollout)))
    g = Graph("g", train(policy, rollout, loss=loss + anchored(logprobs(copy, rollout)), lr=1e-6))
    assert [s.name for s in g.states] == ["policy", "copy"]
    assert trained_models(g) == {"policy"}
    assert copy.copies == policy
    assert policy.copies is None
    assert Model("slow", BASE, follows=policy).copies is None


@pytest.mark.parametrize("given, problem", [
    ({}, "every=0 keeps a copy of the Model that it follows, and it follows none. Fix: follows="),
    ({"follows": policy, "rate": 0.5}, "so that rate=0.5 would mean nothing. Fix: every=1, or no"),
    ({"follows": policy, "every": -1}, "expected every to be a whole number >= 0, found -1"),
])  # fmt: skip
def test_a_frozen_copy_needs_a_leader_and_no_rate(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(GraphError, match=re.escape(problem)):
        Model("copy", BASE, **{"every": 0} | given)


@loss()
def anchored(now: Now, reference: Tensors[Logprobs]) -> Terms:
    assert now.logprobs is not None
    return Terms(now.logprobs - reference["logprobs"])


# Losses


def test_losses_add_and_scale() -> None:
    rollout = sampled()
    advantage = group_advantage(rollout, reward(exact, rollout))
    clipped, gradient = clipped_policy_loss(advantage), policy_gradient_loss(advantage)
    loss = clipped + 0.01 * entropy_loss() + gradient * 2
    weights = {"clipped_policy_loss": 1.0, "entropy_loss": 0.01, "policy_gradient_loss": 2.0}
    assert [(t.function.name, t.weight) for t in loss.terms] == list(weights.items())
    node = train(policy, rollout, loss=loss, lr=1e-6)
    ports = ["clipped_policy_loss.advantage", "policy_gradient_loss.advantage"]
    assert list(node.inputs) == ["rows", *ports]


def test_two_uses_of_one_loss_have_labels_of_their_own() -> None:
    rollout = sampled()
    a = group_advantage(rollout, reward(exact, rollout), name="a")
    b = group_advantage(rollout, reward(brief, rollout, name="brief"), name="b")
    loss = policy_gradient_loss(a) + 0.5 * policy_gradient_loss(b)
    node = train(policy, rollout, loss=loss, lr=1e-6)
    bound = node.params["loss"]
    assert isinstance(bound, Loss)
    assert [t.label for t in bound.terms] == ["policy_gradient_loss", "policy_gradient_loss_2"]
    assert node.inputs["policy_gradient_loss_2.advantage"] == b


def test_a_weight_may_be_a_schedule_and_is_scaled_with_it() -> None:
    rollout = sampled()
    advantage = group_advantage(rollout, reward(exact, rollout))
    assert (2.0 * (0.5 * policy_gradient_loss(advantage))).terms[0].weight == 1.0


# Schedules


def test_schedules_reach_their_ends() -> None:
    assert [linear(1.0, 0.0, 5).at(step) for step in (1, 3, 5, 9)] == [1.0, 0.5, 0.0, 0.0]
    assert cosine(1.0, 0.0, 5).at(3) == pytest.approx(0.5)
    rising = warmup(4, linear(1.0, 0.0, 5))
    assert [rising.at(step) for step in (1, 2, 4, 5, 9)] == [0.25, 0.5, 1.0, 1.0, 0.0]


# Calls


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: sampled_with(num_generations=8), r"'num_generations' \(TRL's name\)\. Fix: n=8\."),
        (lambda: sampled_with(max_response_length=9), r".*\(verl's name\)\. Fix: max_tokens=9\."),
        (lambda: sampled_with(max_staleness=2), r".*Fix: max_lag=2\."),
        (lambda: sampled_with(max_tokns=9), r"'max_tokns'\. Fix: max_tokens=9\."),
        (lambda: sampled_with(do_sample=True), r".*Fix: temperature=0\.0 for greedy decoding\."),
        (lambda: sampled_with(zzz=1), r".*Fix: one of: policy, prompt, n, "),
        (lambda: prompts_with(num_train_epochs=3), r"'num_train_epochs'.*RunOptions\(steps=\) "),
    ],
)  # fmt: skip
def test_an_unknown_parameter_names_ours(call: Callable[[], object], message: str) -> None:
    told = rf"(generate|prompts): unknown parameter {message}"
    with pytest.raises(GraphError, match=told) as caught:
        call()
    assert caught.value.faults[0].origin is not None
    assert caught.value.faults[0].origin.file == __file__


def prompts_with(**options: object) -> object:
    return prompts(DATA, **options)  # type: ignore[arg-type]


def sampled_with(**options: object) -> object:
    given = {"max_tokens": 64} | options if "max_tokns" not in options else options
    return generate(policy, prompts(DATA, batch=64), **given)  # type: ignore[arg-type]


def test_a_user_operator_knows_its_parameters_and_its_plain_function() -> None:
    rollout = sampled()
    score = reward(exact, rollout)
    port = longer(rollout, score, weight=0.5)
    assert port.node.params == {"weight": 0.5}
    assert port.schema is Reward
    assert port.node.origin is not None
    assert port.node.origin.file == __file__
    told = r"longer: unknown parameter 'wieght'\. Fix: weight=0\.5\."
    with pytest.raises(GraphError, match=told):
        longer(rollout, score, wieght=0.5)  # type: ignore[call-arg]
    assert longer.named("longer_2")(rollout, score).node.name == "longer_2"
    assert longer.fn.__name__ == "longer"


@operator()
def longer(
    rows: Columns[Rollout], score: Columns[Reward], *, weight: float = 0.1
) -> Columns[Reward]:
    return score


def test_port_and_node_name_what_there_is() -> None:
    g = grpo(BASE, DATA, exact)
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


def test_a_port_typed_by_a_parent_schema_is_found() -> None:
    assert grpo(BASE, DATA, exact).port("rollout", Completion).schema is Rollout


# Public names


def test_public_names_are_sorted_and_there() -> None:
    assert dataflow.__all__ == sorted(dataflow.__all__)
    assert all(hasattr(dataflow, name) for name in dataflow.__all__)
    assert callable(dataflow.operator)
    assert callable(dataflow.loss)
    assert callable(dataflow.check)


INTERNAL = {"Column", "Head", "OperatorDeclaration", "LossDeclaration", "LossFunction", "LossTerm"}
INTERNAL |= {"Origin"}
"""What a graph file never names: the language makes them."""


@pytest.mark.parametrize(
    "module", ["errors", "schema", "model", "graph", "node", "loss", "user", "check"]
)
def test_every_public_class_and_decorator_of_the_language_is_exported(module: str) -> None:
    found = public_classes(importlib.import_module(f"dataflow.{module}"))
    left_out = {"SourceSize", "TrainSize"} if module == "check" else INTERNAL
    assert found - left_out - set(dataflow.__all__) == set()


def public_classes(module: ModuleType) -> set[str]:
    classes = inspect.getmembers(module, inspect.isclass)
    return {n for n, c in classes if c.__module__ == module.__name__ and not n.startswith("_")}


def loaded_by(statement: str) -> Sequence[str]:
    """The modules that a fresh interpreter has after a statement."""
    code = f"{statement}\nimport sys; print(*sorted(sys.modules))"
    command, how = [sys.executable, "-c", code], {"cwd": ROOT, "text": True, "timeout": 60}
    return subprocess.run(command, capture_output=True, check=True, **how).stdout.split()


HEAVY = {"torch", "transformers", "vllm", "networkx", "reasoning_gym", "tokenizers"}


@pytest.mark.parametrize(
    "statement", ["import dataflow", "import graphs.grpo, graphs.ppo, graphs.sft"]
)
def test_the_language_and_the_graphs_load_nothing_heavy(statement: str) -> None:
    assert HEAVY & set(loaded_by(statement)) == set()


def test_the_check_of_a_graph_loads_no_torch() -> None:
    statement = (
        "import pyarrow, tests.right_graphs as g; from dataflow import check; check(g.plain_grpo(),"
        " lambda data, split: {'prompt': pyarrow.utf8(), 'answer': pyarrow.utf8()})"
    )
    assert HEAVY & set(loaded_by(statement)) == set()


def test_declarations_name_kernels_and_import_none() -> None:
    for file in sorted((ROOT / "operators").glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
        assert not {m for m in imported if m.startswith("operators.kernels")}, file.name
