"""Drawings and diffs: golden texts (GOLDEN=write writes them), and what holds for any graph."""

from __future__ import annotations

import random
import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from dataflow.diff import diff
from dataflow.draw import draw
from dataflow.draw.layers import Size, assign, crossings, place
from dataflow.draw.picture import picture
from dataflow.draw.svg import svg
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
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.select import mixed_groups, select
from operators.train import evaluate, train
from tests.kit.comparison import require_golden
from tests.kit.edited_graphs import ppo_from_grpo
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
    test, greedy = (
        prompts("test.parquet", name="held_out"),
        {"temperature": 0.0, "max_tokens": 2048},
    )
    held = generate(policy, test, **greedy, name="held_out_rollout")
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


def test_text_is_ascii_and_names_every_node_in_order() -> None:
    graph = dapo()
    text = draw(graph)
    assert text.isascii()
    names = [rf"^(?:.*> |  ){box.name}\b" for box in picture(graph).boxes]
    starts = [found.start() for n in names if (found := re.search(n, text, re.MULTILINE))]
    assert len(starts) == len(graph.nodes)
    assert starts == sorted(starts)


def test_text_rails_join_exactly_the_wires() -> None:
    """On a node's line a `+`, digit or `*` stands in the column of each of its sources."""
    for make in GRAPHS.values():
        drawing = picture(make())
        lines = draw(make()).splitlines()
        line_of, column_of = {}, {}
        for box in drawing.boxes:
            pattern = rf"(?:[ |]*[-+|*0-9]*> |  )({re.escape(box.name)})(?: |$)"
            named = [(line, found) for line in lines if (found := re.match(pattern, line))]
            line, found = next(
                pair for pair in named if bool(box.wires) == (">" in pair[1].group(0))
            )
            line_of[box.index], column_of[box.index] = line, found.start(1)
        for box in drawing.boxes:
            branch = line_of[box.index][: column_of[box.index]]
            taps = {i for i, mark in enumerate(branch) if mark in "+*0123456789"}
            assert taps == {column_of[wire.source] for wire in box.wires}, box.name


def test_the_cut_stands_between_the_regions() -> None:
    lines = draw(GRAPHS["ppo"]()).splitlines()
    cut = next(i for i, line in enumerate(lines) if "the cut" in line)
    assert any("kl_in_reward" in line for line in lines[:cut])
    assert any(line.lstrip(" |+->").startswith("old ") for line in lines[cut:])
    assert not any("train_policy" in line for line in lines[:cut])


def test_states_have_writers_readers_and_lags() -> None:
    text = draw(GRAPHS["grpo"]())
    assert "written by train_policy; read by rollout (lag <= 1)" in text
    assert re.search(r"reference +Model models/base, fixed +read by reference$", text, re.MULTILINE)


def test_only_parameters_that_were_set_are_shown() -> None:
    text = draw(GRAPHS["grpo"]())
    assert "generate(policy, n=8, max_tokens=512, max_lag=1)" in text
    assert "temperature" not in text
    assert "clipped_policy_loss(beta=0.04)" in text


def test_a_graph_that_the_check_refuses_can_be_drawn() -> None:
    policy = Model("policy", "b")
    # Two nodes of one name.
    rollout = generate(policy, prompts("d", batch=2), max_tokens=4, name="prompts")
    loss = clipped_policy_loss(logprobs(policy, rollout))
    graph = Graph("wrong", train(policy, rollout, loss=loss, lr=1.0))
    for form in ("text", "mermaid", "dot"):
        assert draw(graph, form).count("prompts") >= 2
    ElementTree.fromstring(svg(picture(graph)).encode())


def test_an_empty_graph_can_be_drawn() -> None:
    assert draw(Graph("empty")).startswith("empty")
    ElementTree.fromstring(svg(picture(Graph("empty"))).encode())


@pytest.mark.parametrize("name", GRAPHS)
def test_svg_is_xml_with_every_name_and_nothing_outside_of_the_picture(name: str) -> None:
    graph = GRAPHS[name]()
    root = ElementTree.fromstring(svg(picture(graph)).encode())
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert graph.name in texts
    assert {n.name for n in graph.nodes} | {s.name for s in graph.states} <= set(texts)
    width, height = (float(v) for v in root.attrib["viewBox"].split()[2:])
    for panel in root.iter("{http://www.w3.org/2000/svg}g"):
        if "transform" in panel.attrib:
            x, y = (float(v) for v in re.findall(r"[\d.]+", panel.attrib["transform"]))
            for frame in panel.iter("{http://www.w3.org/2000/svg}rect"):
                assert x + float(frame.attrib["x"]) + float(frame.attrib["width"]) <= width
                assert y + float(frame.attrib["y"]) + float(frame.attrib["height"]) <= height


def test_an_unknown_form_is_refused_with_the_nearest() -> None:
    with pytest.raises(GraphError, match=r"no form 'mermaids'. Fix: form='mermaid'"):
        draw(GRAPHS["sft"](), "mermaids")  # type: ignore[arg-type]


def test_layout_layers_edges_downwards_and_boxes_do_not_overlap() -> None:
    random.seed(7)
    for _ in range(20):
        names = [f"b{i}" for i in range(random.randint(2, 14))]
        pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
        edges = random.sample(pairs, min(len(pairs), 2 * len(names)))
        sizes = {name: Size(width=random.randint(20, 90), height=20.0) for name in names}
        placed = place(sizes, edges, least={})
        assert all(placed.layer[a] < placed.layer[b] for a, b in edges)
        for a, b in combinations(names, 2):
            apart = abs(placed.x[a] - placed.x[b]) - (sizes[a].width + sizes[b].width) / 2
            assert placed.layer[a] != placed.layer[b] or apart >= -1e-6


def test_layout_finds_the_order_without_crossings() -> None:
    edges = [("a", "z"), ("b", "y"), ("c", "x")]
    placed = place({n: Size(width=10.0, height=10.0) for n in "abcxyz"}, edges, least={})
    rows = [sorted("abc", key=placed.x.__getitem__), sorted("xyz", key=placed.x.__getitem__)]
    assert crossings(rows, edges) == 0


def test_layers_respect_a_least_layer() -> None:
    sizes = {n: Size(width=1.0, height=1.0) for n in "abc"}
    assert assign(sizes, [("a", "b"), ("b", "c")], {"b": 3}) == {"a": 2, "b": 3, "c": 4}


def test_diff_of_grpo_and_ppo_as_its_edit() -> None:
    before = grpo("models/base", "train.parquet", exact)
    after = ppo_from_grpo("models/base", "train.parquet", exact)
    edits = diff(before, after)
    require_golden("draw/grpo_to_ppo.diff", str(edits))
    assert [(e.kind, e.name) for e in edits.states] == [("appears", "critic")]
    kinds = {e.name: e.kind for e in edits.nodes}
    assert kinds["advantage"] == "vanishes"
    assert kinds["gae"] == kinds["values"] == kinds["train_critic"] == "appears"
    (moved,) = [c for e in edits.nodes for c in e.rewired]
    assert moved.what == "clipped_policy_loss.advantage"
    assert (moved.before, moved.after) == ("advantage", "gae")


def test_diff_of_equal_graphs_is_empty() -> None:
    edits = diff(dapo(), dapo())
    assert not edits
    assert "no difference" in str(edits)


def test_diff_is_empty_exactly_for_equal_parameters() -> None:
    a = grpo("models/base", "train.parquet", exact)
    changes = {"lr": 2e-6, "beta": 0.1, "n": 4, "max_lag": 1}
    for name, value in [*changes.items(), ("lr", linear(1e-6, 0.0, 9))]:
        b = grpo("models/base", "train.parquet", exact, **{name: value})
        (entry,) = diff(a, b).nodes
        assert len(entry.changes) == 1
        assert entry.changes[0].before != entry.changes[0].after


def test_diff_of_the_order_of_sinks_and_of_a_follower() -> None:
    policy, critic = Model("policy", "b", trainable=True), Model("critic", "b", trainable=True)
    rollout = generate(policy, prompts("d", batch=2), max_tokens=4)
    followed, fixed = Model("reference", "b", follows=policy), Model("reference", "b")

    def graph(reference: Model, *, swapped: bool) -> Graph:
        loss = clipped_policy_loss(logprobs(reference, rollout))
        sinks = [train(model, rollout, loss=loss, lr=1.0) for model in (policy, critic)]
        return Graph("g", *(reversed(sinks) if swapped else sinks))

    edits = diff(graph(fixed, swapped=False), graph(followed, swapped=True))
    assert edits.order[0].after == "train_critic, train_policy"
    (entry,) = edits.states
    assert str(entry.changes[0]) == "follows: None -> policy"
