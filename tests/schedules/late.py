"""Cases in which samples are spread, rows have weights and replicas have few slots.

Drawn apart from all else, so that a seed's case is otherwise the same.
"""

from __future__ import annotations

import random
from dataclasses import replace

from engine.plan.plan import Plan, PlannedNode
from tests.schedules.plans import ScheduleCase


def late_case(case: ScheduleCase) -> ScheduleCase:
    """The case, with generations that are spread, weighed and, with a lag, mostly bound late."""
    draw = random.Random(f"{case.seed}/late")
    weighed: set[str] = set()
    nodes = [_drawn(draw, case.plan, node, weighed) for node in case.plan.nodes]
    waits = random.Random(f"{case.seed}/waits")
    drawn_nodes: list[PlannedNode] = []
    for node in nodes:
        weight = "x" if node.name in weighed else node.weight
        is_waiting = node.binds_late and waits.random() < 0.3
        drawn_nodes.append(replace(node, weight=weight, waits=is_waiting))
    return replace(case, plan=replace(case.plan, nodes=tuple(drawn_nodes)))


def _drawn(draw: random.Random, plan: Plan, node: PlannedNode, weighed: set[str]) -> PlannedNode:
    """The node as it is in the case; weighed: nodes whose rows have weights, to be added to."""
    if not node.traits.generates:
        return node
    layout = replace(node.layout, spread=draw.choice((1, 2, 3)), slots=draw.choice((1, 2, 5, 20)))
    node = replace(node, layout=layout, tail=draw.choice((0.0, 0.0, 0.3)))
    if node.lag and draw.random() < 0.8 and node.ranks == 1:
        # No plan binds late what ranks decode together (engine/plan/passes/batching.py).
        node = replace(node, chunking="ready")
    if node.chunks == 1 and draw.random() < 0.5:
        node = replace(node, chunks=draw.choice((2, 3)))
    gates = [i for i in node.inputs if not i.fan_in and not i.width]
    if not gates or draw.random() < 0.5:
        return node
    weight = replace(draw.choice(gates), name="weight", fetches=())
    producer = plan.node(weight.gate)
    while producer.relation == "subset":
        producer = plan.node(producer.inputs[0].gate)
    weighed.add(producer.name)
    return replace(node, inputs=(*node.inputs, weight))


def on_one_replica(case: ScheduleCase) -> ScheduleCase:
    """The same with one replica of each generation, as many chunks and everything else alike."""
    nodes = tuple(
        replace(n, workers=n.workers[:1]) if n.traits.generates else n for n in case.plan.nodes
    )
    there = {worker for node in nodes for worker in node.workers}
    recorder = case.plan.recorder if case.plan.recorder in there else nodes[0].workers[0]
    turns = (tuple(w for w in group if w in there) for group in case.plan.turns)
    plan = replace(
        case.plan,
        nodes=nodes,
        recorder=recorder,
        turns=tuple(group for group in turns if len(group) > 1),
        spare=tuple(w for w in case.plan.spare if w in there),
    )
    return replace(case, plan=plan)
