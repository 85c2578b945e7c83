"""Cases with a Table: a record node beside the train nodes, and readers in the stream."""

from __future__ import annotations

import random
from dataclasses import replace

from dataflow.kernel import Layout
from dataflow.loss_terms import ROWS
from engine.plan.plan import ModelUse, PlannedModel, PlannedNode
from tests.schedules.plans import ScheduleCase

READ = ModelUse(param="table", model="table", access="read", trained=True)
WRITE = ModelUse(param="table", model="table", access="write", trained=True)


def with_table(case: ScheduleCase) -> ScheduleCase:
    """The same, with a Table; drawn apart so that a seed's case stays the same."""
    draw = random.Random(f"{case.seed}/table")
    may_read = [n.name for n in case.plan.nodes if n.region == "stream" and n.work == "host"]
    readers = frozenset(name for name in may_read if draw.random() < 0.7)
    nodes: list[PlannedNode] = []
    for node in case.plan.nodes:
        nodes.append(replace(node, tables=(READ,)) if node.name in readers else node)
    trains = [node for node in nodes if node.work == "train"]
    record = _record(draw.choice(trains), draw.choice(case.plan.workers))
    # Sinks run in their order: before the train nodes, between them or behind them.
    nodes.insert(len(nodes) - draw.randint(0, len(trains)), record)
    soon = [node.name for node in nodes if node.name in readers and not node.lag]
    table = PlannedModel(
        name="table",
        base="",
        writer="record",
        readers=tuple(node.name for node in nodes if node.name in readers),
        aliases=tuple(name for name in soon if draw.random() < 0.7),
    )
    return replace(case, plan=replace(case.plan, nodes=tuple(nodes), tables=(table,)))


def _record(train: PlannedNode, worker: str) -> PlannedNode:
    """A node that records a train node's own rows."""
    return replace(
        train,
        name="record",
        operator="record",
        work="record",
        scope="batch",
        inputs=train.row_sets[ROWS],
        models=(),
        tables=(WRITE,),
        workers=(worker,),
        layout=Layout(),
    )
