"""A plan in the making: what one pass hands to the next.

Owns: the data type. Does not own: any decision (passes/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from dataflow.graph import Graph
from engine.plan.cluster import Cluster
from engine.plan.placing import Placing
from engine.plan.plan import PlannedEdge, PlannedInput, PlannedModel, PlannedNode, PlannedSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The graph as rewritten so far, and the decisions about it.

    dataset: the data's columns by source node. threads: of each kernel, None for all that its
    Worker has. placing: the wishes for Workers. hosts, devices: as in Plan.
    """

    graph: Graph
    seed: int
    cluster: Cluster
    threads: int | None = None
    placing: Placing = field(default_factory=Placing)
    dataset: Mapping[str, Mapping[str, pa.DataType]] = field(default_factory=dict)
    nodes: tuple[PlannedNode, ...] = ()
    sources: tuple[PlannedSource, ...] = ()
    models: tuple[PlannedModel, ...] = ()
    edges: tuple[PlannedEdge, ...] = ()
    recorded: tuple[PlannedInput, ...] = ()
    recorder: str = ""
    turns: tuple[tuple[str, ...], ...] = ()
    hosts: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def workers(self) -> tuple[str, ...]:
        """Every Worker that some node has."""
        return tuple(dict.fromkeys(w for n in self.nodes for w in n.workers))

    def node(self, name: str) -> PlannedNode:
        """The planned node of that name; KeyError where there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def host_of(self, worker: str) -> str:
        """The host of a Worker; empty if all are on this one."""
        return self.hosts.get(worker, "")

    def turns_of(self, worker: str) -> tuple[str, ...]:
        """Its group of Workers that take turns, itself included; empty if it is in none."""
        return next((group for group in self.turns if worker in group), ())
