"""Peek: the first rows of one node, running only what it needs.

Owns: the small run behind `dataflow peek`. Does not own: admission, Steps or training; no
train node runs, so every Model is as its base is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pyarrow as pa

from dataflow.errors import Fault, GraphError, RunError
from engine.coordinator.lane import FINISHED, Lane, Ready
from engine.coordinator.messages import ChunkDone, Produced, Publish, RunChunk
from engine.coordinator.tables import Blocks
from engine.plan.plan import Plan
from engine.runtime.assemble import collect
from engine.runtime.worker import Worker


def first_rows(plan: Plan, node: str, rows: int) -> pa.Table:
    """At most `rows` rows of a node's first output, keys first. Raises GraphError for a node without output."""
    small = _needed(plan, node)
    target = small.node(node)
    worker = Worker("main", small)
    try:
        limit = {event.node: event.rows for event in worker.open()}  # type: ignore[union-attr]
        for message in _loads(small):
            for _ in worker.execute(message):
                pass
        blocks = Blocks()
        lane = Lane(target.source, small.nodes, [node], blocks)
        prompts = min(-(-rows // target.rows), limit[target.source])
        _run(worker, lane, lane.admit(range(prompts), [0] * prompts, 0))
        return _table(worker, lane, blocks, node, rows)
    finally:
        worker.close()


def _needed(plan: Plan, name: str) -> Plan:
    wanted = {name}
    for node in reversed(plan.nodes):
        if node.name in wanted:
            if node.relation == "sink":
                raise _no_output(name)
            wanted.update(node.gates)
            wanted.update(f.producer for i in node.inputs for f in i.fetches)
    nodes = [
        replace(n, returns=() if n.name == name and n.work != "source" else n.returns)
        for n in plan.nodes
        if n.name in wanted
    ]
    if not nodes:
        raise _no_output(name)
    return replace(plan, nodes=tuple(nodes), recorded=())


def _no_output(name: str) -> GraphError:
    fix = "peek at what it reads"
    return GraphError(
        Fault(rule="peek", where=f"peek {name!r}", problem="it has no output that runs before a Step", fix=fix)
    )


def _loads(plan: Plan) -> list[Publish]:
    """Every reader of a trained Model is told version 0, which it has from its base."""
    return [
        Publish(model=u.model, writer="", reader=n.name, version=0, alias=True)
        for n in plan.nodes
        for u in n.models
        if u.trained
    ]


def _run(worker: Worker, lane: Lane, first: Ready) -> None:
    queue = deque([first])
    while queue:
        ready = queue.popleft()
        chunk = RunChunk(id=0, node=ready.node.name, worker=worker.name, step=1, keys=ready.keys, inputs=ready.inputs)
        for event in worker.execute(chunk):
            if isinstance(event, Produced):
                lane.produced(event.node, event.ref)
            elif isinstance(event, ChunkDone):
                lane.closed(ready.node, ready.keys)
            queue.extend(lane.pump())


def _table(worker: Worker, lane: Lane, blocks: Blocks, node: str, rows: int) -> pa.Table:
    slots = lane.slots(FINISHED)
    found = lane.rows(node, slots)
    if not len(found.keys):
        raise RunError(f"peek {node}: no row came out of it for the first {len(slots)} prompts")
    records = collect(blocks.gather(node, (), found.block, found.row), worker.channel)
    keys = {"position": pa.array(found.keys.position), "sample": pa.array(found.keys.sample)}
    columns = {name: records.column(name) for name in records.schema.names}
    return pa.table(keys | columns).slice(0, rows)
