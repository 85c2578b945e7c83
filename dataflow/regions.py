"""The cut: which nodes run any time, and which see exactly the rows of one Step.

Owns: the regions of a graph, derived from scopes, States and lags. Does not own: the decision which
finished rows form a Step (engine/coordinator/intake.py).

    stream      row and group scope, at any time; what a source feeds before the cut
    step        batch scope, lag-0 forward readers of a trained Model or Table, every train and
                record node, and all below them

A forward reader that a generation stands on is in the stream, at lag 0 too: its rows, as those of
the generation, are made with the version that the Step starts from.

    evaluation  what only evaluate nodes need; outside admission, at one version
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dataflow.graph import Graph
from dataflow.model import Model, Table
from dataflow.node import Node, Port

Region = Literal["stream", "step", "evaluation"]
_PASSES = ("forward", "host")
"""Work of nodes that read a State and generate nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """`of` maps a node's name to its region. `cut` are the ports that cross from stream to step."""

    of: dict[str, Region]
    why: dict[str, str]
    """For each node of the step region, why it is below the cut."""
    cut: tuple[Port, ...]


def regions(graph: Graph) -> Regions:
    """Derive the regions. A node needed by both evaluation and training is in training's region."""
    changing = find_trained_models(graph) | find_written_tables(graph)
    feeding = _find_above([node for node in graph.nodes if node.operator.traits.generates])
    training_sinks = [sink for sink in graph.sinks if sink.operator.work != "evaluate"]
    training = _find_above(training_sinks)
    of: dict[str, Region] = {}
    why: dict[str, str] = {}
    for node in graph.nodes:
        if id(node) not in training:
            of[node.name] = "evaluation"
            continue
        # A node's parents stand before it in the graph, so that their regions are known.
        read = () if id(node) in feeding else _changing_and_read(node, changing)
        reason = _why_below_cut(node, of, read)
        of[node.name] = "step" if reason else "stream"
        if reason:
            why[node.name] = reason
    return Regions(of=of, why=why, cut=_find_cut(graph, of))


def _find_cut(graph: Graph, of: dict[str, Region]) -> tuple[Port, ...]:
    """The ports of the stream region that the step region reads, each once."""
    cut: dict[tuple[int, int], Port] = {}
    for node in graph.nodes:
        if of[node.name] != "step":
            continue
        for port in node.inputs.values():
            if of[port.node.name] == "stream":
                cut.setdefault((id(port.node), port.index), port)
    return tuple(cut.values())


def find_trained_models(graph: Graph) -> set[str]:
    """Names of the Models that change during a run: those that are trained, and their followers."""
    written: set[str] = set()
    for node in graph.nodes:
        for param, state in node.states.items():
            if param in node.operator.writes and isinstance(state, Model):
                written.add(state.name)
    followers: set[str] = set()
    for state in graph.states:
        if isinstance(state, Model) and any(m.name in written for m in moved_by(state)):
            followers.add(state.name)
    return written | followers


def find_written_tables(graph: Graph) -> set[str]:
    """Names of the Tables that some node writes."""
    written: set[str] = set()
    for node in graph.nodes:
        for param, state in node.states.items():
            if param in node.operator.writes and isinstance(state, Table):
                written.add(state.name)
    return written


def moved_by(model: Model) -> Iterator[Model]:
    """The Models whose changes reach this one: its leaders, up to a copy that stays as it is."""
    for follower in (model, *leaders(model)):
        if follower.follows is None or follower.copies is not None:
            return
        yield follower.follows


def leaders(model: Model) -> Iterator[Model]:
    """The Model that this one follows, the one that that Model follows, and so on."""
    leader = model.follows
    while leader is not None:
        yield leader
        leader = leader.follows


def _find_above(sinks: list[Node]) -> set[int]:
    """Ids of the nodes that these sinks need, including the sinks."""
    ids: set[int] = set()
    stack = list(sinks)
    while stack:
        node = stack.pop()
        if id(node) not in ids:
            ids.add(id(node))
            stack.extend(node.parents)
    return ids


def _why_below_cut(node: Node, of: dict[str, Region], read: Sequence[str]) -> str:
    """Why a node belongs to the step region; empty if it does not. read: what it reads of
    trained Models and of Tables, unless a generation stands on it.
    """
    if node.operator.work in ("train", "record", "store"):
        return "it is a sink of the Step"
    if node.operator.scope == "batch":
        return "batch scope: it needs every row of the Step"
    if read and node.operator.work in _PASSES and node.params.get("max_lag", 0) == 0:
        return f"it reads {read[0]!r} at lag 0: the version that the Step starts from"
    above = [p.node.name for p in node.inputs.values() if of.get(p.node.name) == "step"]
    return f"it reads {above[0]!r}, which is below the cut" if above else ""


def _changing_and_read(node: Node, changing: set[str]) -> list[str]:
    states = (node.states.get(param) for param in node.operator.reads)
    return [state.name for state in states if state is not None and state.name in changing]
