"""Random cases whose synchronous Steps are worked on in parts while they are generated.

Owns: how a case is made one of these. Does not own: cases (plans.py), what has to hold (proof.py).
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

from engine.plan.passes.streaming import find_parts, work_in_parts
from engine.plan.plan import Plan, PlannedNode
from engine.plan.planned_source import Streaming
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


def _streamed(plan: Plan, draw: random.Random, stream: Streaming) -> Plan:
    whole = {node.name for node in plan.nodes if draw.random() < 0.15}

    def why_whole(node: PlannedNode) -> str:
        needs_all = node.scope == "batch" and node.work != "train"
        if needs_all or len(node.row_sets) > 1:
            return "needs the whole Step"
        return "was drawn" if node.region == "step" and node.name in whole else ""

    nodes = [replace(node, chunking="cohort") for node in plan.nodes]
    in_parts, _ = find_parts(nodes, why_whole)
    streaming = {node.source for node in nodes if node.name in in_parts}
    tokens = draw.choice((1, 10, 30, 100))
    return replace(
        plan,
        nodes=tuple(work_in_parts(n) if n.name in in_parts else n for n in nodes),
        sources=tuple(
            replace(source, stream=stream, part_tokens=tokens)
            if source.name in streaming
            else source
            for source in plan.sources
        ),
    )
