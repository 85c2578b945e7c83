"""Drawings and diffs: golden texts (GOLDEN=write writes them), and what holds for any graph."""

from __future__ import annotations

import random
from xml.etree import ElementTree

import pytest

from dataflow.diff import diff
from dataflow.draw import draw
from dataflow.draw.layer_draft import Size
from dataflow.draw.layer_order import count_crossings
from dataflow.draw.layers import assign_layers, lay_out_boxes
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.model import Model, linear
from graphs.grpo import grpo
from graphs.ppo import ppo
from graphs.sft import sft
from operators.advantage import group_advantage, overlong_penalty
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, supervised_loss
from operators.reward import reward
from operators.select import mixed_groups, select
from operators.train import evaluate, train
from tests.kit.comparison import require_golden
from tests.kit.edited_graphs import ppo_from_grpo
from tests.kit.graphs import graph_of, policy, sampled
from tests.kit.rewards import exact


def dapo() -> Graph:
    """Selection, several outputs, lag, an evaluation, and a name that every form must escape."""
    policy = Model("policy", "models/base", trainable=True)
    prompt = prompts("train.parquet", batch=512)
    rollout = generate(policy, prompt, n=16, max_tokens=2048, max_lag=2, name="rollout")
    score = reward(exact, rollout, name="score")
    kept, kept_score = select(rollout, score, where=mixed_groups(score), refill=True)
    shaped = overlong_penalty(kept, kept_score, max_tokens=2048, buffer=512)
    loss = clipped_policy_loss(group_advantage(kept, shaped), clip=(0.2, 0.28))
    test = prompts("test.parquet", name="held_out")
    held = generate(policy, test, temperature=0.0, max_tokens=2048, name="held_out_rollout")
    best = evaluate(policy, reward(exact, held, name="held_out_reward"), every=50, keep_best=1)
    trained = train(policy, kept, loss=loss, lr=linear(1e-6, 0.0, 500), minibatches=16)
    return Graph('da<po> & "co" | 5', trained, best)


GRAPHS = {
    "sft": lambda: sft("models/base", "demonstrations.jsonl"),
    "grpo": lambda: grpo("models/base", "train.parquet", exact, beta=0.04, max_lag=1),
    "ppo": lambda: ppo("models/base", "train.parquet", exact),
    "dapo": dapo,
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("form, ending", [("text", "txt"), ("mermaid", "mmd"), ("dot", "dot")])
def test_golden(name: str, form: str, ending: str) -> None:
    require_golden(f"draw/{name}.{ending}", draw(GRAPHS[name](), form))


def test_the_cut_stands_between_the_regions() -> None:
    stream, _, step = draw(GRAPHS["ppo"]()).partition("the cut")
    assert "-> kl_in_reward" in stream
    assert "-> train_policy" not in stream
    assert "-> old " in step


def test_a_graph_that_the_check_refuses_can_be_drawn() -> None:
    two_of_one_name = generate(policy, prompts("d", batch=2), max_tokens=4, name="prompts")
    graph = graph_of(two_of_one_name, supervised_loss())
    for form in ("text", "mermaid", "dot", "svg"):
        assert draw(graph, form).count("prompts") >= 2


def test_an_empty_graph_can_be_drawn() -> None:
    assert draw(Graph("empty")).startswith("empty")
    ElementTree.fromstring(draw(Graph("empty"), "svg").encode())


def test_an_unknown_form_is_refused_with_the_nearest() -> None:
    with pytest.raises(GraphError, match=r"no form 'mermaids'. Fix: form='mermaid'"):
        draw(GRAPHS["sft"](), "mermaids")  # type: ignore[arg-type]


def test_layout_layers_edges_downwards() -> None:
    random.seed(7)
    for _ in range(20):
        names = [f"b{i}" for i in range(random.randint(2, 14))]
        pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
        edges = random.sample(pairs, min(len(pairs), 2 * len(names)))
        placed = lay_out_boxes(dict.fromkeys(names, Size(width=20.0, height=20.0)), edges, least={})
        assert all(placed.layer[a] < placed.layer[b] for a, b in edges)


def test_layout_finds_the_order_without_crossings() -> None:
    edges = [("a", "z"), ("b", "y"), ("c", "x")]
    placed = lay_out_boxes({n: Size(width=10.0, height=10.0) for n in "abcxyz"}, edges, least={})
    rows = [sorted("abc", key=placed.x.__getitem__), sorted("xyz", key=placed.x.__getitem__)]
    assert count_crossings(rows, edges) == 0


def test_layers_respect_a_least_layer() -> None:
    sizes = {n: Size(width=1.0, height=1.0) for n in "abc"}
    assert assign_layers(sizes, [("a", "b"), ("b", "c")], {"b": 3}) == {"a": 2, "b": 3, "c": 4}


def test_diff_of_grpo_and_ppo_as_its_edit() -> None:
    before = grpo("models/base", "train.parquet", exact)
    after = ppo_from_grpo("models/base", "train.parquet", exact)
    require_golden("draw/grpo_to_ppo.diff", str(diff(before, after)))


def test_diff_of_the_order_of_sinks_and_of_a_follower() -> None:
    rollout = sampled()

    def graph(reference: Model, *trained: str) -> Graph:
        loss = clipped_policy_loss(logprobs(reference, rollout))
        models = (Model(name, "b", trainable=True) for name in trained)
        return Graph("g", *(train(model, rollout, loss=loss, lr=1.0) for model in models))

    before = graph(Model("reference", "b"), "one", "other")
    after = graph(Model("reference", "b", follows=policy), "other", "one")
    edits = diff(before, after)
    assert edits.order[0].after == "train_other, train_one"
    (entry,) = edits.states
    assert str(entry.changes[0]) == "follows: None -> policy"
