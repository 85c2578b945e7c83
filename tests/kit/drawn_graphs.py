"""Graphs of any size and shape, to be drawn, and what a picture of one must never show.

Owns: the generator, and the geometry that tests ask of a scene. Does not own: any drawing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

from dataflow.draw.scene import EdgeMark, Panel, Point, Rect, Words
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Reward, Rollout
from dataflow.user import Columns, operator
from operators.advantage import add, group_advantage
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.train import train


@operator()
def judged(rollout: Columns[Rollout]) -> Columns[Reward]:
    """A reward of an answer."""
    return Columns.make(Reward, like=rollout, reward=1.0)


@operator()
def shaped(score: Columns[Reward], *, by: float = 1.0) -> Columns[Reward]:
    """Another reward of each reward."""
    return score.set(reward=score["reward"] * by)


@operator()
def mixed(first: Columns[Reward], second: Columns[Reward]) -> Columns[Reward]:
    """A reward of two."""
    return first.set(reward=first["reward"] + second["reward"])


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnShape:
    """What is drawn by chance: nodes in all, the share of chains, of joins, and of judges with a
    Model of their own; the rest begin at the rollout.
    """

    nodes: int
    chains: float = 0.4
    joins: float = 0.3
    models: float = 0.05
    seed: int = 0


def drawn_graph(shape: DrawnShape) -> Graph:
    """A graph of so many nodes (at least 5), all of which training reads."""
    chance = random.Random(shape.seed)
    policy = Model("policy", "models/base", trainable=True)
    rollout = generate(policy, prompts("d", batch=64), n=8, max_tokens=64, name="rollout")
    ends: list[Port[Reward]] = []
    made: list[Port[Reward]] = []
    others: list[Port] = []
    count = 4
    while count + max(0, len(ends) - 1 > 0) < shape.nodes:
        kind, name = chance.random(), f"node_{count}" + "_x" * chance.randrange(4)
        if made and kind < shape.chains:
            above = chance.choice(made[-3:])
            port = shaped.named(name)(above, by=0.5)
            ends = [end for end in ends if end is not above]
        elif len(made) > 1 and kind < shape.chains + shape.joins:
            a, b = chance.sample(made, 2)
            port = mixed.named(name)(a, b)
            ends = [end for end in ends if end is not a and end is not b]
        elif kind > 1 - shape.models:
            others.append(logprobs(Model(f"judge_{count}", "models/j"), rollout, name=name))
            count += 1
            continue
        else:
            port = judged.named(name)(rollout)
        made.append(port)
        ends.append(port)
        count += 1
    score = ends[0] if len(ends) == 1 else add(*ends, name="total")
    advantage = group_advantage(rollout, score, name="advantage")
    loss = clipped_policy_loss(advantage)
    for other in others:
        loss = loss + 0.1 * clipped_policy_loss(advantage, reference=other, beta=0.1)
    return Graph(f"drawn_{shape.nodes}", train(policy, rollout, loss=loss, lr=1e-6))


def fan(width: int) -> Graph:
    """One layer of so many nodes."""
    return drawn_graph(DrawnShape(nodes=width + 5, chains=0.0, joins=0.0, models=0.0))


def boxes_of(panel: Panel) -> dict[str, Rect]:
    """The rectangles of nodes and States, by name."""
    nodes = {f"node {mark.box.name}": mark.rect for mark in panel.nodes}
    return nodes | {f"state {mark.state.name}": mark.rect for mark in panel.states}


def words_of(panel: Panel) -> Iterator[tuple[str, Words]]:
    """Every line of text, with what it belongs to."""
    yield "title", panel.title
    for node in panel.nodes:
        yield from ((f"node {node.box.name}", words) for words in node.words)
    for state in panel.states:
        yield from ((f"state {state.state.name}", words) for words in state.words)
    for edge in panel.edges:
        yield from ((f"edge {edge.source}->{edge.target}", words) for words in edge.words)
    yield from ((f"cut {cut.source}", cut.words) for cut in panel.cuts)
    for worker in panel.workers:
        yield from ((f"worker {worker.workers}", words) for words in worker.words)


def along(edge: EdgeMark, pieces: int = 16) -> Iterator[Point]:
    """Points on an edge's line, as it is drawn."""
    for (x0, y0), (x1, y1) in pairwise(edge.points):
        middle = (y0 + y1) / 2
        for i in range(pieces + 1):
            t = i / pieces
            if edge.round or abs(x0 - x1) < 0.05 or abs(y0 - y1) < 0.05:
                yield x0 + (x1 - x0) * t, y0 + (y1 - y0) * t
                continue
            a, b, c, d = (1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3
            yield (a + b) * x0 + (c + d) * x1, a * y0 + (b + c) * middle + d * y1


def faults(panel: Panel) -> list[str]:
    """What is wrong with a panel's places, in words."""
    boxes, found = boxes_of(panel), []
    frame = Rect(x=0, y=0, width=panel.width, height=panel.height)
    for (a, first), (b, second) in combinations(boxes.items(), 2):
        if first.meets(second, 0.1):
            found.append(f"{a} overlaps {b}")
    for name, rect in boxes.items():
        if not _inside(rect, frame):
            found.append(f"{name} is not in its panel")
    for edge in panel.edges:
        found += _of_edge(edge, boxes, frame)
    return [*found, *_of_words(panel, boxes, frame), *_of_frames(panel)]


def _inside(rect: Rect, frame: Rect) -> bool:
    low = rect.x >= frame.x - 0.1 and rect.y >= frame.y - 0.1
    return low and rect.right <= frame.right + 0.1 and rect.bottom <= frame.bottom + 0.1


def _of_edge(edge: EdgeMark, boxes: dict[str, Rect], frame: Rect) -> Iterator[str]:
    """It ends at its boxes, and passes through none."""
    name = f"edge {edge.source}->{edge.target}"
    kinds = {"data": ("node", "node"), "reads": ("state", "node"), "follows": ("state", "state")}
    first, last = kinds.get(edge.kind, ("node", "state"))
    for kind, end, point in (
        (first, edge.source, edge.points[0]),
        (last, edge.target, edge.points[-1]),
    ):
        matching = [r for n, r in boxes.items() if n.startswith(kind) and _named(n, end)]
        if not any(_touches(rect, point) for rect in matching):
            found = f"{name} does not touch {kind} {end}"
            yield found
    for point in along(edge):
        inside = [box for box, rect in boxes.items() if rect.has(point, 0.5)]
        if inside:
            yield f"{name} is behind {inside[0]}"
            break
        if not frame.has(point):
            yield f"{name} leaves its panel"
            break


def _named(item: str, name: str) -> bool:
    """Whether a box is a node's or State's of that name, or a chain's that begins or ends so."""
    names = item.partition(" ")[2].split(", ")
    return name in (names[0], names[-1])


def _touches(rect: Rect, point: Point) -> bool:
    x, y = point
    within = rect.x - 0.1 <= x <= rect.right + 0.1 and rect.y - 0.1 <= y <= rect.bottom + 0.1
    return within and not rect.has(point, 0.2)


def _of_words(panel: Panel, boxes: dict[str, Rect], frame: Rect) -> Iterator[str]:
    """Text is inside of its box and covers no other text; labels cover no box."""
    texts = list(words_of(panel))
    for (a, first), (b, second) in combinations(texts, 2):
        if first.rect.meets(second.rect, 0.5):
            yield f"{a} {first.text!r} is above {b} {second.text!r}"
    for owner, words in texts:
        if owner in boxes and not _inside(words.rect, boxes[owner]):
            yield f"{owner} has no room for {words.text!r}"
        if owner not in boxes and any(rect.meets(words.rect, 0.5) for rect in boxes.values()):
            yield f"{owner} {words.text!r} covers a box"
        if not _inside(words.rect, frame):
            yield f"{owner} {words.text!r} leaves its panel"
    for edge in panel.edges:
        for cut in panel.cuts:
            if any(cut.words.rect.has(point) for point in along(edge)):
                yield f"edge {edge.source}->{edge.target} crosses the words of the cut"


def _of_frames(panel: Panel) -> Iterator[str]:
    """Frames of Workers do not meet, and hold exactly their nodes."""
    for a, b in combinations(panel.workers, 2):
        if a.rect.meets(b.rect):
            yield f"Workers {a.workers} overlap {b.workers}"
    for node in panel.nodes:
        for worker in panel.workers:
            if worker.rect.meets(node.rect) and not _inside(node.rect, worker.rect):
                yield f"node {node.box.name} is half in {worker.workers}"
