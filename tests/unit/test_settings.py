"""Settings edit a finished graph into the one that its functions would have made."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.loss import Loss, Now, Tensors, Terms, loss
from dataflow.model import Model, cosine, linear, warmup
from dataflow.node import Port
from dataflow.operator_functions import function_of, remake_node
from dataflow.parameters import NodeParameter, find_description
from dataflow.program import Program
from dataflow.schema import Advantage, Reward, Rollout, TruncatedRollout
from dataflow.set_expressions import edited, settable
from dataflow.snapshot import from_json, to_json
from dataflow.user import Columns, operator
from operators.advantage import group_advantage
from operators.data import prompts
from operators.evaluation import held_out
from operators.generate import generate
from operators.losses import clipped_policy_loss, entropy_loss, importance
from operators.optimizers import AdamW
from operators.reward import reward
from operators.train import evaluate, train
from tests.kit import algorithms
from tests.kit.rewards import brief, exact
from tests.right_graphs import RIGHT

FOLDER = Path("nowhere")
"""Graphs name files there; nothing here reads them."""


@operator()
def scaled(
    rollout: Columns[Rollout], score: Columns[Reward], *, factor: float = 2.0, note: str = "a"
) -> Columns[Reward]:
    return score.set(reward=score["reward"] * factor)


@loss()
def my_loss(now: Now, advantage: Tensors[Advantage], *, clip: float = 0.2) -> Terms:
    return Terms(advantage["advantages"] * clip)


def small(weights: Any = None) -> Graph:
    """Two rewards, a user's operator, an evaluation, a loss of two terms and a user's."""
    policy = Model("policy", "models/tiny", trainable=True)
    rollout = generate(policy, prompts("a.jsonl", batch=4), n=2, max_tokens=8, name="rollout")
    score = scaled(rollout, reward([exact, brief], rollout, weights=weights, name="score"))
    advantage = group_advantage(rollout, score, name="advantage")
    objective = clipped_policy_loss(advantage) + 0.01 * entropy_loss()
    held = generate(policy, prompts("b.jsonl", name="held"), max_tokens=8, name="eval_rollout")
    grade = reward(exact, held, name="grade")
    trained = train(policy, rollout, loss=objective + my_loss(advantage), lr=1e-6)
    return Graph("small", trained, evaluate(policy, grade, every=5))


def param(graph: Graph, node: str, name: str) -> Any:
    return graph.node(node).params[name]


def terms(graph: Graph) -> dict[str, Any]:
    return {term.label: term for term in param(graph, "train_policy", "loss").terms}


def message(texts: str | list[str], source: Any = None, **flags: Any) -> str:
    with pytest.raises(GraphError) as caught:
        edited(source or small(), [texts] if isinstance(texts, str) else texts, **flags)
    return str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_a_value_that_is_there_already_changes_nothing(make: Callable[[], Graph]) -> None:
    """Neither in a node that is made anew of its arguments, nor as texts as they are shown."""
    graph = make()
    for node in graph.nodes:
        assert remake_node(node, node.inputs, {}) == node
    texts = [f"{n.name}.{p.name}={p.value!r}" for n in settable(graph) for p in n.parameters]
    assert len(texts) > 5
    assert edited(graph, texts) is graph


OTHERS = {
    "optimizer": AdamW(eps=1e-7),
    "scope": "group",
    "correction": importance("sequence", above=3.0),
    "stop": ("a", "b"),
    "weights": None,
}


def other(parameter: NodeParameter) -> Any:
    """Another value than the present one."""
    last, value = parameter.name.rpartition(".")[2], parameter.value
    if last in OTHERS:
        return OTHERS[last]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 or 0.25
    limit = parameter.accepted.limit
    if limit is not None and limit.kind == "choice":
        return next(name for name in limit.choices if name != value)
    if limit is not None and limit.kind in ("whole", "number"):
        return limit.like
    return f"{value}2"


def called_with(
    name: str, node: str, parameter: str, value: Any, patch: pytest.MonkeyPatch
) -> Graph:
    """The shipped graph with that argument given where its file calls the node's function."""
    module = importlib.import_module(f"graphs.{name}")

    def changed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            if isinstance(made, Loss):
                mine = made.terms[0].function.name == parameter.rpartition(".")[0]
            else:
                first = made[0] if isinstance(made, tuple) else made
                mine = (first.node if isinstance(first, Port) else first).name == node
                mine = mine and "." not in parameter
            last = parameter.rpartition(".")[2]
            if not mine:
                return made
            given = inspect.signature(function).bind(*args, **kwargs)
            given.arguments.get("options", given.arguments)[last] = value
            return function(*given.args, **given.kwargs)

        return call

    for key, found in list(vars(module).items()):
        ours = getattr(found, "__module__", "").startswith("operators.")
        ours = ours and found is not held_out  # makes several nodes
        if ours and callable(found) and not isinstance(found, type) and key.islower():
            patch.setattr(module, key, changed(found))
    return algorithms.small(name, FOLDER)


def labels_of_several(graph: Graph) -> set[str]:
    """`LOSS.PARAM` that more than one node has."""
    counted = Counter(p.name for n in settable(graph) for p in n.parameters if "." in p.name)
    return {name for name, nodes in counted.items() if nodes > 1}


def test_an_edited_graph_is_the_one_whose_function_call_had_that_value() -> None:
    """Of each parameter of each operator and loss, in the first shipped graph that has it."""
    tried: set[tuple[str, str]] = set()
    made = 0
    for name in algorithms.NAMES:
        graph = algorithms.small(name, FOLDER)
        shared = labels_of_several(graph)
        for node, parameter in ((n, p) for n in settable(graph) for p in n.parameters):
            place = (node.operator, parameter.name)
            if parameter.name.endswith(".weight") or parameter.name in shared or place in tried:
                continue
            tried.add(place)
            value, path = other(parameter), f"{node.name}.{parameter.name}"
            expected, found = "refused", "refused"
            with pytest.MonkeyPatch.context() as patch, suppress(GraphError):
                expected = called_with(name, node.name, parameter.name, value, patch).digest
            with suppress(GraphError):
                found = edited(graph, [f"{path}={value!r}"]).digest
            assert found == expected, f"{name}: {path}={value!r}"
            made += expected not in ("refused", graph.digest)
    assert made > len(tried) // 2


def test_outputs_that_follow_from_a_value_reach_the_nodes_below() -> None:
    graph = algorithms.small("dapo", FOLDER)
    new = edited(graph, ["rollout.top_p=0.9"])
    assert new.node("rollout").schemas == (TruncatedRollout,)
    assert new.node("select").schemas[0] is TruncatedRollout
    assert edited(new, ["rollout.top_p=1.0"]) == graph


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("rollout.temperature=0.7", 0.7),
        ("rollout.temperature=1", 1.0),
        ("rollout.stop=</answer>", ("</answer>",)),
        ("rollout.stop=['a', \"b\"]", ("a", "b")),
        ("rollout.stop=()", ()),
        ("rollout.stop=7", ("7",)),
        ("rollout.stop='7'", ("7",)),
        ("rollout.stop=none", ()),
        ("rollout.overlong_prompt=drop", "drop"),
        ("rollout.overlong_prompt='drop'", "drop"),
        ("rollout.max_prompt_tokens=None", None),
        ("rollout.max_prompt_tokens=none", None),
        ("prompts.shuffle=FALSE", False),
        ("prompts.split=none", None),
        ("prompts.split='none'", "none"),
        ("prompts.split=2024", "2024"),
        ("prompts.data=b=c.jsonl", "b=c.jsonl"),
        ("score.weights=1,0.5", (1.0, 0.5)),
        ("score.weights=[1, 2]", (1.0, 2.0)),
        ("advantage.baseline=none", "none"),
        ("advantage.dialect=none", None),
        ("scaled.factor=3", 3.0),
        ("scaled.note=3", "3"),
        ("train_policy.lr=cosine(1e-6, 0.0, 100)", cosine(1e-6, 0.0, 100)),
        ("train_policy.lr=cosine(1e-6, 100)", cosine(1e-6, 0.0, 100)),
        ("train_policy.lr=warmup(5, linear(1e-6, stop=0, steps=9))", warmup(5, linear(1e-6, 0, 9))),
        ("train_policy.optimizer=AdamW(eps=1e-7)", AdamW(eps=1e-7)),
        ("train_policy.optimizer=adamw", "adamw"),
        ("evaluate.every=7", 7),
        ("score.on_error=drop_group", "drop_group"),
    ],
)
def test_a_text_means_what_a_user_means(text: str, value: Any) -> None:
    node, _, name = text.partition("=")[0].partition(".")
    found = param(edited(small((3.0, 4.0)), [text]), node, name)
    assert (found, type(found)) == (value, type(value))


def test_a_loss_is_set_by_the_label_of_its_term() -> None:
    texts = ["train_policy.clipped_policy_loss.clip=0.2,0.28", "train_policy.entropy_loss.weight=1"]
    found = terms(edited(small(), [*texts, "train_policy.my_loss.clip=linear(0.3, 0.1, 5)"]))
    assert dict(found["clipped_policy_loss"].params)["clip"] == (0.2, 0.28)
    assert found["entropy_loss"].weight == 1.0
    assert dict(found["my_loss"].params)["clip"] == linear(0.3, 0.1, 5)


def test_values_of_one_node_are_taken_together() -> None:
    cispo = algorithms.small("cispo", FOLDER)
    label = "train_policy.clipped_weight_loss"
    assert "expected cap= or clip=" in message(f"{label}.clip=(1, 4)", cispo)
    new = edited(cispo, [f"{label}.clip=(1, 4)", f"{label}.cap=none"])
    assert dict(terms(new)["clipped_weight_loss"].params)["clip"] == (1.0, 4.0)


REFUSED = {
    "rollout.temperature": "expected NODE.PARAM=VALUE. Fix: rollout.temperature=...",
    "max_lag=3": "expected NODE.PARAM=VALUE. Fix: rollout.max_lag=3 or eval_rollout.max_lag=3",
    "rolout.top_p=1": "no node 'rolout'. Fix: rollout.top_p=...",
    "rollout.temprature=1": "generate 'rollout' has no parameter 'temprature'."
    " Fix: rollout.temperature=1",
    "rollout.num_generations=4": "has no parameter 'num_generations' (TRL's name)."
    " Fix: rollout.n=4",
    "train_policy.epsilon=0.3": "has no parameter 'epsilon' (TRL's name)."
    " Fix: train_policy.clipped_policy_loss.clip=0.3 or train_policy.my_loss.clip=0.3",
    "rollout.temperature=hot": "for temperature expected a number >= 0, found 'hot'."
    " Fix: rollout.temperature=1.0",
    "rollout.n=0": "for n expected a whole number >= 1, found 0. Fix: rollout.n=8",
    "rollout.n=2.5": "for n expected a whole number >= 1, found 2.5. Fix: rollout.n=8",
    "rollout.temperature=cosine(1.0, 0.0, 5)": "for temperature expected a number >= 0,"
    " found 'cosine(1.0, 0.0, 5)'",
    "train_policy.lr=cosin(1.0, 0.0, 5)": "expected a number > 0, or a schedule, found"
    " 'cosin(1.0, 0.0, 5)'. Fix: train_policy.lr=cosine(1.0, 0.0, 5)",
    "train_policy.lr=cosine(1.0)": "cosine: missing a required argument",
    "train_policy.lr=__import__('os')": "expected a number > 0, or a schedule",
    "train_policy.clipped_policy_loss.correction=importance(over=mask)": "importance: expected"
    " literals as arguments, found mask. Fix: 'mask', if it is text.",
    "train_policy.clipped_policy_loss.correction=importance(over='mask')": "needs old=, none given",
    "train_policy.optimizer=sgd": "for optimizer expected 'adamw' or AdamW(...), found 'sgd'",
    "train_policy.optimizer=AdamW(eps=-1)": "AdamW: expected eps to be a number > 0, found -1",
    "rollout.overlong_prompt=dorp": "expected 'error' or 'drop' or 'truncate', found 'dorp'."
    " Fix: rollout.overlong_prompt=drop",
    "score.weights=1,2,3": "reward: 2 functions with 3 weights. Fix: one weight a function",
    "score.weights=high": "for weights expected a list of numbers or None, found 'high'",
    "scaled.factor=big": "for factor expected a number, found 'big'",
    "score.fn=f": "fn is a function, which no text can give. Fix: the graph function's flag for"
    " it, or edit the graph's file",
    "rollout.policy=m": "policy is a State, which no text can give",
    "advantage.rollout=x": "rollout is a Port, the output of a node, which no text can give",
    "scaled.score=x": "score is a Port",
    "train_policy.clipped_policy_loss.old=x": "clipped_policy_loss.old is a Port",
    "train_policy.clipped_policy_loss.cilp=1": "Fix: train_policy.clipped_policy_loss.clip=1",
    "train_policy.loss=x": "loss is a Loss, which no text can give. Fix: its terms' parameters",
    "rollout.name=x": "name is the node's name, which no text can give",
    "score.columns=x": "columns is what follows from other arguments",
    "rollout.n=" + "9" * 5000: "expected a whole number >= 1",
}


@pytest.mark.parametrize("text", list(REFUSED), ids=lambda text: text[:40])
def test_what_cannot_be_set_says_what_can(text: str) -> None:
    found = message(text)
    assert found.startswith(f"setting {text!r:.80}: ")
    assert REFUSED[text] in found


def test_one_parameter_is_set_once() -> None:
    found = message(["rollout.n=3", "rollout.n=4"])
    assert found == "setting 'rollout.n=4': rollout.n is set twice. Fix: leave one out."


@pytest.mark.parametrize("text, flag, fix", [
    ("rollout.max_tokens=64", "max_tokens", "--max-tokens 64"),
    ("train_policy.lr=cosine(1, 9)", "lr", "--lr 'cosine(1, 9)'"),
    ("prompts.shuffle=FALSE", "shuffle", "--no-shuffle"),
    ("prompts.shuffle=true", "shuffle", "--shuffle"),
    ("score.fn=f", "reward_fn", "--reward-fn"),
])  # fmt: skip
def test_a_value_of_the_graph_functions_own_parameter_is_refused(
    text: str, flag: str, fix: str
) -> None:
    path = text.partition("=")[0]
    told = f"{path} is given by the graph function's own parameter {flag}. Fix: {fix}."
    assert message(text, flags={path: flag}) == f"setting {text!r}: {told}"


def test_phases_of_a_program_are_named_where_they_share_a_node() -> None:
    program = Program((small(), 2), (small().renamed("second"), 3), name="both")
    assert "phases 1, 2 have it. Fix: 1/rollout.n=... or 2/rollout.n=..." in message(
        "rollout.n=3", program
    )
    for text in ("2/rollout.n=3", "second/rollout.n=3"):
        new = edited(program, [text])
        assert [param(phase.graph, "rollout", "n") for phase in new.phases] == [2, 3]
        assert (new.name, [phase.steps for phase in new.phases]) == ("both", [2, 3])
    alone = Program((algorithms.small("sft", FOLDER), 2), (small(), 3))
    assert param(edited(alone, ["rollout.n=3"]).phases[1].graph, "rollout", "n") == 3
    assert settable(program)[-1].name == "2/evaluate"


def test_node_names_may_have_dots() -> None:
    dotted = small().map(lambda n: n.changed(name="my.rollout") if n.name == "rollout" else n)
    assert param(edited(dotted, ["my.rollout.n=3"]), "my.rollout", "n") == 3


def test_a_snapshot_is_edited_without_importing_anything() -> None:
    texts = ["rollout.top_k=5", "scaled.factor=4", "score.scope=group"]
    assert to_json(edited(from_json(to_json(small())), texts)) == to_json(edited(small(), texts))


def test_a_declaration_that_only_a_file_has_calls_nothing() -> None:
    declared = small().node("rollout").operator
    for forged in ({"path": "operators.tasks:GENERATE"}, {"name": "truncates"}):
        assert function_of(replace(declared, **forged)) is None
    assert function_of(declared) is generate


def test_what_may_be_set_is_listed_by_node() -> None:
    listed = {node.name: node for node in settable(small())}
    rollout = {p.name: p for p in listed["rollout"].parameters}
    assert (rollout["temperature"].value, rollout["temperature"].expected) == (1.0, "a number >= 0")
    assert rollout["stop"].about == "one or more strings that end an answer when written"
    names = [p.name for p in listed["train_policy"].parameters]
    assert names[-3:] == ["entropy_loss.weight", "my_loss.clip", "my_loss.weight"]
    assert "fn" not in [p.name for p in listed["score"].parameters]


def test_the_help_of_a_parameter_is_its_sentence_in_the_docstring() -> None:
    doc = "Sums.\n\nstart, stop: bounds of\nit (a; b); so. mode: `a`, 1; `b`. kind: one of: `c`."
    assert find_description(doc, "start") == "bounds of it (a; b)"
    assert find_description(doc, "mode") == "`a`, 1; `b`"
    assert find_description(doc, "kind") == "one of"
    assert find_description(doc, "other") == ""


def test_a_node_that_is_not_named_stays_the_same_object() -> None:
    graph = small()
    new = edited(graph, ["advantage.scale=none"])
    others = {n.name for n in new.nodes if n is not graph.node(n.name)}
    assert others == {"advantage", "train_policy"}
