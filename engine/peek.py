"""Peek: the first rows of one node, running only what it needs.

Owns: the small run behind `dataflow peek`. Does not own: any decision of it: the same coordinator
drives it, over a plan without train nodes, so every Model is as its base is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import Fault, GraphError, RunError
from dataflow.node import Port
from engine.channels.inproc import InprocChannel
from engine.coordinator.core import Coordinator, Settings
from engine.coordinator.messages import (
    Checkpoint,
    ChunkDone,
    Finish,
    Instruction,
    Produced,
    Respawn,
    Rollback,
    StepClosed,
    Warn,
)
from engine.coordinator.tables import codes
from engine.launch.inproc import InprocWorkers
from engine.plan.plan import Plan, PlannedModel, PlannedNode, PlannedSource
from engine.run.workers import Workers
from engine.worker.worker import Worker

WORKER = "main"


def first_rows(plan: Plan, node: str, rows: int) -> pa.Table:
    """At most `rows` rows of a node's first output, keys first. Raises GraphError for a node
    without output.
    """
    target = plan.node(node)
    if target.relation == "sink":
        raise _no_output(node)
    shown = _physical(plan, target)
    small = _needed(plan, {node, shown}, prompts=-(-rows // target.rows))
    worker = Worker(WORKER, small, channel=InprocChannel())
    with closing(InprocWorkers(worker)) as workers:
        made = _run(workers, worker, small, node, shown)
    if not made[node]:
        raise RunError(
            f"peek {node}: no row came out of it for the first {small.sources[0].batch} prompts"
        )
    return _table(Batch.concat(made[node]).sorted(), Batch.concat(made[shown]).sorted(), rows)


def _physical(plan: Plan, target: PlannedNode) -> str:
    """The node that holds the columns of the target's first output: a select moves no rows."""
    assert plan.program is not None
    port: Port = plan.program.node(target.name).port()
    while not port.node.operator.traits.moves_rows:
        port = port.node.inputs[f"port{port.index}"]
    return port.node.name


def _needed(plan: Plan, wanted: set[str], *, prompts: int) -> Plan:
    """Only what these nodes need, as one Step of so many prompts; all Models are as their bases
    are.
    """
    names, whole = set(wanted), set(wanted)
    for node in reversed(plan.nodes):
        if node.name in names:
            names.update(node.gates)
            names.update(f.producer for i in node.inputs for f in i.fetches)
    nodes = [
        replace(
            n,
            region="stream" if n.region == "evaluation" else n.region,
            returns=() if n.name in whole and n.work != "source" else n.returns,
            refill=False,
            max_lag=0,
            lag=0,
            workers=(WORKER,),
            chunks=1,
            layout=replace(n.layout, replicas=1, data=1),
        )
        for n in plan.nodes
        if n.name in names
    ]
    sources = [PlannedSource(name=n.name, batch=prompts) for n in nodes if n.work == "source"]
    models = [_as_its_base(m, names) for m in plan.models]
    return replace(
        plan,
        nodes=tuple(nodes),
        sources=tuple(sources),
        models=tuple(models),
        recorded=(),
        turns=(),
    )


def _as_its_base(model: PlannedModel, names: set[str]) -> PlannedModel:
    """Nobody writes it: its readers have version 0 from the base."""
    readers = tuple(name for name in model.readers if name in names)
    return replace(model, readers=readers, aliases=(), writer="", follows="")


def _no_output(name: str) -> GraphError:
    fix = "peek at what it reads"
    return GraphError(
        Fault(
            rule="peek",
            where=f"peek {name!r}",
            problem="it has no output that runs before a Step",
            fix=fix,
        )
    )


def _run(
    workers: Workers, worker: Worker, plan: Plan, node: str, shown: str
) -> dict[str, list[Batch]]:
    """Until the node's one chunk is done; the batches that it made, and those of the node that
    holds its columns.
    """
    made: dict[str, list[Batch]] = {node: [], shown: []}
    coordinator = Coordinator(plan, Settings(steps=1))
    opened = list(workers.open())
    _tell(workers, coordinator.start())
    for event in opened:
        _tell(workers, coordinator.handle(event, 0.0))
    while (event := workers.next()) is not None:
        if isinstance(event, Produced) and event.node in made:
            made[event.node].append(worker.rows.of(event.node, event.ref).on_host())
        if isinstance(event, ChunkDone) and event.node == node:
            return made
        if not (
            isinstance(event, Produced) and event.node == node
        ):  # what follows from it is not wanted
            _tell(workers, coordinator.handle(event, 0.0))
    return made


def _tell(workers: Workers, instructions: Sequence[Instruction]) -> None:
    """Hand on what is a Worker's. Raises RunError where the run has failed."""
    for instruction in instructions:
        if isinstance(instruction, Finish) and instruction.error:
            raise RunError(instruction.error)
        if not isinstance(instruction, (Finish, StepClosed, Warn, Checkpoint, Respawn, Rollback)):
            workers.tell(instruction)


def _table(found: Batch, columns: Batch, rows: int) -> pa.Table:
    """Keys, and the columns of the same rows, wherever they lie."""
    have = codes(columns.keys.position, columns.keys.sample)
    at = np.searchsorted(have, codes(found.keys.position, found.keys.sample)[:rows])
    shown = columns.take(at)
    keys = {"position": pa.array(shown.keys.position), "sample": pa.array(shown.keys.sample)}
    return pa.table(keys | {name: shown.array(name) for name in shown.names})
