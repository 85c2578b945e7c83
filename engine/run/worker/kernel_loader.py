"""From planned nodes to open kernels.

Owns: finding a kernel's class, its description of the node, a Worker's open kernels and sessions.
Does not own: the kernels (operators/kernels), calls of them (worker.py, training.py,
weight_delivery.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.kernel import KernelNode
from dataflow.kernel_abilities import Sleeper
from dataflow.model import Model, Table
from dataflow.side_config import has_trained_part
from engine.channels.contract import Channel
from engine.plan.plan import Plan, PlannedNode
from engine.protocol.messages import SourceOpened
from engine.protocol.reports import Report
from engine.run.worker.alignment import Alignment
from engine.run.worker.kernel_session import NodeSession, SessionRanks
from engine.run.worker.outside_waits import OutsideWaits
from engine.run.worker.timing import During, Timing


def kernel_node(
    planned: PlannedNode,
    program: Graph,
    *,
    inproc: bool = False,
    starts: Mapping[str, str] | None = None,
) -> KernelNode:
    """What a kernel is told about its node. starts: directories with which Models begin."""
    node = program.node(planned.name)
    columns_read: dict[str, tuple[str, ...]] = {}
    for each in planned.inputs:
        columns = chain.from_iterable(fetch.columns for fetch in each.fetches)
        columns_read[each.name] = tuple(columns)
    states = (s for s in program.states if isinstance(s, Model))
    models = {s.name: _begin_model(s, starts or {}) for s in states}
    tables = {s.name: s for s in program.states if isinstance(s, Table)}
    return KernelNode(
        name=planned.name,
        operator=planned.operator,
        scope=planned.scope,
        models={use.param: models[use.model] for use in planned.models},
        tables={use.param: tables[use.model] for use in planned.tables},
        params=node.params,
        reads=columns_read,
        returns=planned.returns,
        function=node.operator.function,
        schemas={key: port.schema for key, port in node.inputs.items()},
        keeps=node.operator.keeps,
        inproc=inproc,
    )


def _begin_model(model: Model, starts: Mapping[str, str]) -> Model:
    """The Model as it begins: with a directory in the place of its base, or of its adapter's
    beginning.
    """
    folder = starts.get(model.name)
    if folder is None:
        return model
    if model.adapter is not None and has_trained_part(model.adapter, Path(folder)):
        return replace(model, adapter=replace(model.adapter, start=folder))
    return replace(model, base=folder)


def kernel_class(node: PlannedNode) -> type:
    """The class that the plan names. Raises PlanError where it cannot be imported."""
    module, _, name = node.kernel.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        problem = f"{node.name}: kernel {node.kernel} cannot be imported: {error}."
        raise PlanError(f"{problem} Fix: install what it needs.") from error


class OpenKernels:
    """A Worker's kernels by node. A node's work kind says which protocol of dataflow.kernel."""

    def __init__(
        self,
        plan: Plan,
        timing: Timing,
        channel: Channel,
        waits: OutsideWaits,
        *,
        group: Any,
        replica_group: Any = None,
        inproc: bool,
    ) -> None:
        """group: the Worker's process group, if it is a rank. replica_group: of the ranks with its
        rows, for nodes that do not train.
        """
        self.nodes = {n.name: n for n in plan.nodes if timing.worker in n.workers}
        self._ranks = {name: n.rank_of(timing.worker).index for name, n in self.nodes.items()}
        assert plan.program is not None
        self.aligned = {name: Alignment(plan.program.node(name)) for name in self.nodes}
        self.by_node: dict[str, Any] = {}
        self.sessions: dict[str, NodeSession] = {}
        self._plan = plan
        self._timing = timing
        self._waits = waits
        self._channel = channel
        self._group, self._replica_group = group, replica_group
        self._inproc = inproc
        self._modules: dict[str, Any] = {}

    def __getitem__(self, node: str) -> Any:
        return self.by_node[node]

    def load(self) -> None:
        """Import every kernel, so that what opening takes is theirs and not their libraries'."""
        for node in self.nodes.values():
            with self._timing.during(node.name, "imports", counted=False, computes=False):
                kernel_class(node)

    def open(self) -> Iterator[SourceOpened]:
        """Open every kernel, in running order; a source says how many rows it has."""
        program, phase = self._plan.program, self._plan.phase
        assert program is not None
        starts = phase.starts if phase else None
        for node in self.nodes.values():
            session = self.sessions[node.name] = self._session(node)
            kernel = self.by_node[node.name] = kernel_class(node)()
            with self.during(node.name, "open"):
                description = kernel_node(node, program, inproc=self._inproc, starts=starts)
                kernel.open(description, node.layout, session)
            if node.work == "source":
                yield SourceOpened(node=node.name, rows=kernel.rows)

    def _session(self, node: PlannedNode) -> NodeSession:
        group = None
        if node.ranks > 1:
            group = self._group if node.work == "train" else self._replica_group
        ranks = SessionRanks(rank=self.rank(node.name), world=node.ranks, group=group)
        names = {use.model: use.module for use in node.states}
        memory = self._channel.allocate
        waits = self._waits.of_node(node.name, counted=ranks.rank == 0)
        return NodeSession(node.name, self._plan.seed, self._modules, names, ranks, memory, waits)

    def rank(self, node: str) -> int:
        """Which of the node's ranks this Worker is."""
        return self._ranks[node]

    def during(
        self, node: str, name: str, what: str = "", *, task: int = -1, computes: bool = True
    ) -> During:
        """A context in which the node computes; only its first rank counts the time, and how much
        of it was waiting for a core. Of a function it counts how much was computing, too:
        predictions ask whether it waits for something else.
        """
        planned = self.nodes.get(node)
        counted = planned is None or self.rank(node) == 0
        is_function = planned is not None and _is_function(planned)
        elsewhere = self.sessions[node].elsewhere if is_function else None
        return self._timing.during(
            node,
            name,
            what,
            task=task,
            counted=counted,
            computes=computes,
            queues=planned is not None,
            elsewhere=elsewhere,
        )

    def sleep(self) -> None:
        """Let every kernel that can give its devices back do so."""
        for name, kernel in self.by_node.items():
            if isinstance(kernel, Sleeper):
                with self.during(name, "sleep"):
                    kernel.sleep()

    def wake(self) -> None:
        """Let those kernels take their devices again."""
        for name, kernel in self.by_node.items():
            if isinstance(kernel, Sleeper):
                with self.during(name, "wake"):
                    kernel.wake()

    def reports(self) -> list[Report]:
        """Metrics of nodes that run no chunks, since the last call; only the first rank's count."""
        reports: list[Report] = []
        for name, session in self.sessions.items():
            if not self.nodes[name].traits.chunked:
                node_reports = session.reports()  # of each rank, so that none piles up
                if self.rank(name) == 0:
                    reports += node_reports
        return reports

    def close(self) -> None:
        """Close every kernel that was opened, the last first, whatever one of them raises."""
        try:
            if self.by_node:
                self.by_node.popitem()[1].close()
        finally:
            if self.by_node:
                self.close()


def _is_function(node: PlannedNode) -> bool:
    """Whether it runs chunks and computes with no Model."""
    return node.traits.chunked and not node.traits.computes
