"""Peek: the first rows of one node, running only what it needs.

Owns: the plan of the small run behind `dataflow peek`, and collecting its rows. Does not own: the
loop and the coordinator. The plan has no train nodes, so every Model is at its base; all is in one
Worker, so a kernel that needs one to itself gives way to one that does not.
"""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import Fault, GraphError, RunError
from dataflow.node import Port
from engine.channels.inproc import InprocChannel
from engine.coordinator.coordinator import Coordinator, Settings
from engine.coordinator.tables import codes
from engine.plan.kernel_needs import needs_of
from engine.plan.plan import Plan, PlannedModel, PlannedNode, PlannedSource
from engine.protocol.events import EventHeard, EventStream, RunEvent
from engine.protocol.messages import ChunkDone, Produced
from engine.run.loop.checkpoint_files import NoStore
from engine.run.loop.loop import Loop
from engine.run.worker.in_process_worker import InprocWorkers
from engine.run.worker.worker import Worker

WORKER = "main"


def first_rows(plan: Plan, node: str, rows: int) -> pa.Table:
    """At most `rows` rows of a node's first output, keys first. GraphError if it has no output."""
    target = plan.node(node)
    if target.relation == "sink":
        problem, fix = "it has no output that runs before a Step", "peek at what it reads"
        raise GraphError(Fault(rule="peek", where=f"peek {node!r}", problem=problem, fix=fix))
    shown = _physical(plan, target)
    small = _needed(plan, {node, shown}, prompts=-(-rows // target.rows))
    worker = Worker(WORKER, small, channel=InprocChannel())
    rows_of = _RowsOf(worker, node, shown)
    coordinator = Coordinator(small, Settings(steps=1))
    with closing(InprocWorkers(worker)) as workers, suppress(_AllThere):
        Loop(coordinator, workers, NoStore(), EventStream(rows_of)).run()
    batches = rows_of.batches
    if not batches[node]:
        prompts = small.sources[0].batch
        raise RunError(f"peek {node}: no row came out of it for the first {prompts} prompts")
    output, holder = Batch.concat(batches[node]).sorted(), Batch.concat(batches[shown]).sorted()
    return _table(output, holder, rows)


def _physical(plan: Plan, target: PlannedNode) -> str:
    """The node that holds the columns of the target's first output: a select moves no rows."""
    assert plan.program is not None
    port: Port = plan.program.node(target.name).port()
    while not port.node.operator.traits.moves_rows:
        port = port.node.inputs[f"port{port.index}"]
    return port.node.name


def _needed(plan: Plan, wanted: set[str], *, prompts: int) -> Plan:
    """Only what these nodes need, as one Step of some prompts; all Models are at their bases."""
    names = plan.with_ancestors(wanted)
    nodes: list[PlannedNode] = []
    for node in plan.nodes:
        if node.name in names:
            is_output = node.name in wanted and node.work != "source"
            nodes.append(_in_this_process(plan, node, is_output=is_output))
    sources = [PlannedSource(name=n.name, batch=prompts) for n in nodes if n.work == "source"]
    models = [_as_its_base(model, names) for model in plan.models]
    return replace(
        plan,
        nodes=tuple(nodes),
        sources=tuple(sources),
        models=tuple(models),
        recorded=(),
        turns=(),
        spare=(),
    )


def _in_this_process(plan: Plan, node: PlannedNode, *, is_output: bool) -> PlannedNode:
    """The node alone in the one Worker, in the stream, at lag 0. is_output: its rows are what is
    wanted, so that they give nothing back to admission.
    """
    return replace(
        node,
        region="stream" if node.region == "evaluation" else node.region,
        returns=() if is_output else node.returns,
        refill=False,
        max_lag=0,
        lag=0,
        workers=(WORKER,),
        chunks=1,
        kernel=_sharing_kernel(plan, node),
        layout=replace(node.layout, replicas=1, data=1, inner=1, cache_bytes=0, longest=0),
    )


def _sharing_kernel(plan: Plan, node: PlannedNode) -> str:
    """A node's kernel, or if that needs a Worker to itself, its operator's first that does not."""
    assert plan.program is not None
    if not needs_of(plan.program, node).own_worker:
        return node.kernel
    operator = plan.program.node(node.name).operator
    alone = {name for name, needs in operator.needs.items() if needs.own_worker}
    offered = (path for name, path in operator.kernels.items() if name not in alone)
    return next(offered, node.kernel)


def _as_its_base(model: PlannedModel, names: set[str]) -> PlannedModel:
    """Without a writer: its readers have version 0 from the base."""
    readers = tuple(name for name in model.readers if name in names)
    return replace(model, readers=readers, aliases=(), writer="", follows="")


class _AllThere(Exception):
    """Ends the run: the node has made its rows."""


class _RowsOf:
    """Collects the batches of a node, and of the one that holds its columns, as they are made."""

    takes = (Produced, ChunkDone)

    def __init__(self, worker: Worker, node: str, shown: str) -> None:
        self.batches: dict[str, list[Batch]] = {node: [], shown: []}
        self._worker = worker
        self._node = node

    def take(self, event: RunEvent) -> None:
        """See `engine.protocol.events`. Raises _AllThere once the node's one chunk is done."""
        match event:
            case EventHeard(event=Produced(node=node, ref=ref)) if node in self.batches:
                self.batches[node].append(self._worker.rows.of(node, ref).on_host())
            case EventHeard(event=ChunkDone(node=self._node)):
                raise _AllThere


def _table(output: Batch, holder: Batch, rows: int) -> pa.Table:
    """Keys of the output's first rows, and their columns, which the holder has."""
    holder_codes = codes(holder.keys.position, holder.keys.sample)
    output_codes = codes(output.keys.position, output.keys.sample)
    shown = holder.take(np.searchsorted(holder_codes, output_codes[:rows]))
    keys = {"position": pa.array(shown.keys.position), "sample": pa.array(shown.keys.sample)}
    return pa.table(keys | {name: shown.array(name) for name in shown.names})
