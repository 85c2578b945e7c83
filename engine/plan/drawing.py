"""A plan in a drawing: nodes on their Workers, and what each should take.

Owns: what of a plan a drawing shows, and in which words. Does not own: drawings (dataflow.draw),
what a run measured (engine/watch/flow_drawing.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from dataflow.draw.node_places import Placed, PlacedWorker
from dataflow.program import numbered_name
from dataflow.safe_text import shown_bytes
from engine.plan.cost.memory import peak
from engine.plan.explain.layout import duration
from engine.plan.plan import Plan, PlannedModel, PlannedNode
from engine.plan.program_plan import AnyPlan

_ROUTES = {"pull": "pulled", "collective": "sent by collectives", "ipc": "read by IPC"}
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


def locate_nodes(
    nodes: Sequence[PlacedNode], hosts: Mapping[str, str], devices: Mapping[str, Sequence[int]]
) -> Placed:
    """Say which nodes are on which Workers. hosts, devices: by Worker."""
    threads: dict[str, int] = {}
    for node in nodes:
        for worker in node.workers:
            threads[worker] = max(node.layout.threads, threads.get(worker, node.layout.threads))
    workers: list[PlacedWorker] = []
    for name, count in threads.items():
        worker = PlacedWorker(
            name=name,
            host=hosts.get(name, ""),
            devices=tuple(devices.get(name, ())),
            threads=count,
        )
        workers.append(worker)
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
    return [locate_nodes(phase.nodes, phase.hosts, phase.devices) for phase in plan.phases]


def planned_notes(plan: AnyPlan) -> Notes:
    """Memory and seconds of nodes, bytes and routes of edges, as they are estimated for a Step."""
    notes: Notes = {}
    for phase in plan.phases:
        for name, line in _note_lines(phase):
            if line:
                notes[numbered_name(phase.phase_number, name)] = (line,)
    return notes


def _note_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """(what it is about, its line) of each; the line is empty where nothing is known."""
    for node in plan.nodes:
        yield node.name, _describe_node(node)
    for edge in plan.edges:
        yield f"{edge.producer}->{edge.consumer}", f"{shown_bytes(edge.bytes)}, {edge.route}"
    for model in plan.states:
        # Without a writer there are no versions, and no edge that could bring them.
        if model.writer:
            for reader in model.readers:
                yield f"{model.name}->{reader}", _describe_route(model, reader)


def _describe_node(node: PlannedNode) -> str:
    """`ranks: 2 tensor, 1.2 GiB, 21 s`, as far as it is known."""
    parts = [_describe_ranks(node)]
    most = peak([node.estimate.bytes])
    if most:
        parts.append(shown_bytes(most))
    if node.estimate.seconds is not None:
        parts.append(duration(node.estimate.seconds))
    return ", ".join(filter(None, parts))


def _describe_ranks(node: PlannedNode) -> str:
    layout = node.layout
    counts = {"data": layout.data, "tensor": layout.tensor, "context": layout.context}
    splits = " x ".join(f"{count} {kind}" for kind, count in counts.items() if count > 1)
    return f"ranks: {splits}" if splits else ""


def _describe_route(model: PlannedModel, reader: str) -> str:
    if reader in model.aliases:
        return "the same weights"
    return _ROUTES[model.route]
