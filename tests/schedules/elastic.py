"""Cases in which replicas join and leave: any drawn case, some nodes of which come and go."""

from __future__ import annotations

import random
from dataclasses import replace

from engine.plan.plan import PlannedNode
from engine.run.simulated_workers.faults import FaultModel
from tests.schedules.draft import POLICY
from tests.schedules.plans import ScheduleCase, drawn_case


def elastic_case(seed: int) -> ScheduleCase:
    """The case of a seed, in which one group of nodes, or two, has Workers of its own that are not
    all there at the beginning.
    """
    draw = random.Random(f"elastic {seed}")
    case = drawn_case(seed, up=seed % 5 == 0, beside=seed % 7 == 0, own=seed % 11 == 0)
    able = [n.name for n in case.plan.nodes if _may_have_replicas(n)]
    generates = [n for n in able if case.plan.node(n).traits.generates]
    draw.shuffle(able)
    able.sort(key=lambda name: name not in generates)
    moved: dict[str, tuple[str, ...]] = {}
    spare: list[str] = []
    for number in range(draw.choice((1, 1, 2))):
        most = draw.randint(2, 4)
        workers = tuple(f"e{number}-{i}" for i in range(most))
        spare += workers[draw.randint(1, most - 1) :]
        together, able = able[: draw.choice((1, 1, 2))], able[2:]
        moved |= dict.fromkeys(together, workers)
        if not able:
            break
    nodes = tuple(_moved(n, moved) for n in case.plan.nodes)
    there = {worker for node in nodes for worker in node.workers}
    plan = replace(
        case.plan,
        nodes=nodes,
        spare=tuple(w for w in spare if w in there),
        recorder=_recorder(draw, nodes, spare),
        turns=_of_those_left(case.plan.turns, there),
    )
    settings = replace(
        case.settings,
        scaling=draw.choice(("fixed", "balance", "most")),
        grace=draw.choice((0.0, 1.0, 5.0, 60.0)),
    )
    return replace(case, plan=plan, settings=settings)


def _may_have_replicas(node: PlannedNode) -> bool:
    columns = node.work not in ("train", "source", "evaluate") and node.scope != "batch"
    return columns and all(use == POLICY for use in node.models)


def _moved(node: PlannedNode, moved: dict[str, tuple[str, ...]]) -> PlannedNode:
    workers = moved.get(node.name)
    if workers is None:
        return node
    return replace(node, workers=workers, chunks=len(workers), layout=replace(node.layout, data=1))


def _recorder(draw: random.Random, nodes: tuple[PlannedNode, ...], spare: list[str]) -> str:
    """Any Worker that is there from the beginning: one of a node that comes and goes stays then."""
    return draw.choice([w for n in nodes for w in n.workers if w not in spare])


def _of_those_left(
    turns: tuple[tuple[str, ...], ...], there: set[str]
) -> tuple[tuple[str, ...], ...]:
    left = (tuple(w for w in group if w in there) for group in turns)
    return tuple(group for group in left if len(group) > 1)


def with_moves(draw: random.Random, faults: FaultModel, *, last: bool) -> FaultModel:
    """The same weather, in which replicas are asked for, and have to leave but for the last time:
    a Worker with rows that are being trained on may have to.
    """
    scales, leaves = draw.choice((0.0, 0.03, 0.2)), draw.choice((0.0, 0.02, 0.1))
    return replace(faults, scales=scales, leaves=0.0 if last else leaves)


def fixed(case: ScheduleCase) -> ScheduleCase:
    """The same, with all replicas there from the beginning to the end."""
    return replace(case, plan=replace(case.plan, spare=()))
