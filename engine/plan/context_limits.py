"""At how long rows each node of a plan stops fitting into memory, and what happens then.

Owns: the search for that length, what limits it. Does not own: bytes (passes/estimate.py), which
Workers share which memory (checks/memory.py), the words (explain/contexts.py).

A node's rows grow while those of all others stay as they are planned. Its bytes grow as the
formulas say, from what was estimated, so that a measured correction counts, too. They never become
fewer, and bisection finds the last length that fits. Of a source with a lag the rows of one Step
wait then: as rows grow the intake slows first, from so many live tokens on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from dataflow.positions import row_positions
from engine.plan.alike_workers import list_unlike_hosts
from engine.plan.checks.memory import find_memory_rooms
from engine.plan.cost.models import cost_of_model
from engine.plan.costs import PlanCosts
from engine.plan.draft import Draft
from engine.plan.estimates import Estimate
from engine.plan.passes.estimate import estimate_at, longest_rows
from engine.plan.passes.intake_fit import (
    FINEST,
    count_held,
    describe_room,
    find_share,
    hold,
    list_late_sources,
)
from engine.plan.plan import Plan, PlannedNode
from engine.plan.waiting_rows import measure_waiting_rows
from engine.plan.worker_index import workers_by_host

_MOST = 2**24
"""Tokens of a row, where no Model's positions are fewer."""
_MOST_SHARES = 2**16
"""1024ths of what a lag allows, up to which is looked for what memory holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimit:
    """How long the rows of a node may be. planned: the longest that the graph allows. fits: the
    longest with which its Workers fit into their memory. by: what ends it. `memory`: a plan with
    longer rows is refused. `cache`: as rows grow fewer are decoded at once, and a row longer than
    this, which fills the cache alone, is refused. `positions`: the Model has no more.
    """

    node: str
    planned: int
    fits: int
    by: Literal["memory", "cache", "positions"]
    at_once: int = 0
    """Rows of the planned length that the cache holds at once; 0 where `by` is not `cache`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeLimit:
    """From how many live tokens on the intake of a source with a lag slows. planned: the most that
    the graph and the lag allow.
    """

    source: str
    planned: int
    slows: int


def list_intake_limits(plan: Plan) -> Iterator[IntakeLimit]:
    """Find the limit of each source with a lag below which rows are generated, where memory, or a
    user, sets one.
    """
    draft = _draft_of(plan)
    if draft is None:
        return
    late_sources = list_late_sources(draft.sources)
    share = find_share(draft, 0, most=_MOST_SHARES) if late_sources else 0.0
    for source in late_sources:
        rows = measure_waiting_rows(draft, source.name)
        room = describe_room(count_held(source, share), rows)
        slows = room.live_tokens(source.allowed)
        if source.live_tokens:
            slows = min(slows, source.live_tokens)
        elif share >= _MOST_SHARES / FINEST:
            continue
        if rows.longest:
            planned = source.allowed * rows.longest
            yield IntakeLimit(source=source.name, planned=planned, slows=slows)


def _draft_of(plan: Plan) -> Draft | None:
    """The draft that a plan was made of, as far as memory goes; None for one without a graph."""
    if plan.program is None or plan.cluster is None:
        return None
    return Draft(
        graph=plan.program,
        seed=plan.seed,
        cluster=plan.cluster,
        nodes=plan.nodes,
        sources=plan.sources,
        models=plan.models,
        tables=plan.tables,
        turns=plan.turns,
        spare=plan.spare,
        hosts=plan.hosts,
        devices=plan.devices,
        processes=plan.processes,
        phase=plan.phase,
    )


def list_context_limits(plan: Plan) -> Iterator[ContextLimit]:
    """Find the limit of each node that computes with a Model of known size, outside of
    evaluations.
    """
    draft = _draft_of(plan)
    if draft is None:
        return
    if list_late_sources(draft.sources):
        draft = hold(draft, 0.0)
    models = {model.name: cost_of_model(model) for model in draft.graph_models}
    costs = PlanCosts(draft, draft.graph, draft.cluster, models=models)
    positions = row_positions(draft.graph)
    by_host = workers_by_host(draft, draft.workers)
    estimate, planned_rows = estimate_at(draft), longest_rows(draft)
    for node in draft.nodes:
        if node.region == "evaluation" or costs.sizes(node.name) is None:
            continue
        # No row is longer than the positions of whoever makes it or reads it.
        makers = draft.with_ancestors([node.name])
        limits = [positions[name].limit for name in makers if name in positions]
        most = min(limits, default=_MOST)
        planned = planned_rows[node.name]
        room = most
        if node.layout.cache_bytes:
            if costs.unpriced_reason(node.name):
                continue  # nobody knows how a GPU of its kind divides the cache
            room = costs.decode_limits(node.name).room
        if room < most:
            at_once = min(node.layout.slots, room // max(1, planned))
            yield ContextLimit(
                node=node.name, planned=planned, fits=room, by="cache", at_once=at_once
            )
            continue
        near = _take_neighbours(node, draft, by_host)
        fits = _find_longest(node, near, estimate, range(planned, most + 1))
        limit = ContextLimit(node=node.name, planned=planned, fits=fits, by="memory")
        if fits >= most:
            limit = replace(limit, by="positions")
        yield limit


def _find_longest(
    node: PlannedNode,
    near: _Neighbours,
    estimate: Callable[[PlannedNode, int], Estimate],
    rows: range,
) -> int:
    """Find the longest of these rows that fits; the first is planned, and does."""
    planned = estimate(node, rows.start)
    least, too_long = rows.start, max(rows.stop, rows.start + 1)
    while too_long - least > 1:
        middle = (least + too_long) // 2
        if _fits(near, _grow(node, planned, estimate(node, middle))):
            least = middle
        else:
            too_long = middle
    return least


def _grow(node: PlannedNode, planned: Estimate, longer: Estimate) -> PlannedNode:
    """The node with as many more bytes of each part as the formulas have for longer rows."""
    parts = dict(node.estimate.bytes)
    for part, size in longer.bytes.items():
        factor = 1.0
        if before := planned.bytes.get(part, 0):
            factor = parts.get(part, 0) / before
        parts[part] = max(parts.get(part, 0), int(size * factor))
    return replace(node, estimate=replace(node.estimate, bytes=parts))


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """The draft with the nodes alone that have a Worker on some hosts, of which one stands for all
    that are alike. What is on other hosts changes no memory of these.
    """

    draft: Draft
    hosts: frozenset[str]


def _take_neighbours(
    node: PlannedNode, draft: Draft, by_host: Mapping[str, Sequence[str]]
) -> _Neighbours:
    """The hosts that a node is on, and what else is there. by_host: the Workers of each."""
    node_hosts = dict.fromkeys(map(draft.host_of, node.workers))
    workers = {host: by_host[host] for host in node_hosts}
    hosts = frozenset(list_unlike_hosts(draft, draft.cluster, workers))
    names: set[str] = set()
    for worker in chain.from_iterable(workers[host] for host in hosts):
        names.update(other.name for other in draft.nodes_on(worker))
    nodes = tuple(other for other in draft.nodes if other.name in names)
    return _Neighbours(replace(draft, nodes=nodes), hosts)


def _fits(near: _Neighbours, longer: PlannedNode) -> bool:
    """Whether all memory suffices that a node's Workers have, if this is what it needs."""
    nodes = [longer if node.name == longer.name else node for node in near.draft.nodes]
    changed = replace(near.draft, nodes=tuple(nodes))
    rooms = find_memory_rooms(changed, near.draft.cluster, near.hosts)
    return not any(room.is_full for room in rooms if longer.name in room.node_names)
