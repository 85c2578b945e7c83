"""A plan in a drawing: nodes on their Workers, and what each should take.

Owns: what of a plan a drawing shows, and in which words. Does not own: drawings (dataflow.draw),
what a run measured (engine/watch/flow_drawing.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from dataflow.draw.node_places import Placed, PlacedWorker
from dataflow.program import numbered_name
from dataflow.safe_text import shown_bytes
from engine.plan.cost.memory import peak
from engine.plan.explain.layout import duration
from engine.plan.plan import Plan, PlannedNode
from engine.plan.program_plan import AnyPlan

Notes = dict[str, tuple[str, ...]]
"""Lines of a drawing: by node, `a->b`, or `model->reader`; of a Program after `2/`."""


class Split(Protocol):
    """How a node is split, as of `dataflow.kernel.Layout`."""

    @property
    def data(self) -> int: ...
    @property
    def tensor(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def threads(self) -> int: ...


class PlacedNode(Protocol):
    """A node of a plan, or of a plan.json."""

    @property
    def name(self) -> str: ...
    @property
    def workers(self) -> Sequence[str]: ...
    @property
    def layout(self) -> Split: ...


def placed(
    nodes: Sequence[PlacedNode], hosts: Mapping[str, str], devices: Mapping[str, Sequence[int]]
) -> Placed:
    """Nodes on Workers; hosts and devices by Worker."""
    names = dict.fromkeys(worker for node in nodes for worker in node.workers)
    workers = (
        PlacedWorker(
            name=name,
            host=hosts.get(name, ""),
            devices=tuple(devices.get(name, ())),
            threads=max(node.layout.threads for node in nodes if name in node.workers),
        )
        for name in names
    )
    return Placed(
        workers=tuple(workers),
        nodes={node.name: tuple(node.workers) for node in nodes},
        ranks={node.name: ranks(node.layout) for node in nodes},
    )


def ranks(layout: Split) -> int:
    """Workers of one replica."""
    return max(1, layout.data * layout.tensor * layout.context)


def places(plan: AnyPlan) -> list[Placed]:
    """The Workers of each phase."""
    return [placed(phase.nodes, phase.hosts, phase.devices) for phase in plan.phases]


def planned_notes(plan: AnyPlan) -> Notes:
    """Memory and seconds of nodes, bytes and routes of edges, as they are estimated for a Step."""
    notes: Notes = {}
    for phase in plan.phases:
        for name, lines in _of(phase):
            if lines:
                notes[numbered_name(phase.phase_number, name)] = lines
    return notes


def _of(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    for node in plan.nodes:
        yield node.name, tuple(_node(node))
    for edge in plan.edges:
        yield f"{edge.producer}->{edge.consumer}", (f"{shown_bytes(edge.bytes)}, {edge.route}",)
    for model in plan.models:
        for reader in model.readers if model.writer else ():
            yield f"{model.name}->{reader}", (_route(model.route, reader in model.aliases),)


def _node(node: PlannedNode) -> Iterable[str]:
    parts = [_split(node), _memory(node)]
    if node.estimate.seconds is not None:
        parts.append(duration(node.estimate.seconds))
    return [", ".join(filter(None, parts))] if any(parts) else []


def _memory(node: PlannedNode) -> str:
    most = peak([node.estimate.bytes])
    return shown_bytes(most) if most else ""


def _split(node: PlannedNode) -> str:
    layout = node.layout
    kinds = ("data", layout.data), ("tensor", layout.tensor), ("context", layout.context)
    ranks = " x ".join(f"{many} {kind}" for kind, many in kinds if many > 1)
    return f"ranks: {ranks}" if ranks else ""


def _route(route: str, alias: bool) -> str:
    return "the same weights" if alias else "pulled" if route == "pull" else "sent by collectives"
