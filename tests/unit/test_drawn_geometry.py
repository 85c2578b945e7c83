"""Drawings of any graph: nothing overlaps or leaves the picture, and nothing is drawn twice."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.draw import Placed, draw
from dataflow.draw.fold import MANY, fold_chains
from dataflow.draw.node_places import PlacedWorker
from dataflow.draw.overlay import Overlay
from dataflow.draw.picture import make_picture
from dataflow.draw.scene import Rect, Scene
from dataflow.draw.style import sheet
from dataflow.draw.svg import make_scene
from dataflow.graph import Graph
from dataflow.node import Port
from dataflow.schema import Reward, Rollout
from dataflow.user import Columns, operator
from graphs.grpo import grpo
from operators.losses import clipped_policy_loss
from tests.kit import algorithms
from tests.kit.drawn_graphs import DrawnShape, boxes_of, drawn_graph, fan, faults, shaped
from tests.kit.graphs import compared, graph_of, sampled, scored
from tests.kit.rewards import exact

SVG = "{http://www.w3.org/2000/svg}"
SHAPES = st.builds(
    DrawnShape,
    nodes=st.integers(5, 30),
    chains=st.sampled_from([0.0, 0.4, 0.9]),
    joins=st.sampled_from([0.0, 0.3]),
    models=st.sampled_from([0.0, 0.1, 0.3]),
    seed=st.integers(0, 10_000),
)
KINDS = ("plain", "life", "folded", "placed", "notes")


def on_workers(graph: Graph) -> Placed:
    """Nodes in turn on three Workers, one of which is on another host and has two GPUs."""
    names = ("rollout", "data", "train")
    workers = (
        PlacedWorker(name="rollout", host="a", devices=(0, 1), threads=1),
        PlacedWorker(name="data", host="b", threads=4),
        PlacedWorker(name="train"),
    )
    nodes = {node.name: (names[i % 3],) for i, node in enumerate(graph.nodes)}
    return Placed(workers=workers, nodes=nodes)


def overlay(kind: str, graph: Graph) -> Overlay:
    if kind == "placed":
        return Overlay(placed=on_workers(graph))
    if kind == "notes":
        busy = ("busy 54 %, waits 31 % for rows", "34.8 rows/s, 1,204 tokens/s")
        notes = dict.fromkeys((node.name for node in graph.nodes), busy)
        return Overlay(notes=notes | {"policy->generate": ("10 loads, 34 ms each",)})
    return Overlay(life=kind in ("life", "folded"))


def scene_of(kind: str, graph: Graph) -> Scene:
    shown = make_picture(graph)
    return make_scene(fold_chains(shown, None) if kind == "folded" else shown, overlay(kind, graph))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(SHAPES)
def test_nothing_overlaps_or_leaves_the_picture(kind: str, shape: DrawnShape) -> None:
    made = scene_of(kind, drawn_graph(shape))
    for panel in made.panels:
        assert faults(panel) == []
        x, y = panel.at
        assert x + panel.width <= made.width
        assert y + panel.height <= made.height


@pytest.mark.parametrize("name", algorithms.NAMES)
def test_nor_does_it_in_an_algorithm_that_comes_with_it(name: str, tmp_path: Path) -> None:
    graph = algorithms.small(name, tmp_path)
    for kind in KINDS:
        for panel in scene_of(kind, graph).panels:
            assert faults(panel) == [], kind
    assert scene_of("plain", graph).width <= 1200


def test_what_overlaps_is_found() -> None:
    """The test above can fail: each of these is told."""
    (panel,) = scene_of("plain", drawn_graph(DrawnShape(nodes=8))).panels
    first, second = panel.nodes[0], panel.nodes[1]
    moved = Rect(x=first.rect.x + 5, y=first.rect.y + 5, width=50, height=50)
    far = replace(panel, width=first.rect.x)
    found = faults(replace(far, nodes=[first, replace(second, rect=moved), *panel.nodes[2:]]))
    edge = next(e for e in panel.edges if e.kind == "data")
    (x, y), *_, last = edge.points
    middle = panel.nodes[2].rect.middle
    behind = replace(edge, points=((x, y), middle, last))
    edges = [behind if e is edge else e for e in panel.edges]
    found += faults(replace(panel, edges=edges))
    for told in (
        "overlaps", "does not touch", "has no room for", "is not in its panel", "is behind",
    ):  # fmt: skip
        assert told in " ".join(found)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_a_graph_of_forty_nodes_is_at_most_two_thousand_pixels_wide(seed: int) -> None:
    for models in (0.0, 0.2):
        graph = drawn_graph(DrawnShape(nodes=40, models=models, seed=seed))
        for kind in ("plain", "life", "folded", "notes"):
            assert scene_of(kind, graph).width <= 2000, kind
    assert scene_of("life", fan(35)).width <= 2000


def marked(root: ElementTree.Element, *names: str) -> list[tuple[str, ...]]:
    """These attributes of each group that has the last of them."""
    groups = [group.attrib for group in root.iter(f"{SVG}g") if names[-1] in group.attrib]
    return sorted(tuple(group[name] for name in names) for group in groups)


@settings(max_examples=20)
@given(SHAPES, st.booleans())
def test_each_part_is_there_once_and_bytes_are_those_of_the_graph(
    shape: DrawnShape, life: bool
) -> None:
    graph = drawn_graph(shape)
    made = draw(graph, "svg", life=life, fold=False)
    root = ElementTree.fromstring(made)
    wires = {f"{p.node.name}->{n.name}" for n in graph.nodes for p in n.inputs.values()}
    assert marked(root, "data-node") == sorted((node.name,) for node in graph.nodes)
    assert marked(root, "data-state") == sorted((state.name,) for state in graph.states)
    assert marked(root, "data-edge") == sorted((wire,) for wire in wires)
    assert marked(root, "data-model", "data-reader") == sorted(
        (state.name, node.name)
        for node in graph.nodes
        for state in node.states.values()
        if node.operator.name != "train"
    )
    assert draw(drawn_graph(shape), "svg", life=life, fold=False) == made


def scored_by(rollout: Port[Rollout], score: Port[Reward]) -> Graph:
    """A policy that is trained on this reward of its answers."""
    return graph_of(rollout, clipped_policy_loss(compared(rollout, score)))


def chain(length: int) -> Graph:
    """A graph of so many nodes, most in one line."""
    rollout = sampled()
    score = scored(rollout)
    for i in range(length - 5):
        score = shaped.named(f"shaped_{i}")(score, by=0.5)
    return scored_by(rollout, score)


def test_chains_are_one_box_from_more_than_twenty_five_nodes() -> None:
    at, above = chain(MANY), chain(MANY + 1)
    assert (MANY, len(at.nodes), len(above.nodes)) == (25, 25, 26)
    assert "data-nodes" not in draw(at, "svg")
    made = draw(above, "svg")
    found = re.findall(r'data-nodes="([^"]+)"', made)
    assert " ".join(f"shaped_{i}" for i in range(21)) in " ".join(found)
    assert made.count("data-node=") + sum(len(n.split()) for n in found) == 26
    assert "data-nodes" not in draw(above, "svg", fold=False)
    assert "data-nodes" in draw(at, "svg", fold=True)
    assert draw(above).count("shaped_") >= 21


@operator()
def joined(first: Columns[Rollout], second: Columns[Rollout]) -> Columns[Reward]:
    """A reward of the same answers, twice."""
    return Columns.make(Reward, like=first, reward=1.0)


def test_edges_between_the_same_nodes_are_one_with_its_ports_named() -> None:
    rollout = sampled()
    drawing = draw(scored_by(rollout, joined.named("score")(rollout, rollout)), "svg")
    assert drawing.count('data-edge="rollout-&gt;score"') == 1
    root = ElementTree.fromstring(drawing)
    (edge,) = (g for g in root.iter(f"{SVG}g") if g.get("data-edge") == "rollout->score")
    labels = " ".join(text.text or "" for text in edge.iter(f"{SVG}text"))
    assert "first" in labels
    assert "second" in labels
    assert not re.search(r"\d", labels)


def test_what_a_parameter_says_is_text() -> None:
    graph = grpo("models/<b>&'\"", "<script>&.parquet", exact)
    for life in (False, True):
        root = ElementTree.fromstring(draw(graph, "svg", life=life))
        assert [each.tag for each in root.iter() if "script" in each.tag] == []
        words = " ".join(text.text or "" for text in root.iter(f"{SVG}text"))
        assert "<script>" in words


def test_light_and_dark_set_the_same_colours() -> None:
    blocks = re.findall(r"\.dataflow\{((?:--df-[^}]+))\}", sheet())
    names = [set(re.findall(r"(--df-[a-z-]+):", block)) for block in blocks]
    assert len(names) >= 3
    assert all(each == names[0] for each in names)
    used = set(re.findall(r"var\((--df-[a-z-]+)\)", sheet()))
    assert used <= names[0]
    assert len(set(blocks)) == 2


def test_a_state_stands_beside_its_writer() -> None:
    (panel,) = scene_of("plain", drawn_graph(DrawnShape(nodes=12))).panels
    boxes = boxes_of(panel)
    writes = [edge for edge in panel.edges if edge.kind == "writes"]
    assert len(writes) == 1
    (x0, y0), (x1, y1) = writes[0].points[0], writes[0].points[-1]
    assert y0 == y1
    assert x1 - x0 < 120
    node, state = boxes[f"node {writes[0].source}"], boxes[f"state {writes[0].target}"]
    assert node.right < state.x
