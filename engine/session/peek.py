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
from engine.plan.plan import Plan, PlannedModel, PlannedNode
from engine.plan.planned_source import PlannedSource
from engine.protocol.events import EventHeard, EventStream, RunEvent
from engine.protocol.messages import ChunkDone, Produced
from engine.run.loop.checkpoint_files import NoStore
from engine.run.loop.loop import Loop
from engine.run.worker.in_process_worker import InprocWorkers
from engine.run.worker.worker import Worker

WORKER = "main"


def first_rows(plan: Plan, node: str, rows: int) -> pa.Table:
    """Run what a node needs, and return at most `rows` rows of its first output, keys first. Raises
    GraphError if it has no output.
    """
    target = plan.node(node)
    if target.relation == "sink":
        problem = "it has no output that runs before a Step"
        fix = "peek at what it reads"
        raise GraphError(Fault(rule="peek", where=f"peek {node!r}", problem=problem, fix=fix))
    holder = _find_holder(plan, target)
    prompts = -(-rows // target.rows)
    small = _reduce_plan(plan, {node, holder}, prompts=prompts)
    worker = Worker(WORKER, small, channel=InprocChannel())
    collected = _CollectedRows(worker, node, holder)
    coordinator = Coordinator(small, Settings(steps=1))
    with closing(InprocWorkers(worker)) as workers, suppress(_AllThere):
        Loop(coordinator, workers, NoStore(), EventStream(collected)).run()
    batches = collected.batches
    if not batches[node]:
        raise RunError(f"peek {node}: no row came out of it for the first {prompts} prompts")
    output = Batch.concat(batches[node]).sort()
    held_rows = Batch.concat(batches[holder]).sort()
    return _make_table(output, held_rows, rows)


def _find_holder(plan: Plan, target: PlannedNode) -> str:
    """Find the node that holds the columns of the target's first output: a select moves no rows."""
    assert plan.program is not None
    port: Port = plan.program.node(target.name).port()
    while not port.node.operator.traits.moves_rows:
        port = port.node.inputs[f"port{port.index}"]
    return port.node.name


def _reduce_plan(plan: Plan, outputs: set[str], *, prompts: int) -> Plan:
    """Reduce a plan to what these nodes need, as one Step of some prompts; all Models are at their
    bases.
    """
    names = plan.with_ancestors(outputs)
    nodes: list[PlannedNode] = []
    sources: list[PlannedSource] = []
    for node in plan.nodes:
        if node.name in names:
            is_output = node.name in outputs and node.work != "source"
            nodes.append(_in_this_process(plan, node, is_output=is_output))
            if node.work == "source":
                sources.append(PlannedSource(name=node.name, batch=prompts))
    models = [_as_its_base(model, names) for model in plan.models]
    return replace(
        plan,
        nodes=tuple(nodes),
        sources=tuple(sources),
        models=tuple(models),
        tables=(),  # each is empty, as at the beginning of a run
        recorded=(),
        turns=(),
        spare=(),
    )


def _in_this_process(plan: Plan, node: PlannedNode, *, is_output: bool) -> PlannedNode:
    """Plan the node alone in the one Worker, in the stream, at lag 0. is_output: its rows are what
    is looked at, so that they give nothing back to admission.
    """
    region = node.region
    if region == "evaluation":
        region = "stream"
    returns = node.returns
    if is_output:
        returns = ()
    return replace(
        node,
        region=region,
        returns=returns,
        refill=False,
        max_lag=0,
        lag=0,
        workers=(WORKER,),
        chunks=1,
        kernel=_sharing_kernel(plan, node),
        layout=replace(
            node.layout, replicas=1, data=1, tensor=1, inner=1, cache_bytes=0, longest=0
        ),
    )


def _sharing_kernel(plan: Plan, node: PlannedNode) -> str:
    """Choose a node's kernel, or if that needs a Worker to itself, its operator's first that does
    not.
    """
    assert plan.program is not None
    if not needs_of(plan.program, node).own_worker:
        return node.kernel
    operator = plan.program.node(node.name).operator
    for name, path in operator.kernels.items():
        needs = operator.needs.get(name)
        if needs is None or not needs.own_worker:
            return path
    return node.kernel


def _as_its_base(model: PlannedModel, names: set[str]) -> PlannedModel:
    """Leave out a Model's writer: its readers have version 0 from the base."""
    readers = tuple(name for name in model.readers if name in names)
    return replace(model, readers=readers, aliases=(), writer="", follows="")


class _AllThere(Exception):
    """Ends the run: the node has made its rows."""


class _CollectedRows:
    """Collects the batches of a node, and of the one that holds its columns, as they are made."""

    takes = (Produced, ChunkDone)

    def __init__(self, worker: Worker, node: str, holder: str) -> None:
        self.batches: dict[str, list[Batch]] = {node: [], holder: []}
        self._worker = worker
        self._node = node

    def take(self, event: RunEvent) -> None:
        """See `engine.protocol.events`. Raises _AllThere once the node's one chunk is done."""
        match event:
            case EventHeard(event=Produced(node=node, ref=ref)) if node in self.batches:
                self.batches[node].append(self._worker.rows.of(node, ref).on_host())
            case EventHeard(event=ChunkDone(node=self._node)):
                raise _AllThere


def _make_table(output: Batch, held_rows: Batch, rows: int) -> pa.Table:
    """Make a table of the keys of the output's first rows, and their columns, which the holder
    has.
    """
    held_codes = codes(held_rows.keys.position, held_rows.keys.sample)
    output_codes = codes(output.keys.position, output.keys.sample)
    first = held_rows.take(np.searchsorted(held_codes, output_codes[:rows]))
    columns = {"position": pa.array(first.keys.position), "sample": pa.array(first.keys.sample)}
    for name in first.names:
        columns[name] = first.array(name)
    return pa.table(columns)
