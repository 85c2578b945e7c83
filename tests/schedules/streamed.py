"""Random cases whose Steps are worked on in parts: synchronous ones while they are generated, those
with a lag once they are formed.

Owns: how a case is made one of these. Does not own: cases (plans.py), what has to hold (proof.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from engine.plan.passes.streaming import (
    find_parts,
    find_parts_below_cut,
    raise_readers,
    work_in_parts,
)
from engine.plan.plan import Plan, PlannedNode
from engine.plan.planned_source import PlannedSource, Streaming
from tests.schedules.plans import ScheduleCase, drawn_case, lossy


def streamed_case(seed: int, stream: Streaming | None = None) -> ScheduleCase:
    """The first synchronous case of a seed in which something below a generation works on parts."""
    draw = random.Random(f"streamed {seed}")
    stream = stream or draw.choice(("ordered", "ordered", "arrival"))
    for attempt in count():
        case = drawn_case(
            1_000_000 + 1_000 * seed + attempt,
            up=draw.random() < 0.2,
            beside=draw.random() < 0.2,
            own=draw.random() < 0.15,
        )
        if not case.synchronous:
            continue
        plan = _streamed(case.plan, draw, stream)
        if any(node.in_parts for node in plan.nodes):
            case = replace(case, plan=plan)
            return lossy(case) if draw.random() < 0.2 else case
    raise AssertionError("the count has no end")


def formed_case(seed: int) -> ScheduleCase:
    """The first case of a seed with a lag in which a train node works on parts."""
    draw = random.Random(f"formed {seed}")
    for attempt in count():
        case = drawn_case(2_000_000 + 1_000 * seed + attempt, own=draw.random() < 0.15)
        plan = _formed(case.plan, draw)
        if any(node.in_parts and node.work == "train" for node in plan.nodes):
            return replace(case, plan=plan)
    raise AssertionError("the count has no end")


def _formed(plan: Plan, draw: random.Random) -> Plan:
    in_parts = find_parts_below_cut(plan.nodes, plan.sources, _draw_whole(plan, draw))
    cut_sources = {node.source for node in plan.nodes if node.name in in_parts}
    tokens = draw.choice((1, 10, 30, 100))
    nodes: list[PlannedNode] = []
    for node in plan.nodes:
        nodes.append(replace(node, in_parts=True) if node.name in in_parts else node)
    sources: list[PlannedSource] = []
    for source in plan.sources:
        is_cut = source.name in cut_sources
        sources.append(replace(source, part_tokens=tokens) if is_cut else source)
    return replace(plan, nodes=tuple(nodes), sources=tuple(sources))


def _draw_whole(plan: Plan, draw: random.Random) -> Callable[[PlannedNode], str]:
    """Why a node needs the whole Step; of some that do not, it is drawn."""
    whole = {node.name for node in plan.nodes if draw.random() < 0.15}

    def why_whole(node: PlannedNode) -> str:
        needs_all = node.scope == "batch" and node.work != "train"
        if needs_all or len(node.row_sets) > 1:
            return "needs the whole Step"
        return "was drawn" if node.region == "step" and node.name in whole else ""

    return why_whole


def _streamed(plan: Plan, draw: random.Random, stream: Streaming) -> Plan:
    why_whole = _draw_whole(plan, draw)
    nodes = [replace(node, chunking="cohort") for node in plan.nodes]
    in_parts, _ = find_parts(nodes, why_whole)
    streaming = {node.source for node in nodes if node.name in in_parts}
    tokens = draw.choice((1, 10, 30, 100))
    working = [work_in_parts(n) if n.name in in_parts else n for n in nodes]
    return replace(
        plan,
        nodes=tuple(raise_readers(working) if draw.random() < 0.5 else working),
        sources=tuple(
            replace(source, stream=stream, part_tokens=tokens)
            if source.name in streaming
            else source
            for source in plan.sources
        ),
    )
