"""What one replica of a node, or one share of a train node, costs on the device that it has.

Owns: the price of so many prompts there, and of the busiest of all. Does not own: the formulas
(engine/plan/cost/node_price.py), how many prompts each has (passes/loads.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.plan.cost.model_passes import Time
from engine.plan.cost.node_price import NodeWork, node_time
from engine.plan.costs import PlanCosts
from engine.plan.plan import PlannedNode
from engine.plan.rates import correct_by_work


def list_parts(node: PlannedNode) -> Sequence[str]:
    """The first Worker of each replica; of a train node, of each share."""
    if node.work == "train":
        return [share[0] for share in node.shares]
    return node.leads


def time_part(
    costs: PlanCosts, node: PlannedNode, work: NodeWork, worker: str, prompts: int
) -> Time:
    """Time so many prompts of a node's work in a Step, on the device of a Worker."""
    at = costs.on(worker)
    rows = work.most.rows * prompts // max(1, work.most.prompts)
    most = replace(work.most, prompts=prompts, rows=rows)
    chunks = -(-node.chunks // node.layout.replicas)
    part = replace(work, most=most, chunks=chunks)
    layout = replace(node.layout, replicas=1, data=1)
    time = node_time(at.require_sizes(node.name), at.place(node.name), layout, part)
    return time.times(correct_by_work(at.entry(node.name), part, layout))


def time_unlike(costs: PlanCosts, node: PlannedNode, work: NodeWork) -> Time:
    """Time a node's work in a Step, whose Workers are on unlike devices: that of the busiest, with
    as many prompts as the plan says. Who takes rows as its slots fall free evens out: all are as
    long at it, by the sum of their rates.
    """
    parts = list_parts(node)
    if work.steps:
        times = [_time_sharing(costs, node, work, worker) for worker in parts]
        rate = sum(1.0 / time.seconds for time in times)
        slowest = max(times, key=lambda time: time.seconds)
        return slowest.times(len(parts) / (rate * slowest.seconds))
    loads = node.loads or (1,) * len(parts)
    times = []
    for worker, load in zip(parts, loads, strict=True):
        prompts = -(-work.most.prompts * load // sum(loads))
        if prompts:
            times.append(time_part(costs, node, work, worker, prompts))
    return max(times, key=lambda time: time.seconds)


def _time_sharing(costs: PlanCosts, node: PlannedNode, work: NodeWork, worker: str) -> Time:
    """Time one replica's part as if all were like it."""
    at = costs.on(worker)
    time = node_time(at.require_sizes(node.name), at.place(node.name), node.layout, work)
    return time.times(correct_by_work(at.entry(node.name), work, node.layout))
