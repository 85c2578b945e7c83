"""Cases in which several Workers are one replica of a node of forward passes, or of a generation:
any drawn case.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain

from dataflow.kernel import Layout
from engine.plan.plan import Plan, PlannedNode
from tests.schedules.draft import TARGET
from tests.schedules.plans import ScheduleCase

Shares = tuple[tuple[str, ...], ...]
PAIRS: Shares = (("p0", "p1"), ("p2", "p3"), ("p4", "p5"))
TRIPLE: Shares = (("q0", "q1", "q2"),)


def with_replica_ranks(case: ScheduleCase) -> ScheduleCase:
    """The same, in which most forward passes and generations have replicas of two or three ranks,
    on Workers of their own or, but for a generation with a lag, on those of a train node.
    """
    draw = random.Random(f"replica ranks {case.seed}")
    plan = case.plan
    trained = [n.shares for n in plan.nodes if n.work == "train" and n.layout.tensor > 1]
    pool = draw.choice([PAIRS, PAIRS[:1], TRIPLE])
    nodes: list[PlannedNode] = []
    for node in plan.nodes:
        if _may_have_ranks(node) and draw.random() < 0.8:
            shares = pool if _has_versions(node) else draw.choice([pool, pool, *trained])
            some = draw.sample(shares, draw.randint(1, min(2, len(shares))))
            node = _on_shares(node, tuple(some))
            if node.binds_late and set(node.workers) & set(chain.from_iterable(chain(*trained))):
                # Where its Workers train, too, nothing joins what is decoded.
                node = replace(node, chunking="cohort")
        nodes.append(node)
    new_plan = replace(plan, nodes=tuple(nodes))
    workers = sorted({worker for node in nodes for worker in node.workers})
    hosts = plan.hosts and {worker: plan.hosts.get(worker, "a") for worker in workers}
    recorder = plan.recorder if plan.recorder in workers else workers[0]
    new_plan = replace(new_plan, hosts=hosts, recorder=recorder)
    lagging: set[str] = set()
    for node in nodes:
        if node.ranks > 1 and node.work != "train" and _has_versions(node):
            lagging.update(node.workers)
    turns = _turns(draw, new_plan, [worker for worker in workers if worker not in lagging])
    return replace(case, plan=replace(new_plan, turns=turns))


def _may_have_ranks(node: PlannedNode) -> bool:
    is_forward = node.work == "forward" and node.relation == "same" and not node.max_lag
    may_split = is_forward or node.traits.generates
    return may_split and TARGET not in node.models


def _has_versions(node: PlannedNode) -> bool:
    """Whether new weights come while it decodes."""
    return node.lag > 0 and any(use.trained for use in node.models)


def _on_shares(node: PlannedNode, shares: Shares) -> PlannedNode:
    workers = tuple(worker for share in shares for worker in share)
    layout = Layout(replicas=len(shares), tensor=len(shares[0]))
    return replace(node, workers=workers, layout=layout)


def _turns(draw: random.Random, plan: Plan, workers: list[str]) -> Shares:
    """Some Workers on the same devices; as the plan's check wants it."""
    ranked = [node for node in plan.nodes if node.ranks > 1]
    groups: list[list[str]] = []
    if draw.random() < 0.4:
        # Replicas that have each other's devices: the order of their turns is all that counts.
        groups = [
            [worker for worker in each if worker in workers] for each in zip(*PAIRS, strict=True)
        ]
    taken = {worker for group in groups for worker in group}
    left = [worker for worker in workers if worker not in taken and draw.random() < 0.7]
    draw.shuffle(left)
    for worker in left if draw.random() < 0.6 else []:
        for group in groups:
            if len(group) < 3 and not _are_ranks_of_one(ranked, [*group, worker]):
                group.append(worker)
                break
        else:
            groups.append([worker])
    turns = tuple(tuple(group) for group in groups if len(group) > 1)
    return () if _may_overlap(plan, turns) else turns


def _are_ranks_of_one(ranked: list[PlannedNode], group: list[str]) -> bool:
    for node in ranked:
        for ranks in node.rank_groups:
            if len({rank.worker for rank in ranks}.intersection(group)) > 1:
                return True
    return False


def _may_overlap(plan: Plan, turns: Shares) -> bool:
    """Whether ranks train while chunks are under way where some take turns: that is refused."""
    streamed = {source.name for source in plan.sources if source.stream != "off"}
    trains = [node for node in plan.nodes if node.work == "train" and node.ranks > 1]
    in_turns = {worker for group in turns for worker in group}
    for node in plan.nodes:
        if node.work == "train" or node.ranks == 1 or not (node.lag or node.source in streamed):
            continue
        for train in trains:
            both = {*node.workers, *train.workers}
            if not set(node.workers).isdisjoint(train.workers) and both & in_turns:
                return True
    return False
