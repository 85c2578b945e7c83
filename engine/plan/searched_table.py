"""The layout table of a search (`--relayout auto`): the best layouts of some lengths, in each.

    points      powers of two of live tokens, up to all rows at their longest
    layouts     the best whole plan of each point, those that differ
    cells       seconds of a Step of each layout at each point; infinite where it has no room
    table       as few layouts, and changes between them, as lose little at any point

Owns: which points there are, what has room, which layouts stay. Does not own: finding and pricing a
plan (engine/session/layout_search.py), the table and its look-ups (layout_table.py).

A layout has room for what its caches hold at once: rows that a replica decodes together x the mean
length of prompt and answer. Beyond that rows would be sent back and begun again, so that another is
taken that has room. Where none has, rows are sent back in each, and seconds alone decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.plan.cost.distribution import assume_mean, assumed_answers
from engine.plan.costs import PlanCosts
from engine.plan.layout_table import LayoutBucket, LayoutTable, RunLayout, measured_table
from engine.plan.lengths import greatest_lengths
from engine.plan.plan import Plan, PlannedNode
from engine.plan.priced_work import ASSUMED, PricedWork, StepLengths

LEAST_GAIN = 0.03
"""Of a Step: what one more layout has to be worth at some point."""
_SHORTEST = 32
"""How many times as long as at the first point answers may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePoints:
    """lengths: of a Step's answers, by its live tokens, ascending. begins: live tokens of answers
    of assumed lengths.
    """

    lengths: Mapping[int, StepLengths]
    begins: float


def list_points(plan: Plan) -> LivePoints | None:
    """List the lengths for which layouts are searched: powers of two of live tokens, from answers
    of a 32nd of the longest on, and the longest. None where nothing is generated above the cut.
    """
    assert plan.program is not None
    greatest = greatest_lengths(plan.program)
    longest = rows = 0
    for node in _list_generations(plan):
        answer, count = greatest[node.name].completion, _count_rows(plan, node)
        if answer * count > longest * rows:
            longest, rows = answer, count
    if not longest:
        return None
    most = rows * longest
    powers = (2**power for power in range(most.bit_length()))
    points = [live for live in powers if max(rows, most / _SHORTEST) <= live < most]
    lengths: dict[int, StepLengths] = {}
    for live in (*points, most):
        lengths[live] = StepLengths(answers=assume_mean(live / rows, longest))
    return LivePoints(lengths=lengths, begins=rows * assumed_answers(longest).mean)


def _list_generations(plan: Plan) -> Iterator[PlannedNode]:
    """Generations above the cut, by which live tokens are measured."""
    for node in plan.nodes:
        if node.traits.generates and node.region == "stream":
            yield node


def _count_rows(plan: Plan, node: PlannedNode) -> int:
    """Rows of a Step."""
    batches = {source.name: source.batch for source in plan.sources}
    return batches[node.source] * node.rows


def find_room(plan: Plan, costs: PlanCosts) -> float:
    """The live tokens of a Step for which the caches of a plan have room; infinite where none is of
    a fixed size.
    """
    assert plan.program is not None
    work = PricedWork(plan, plan.program, greatest_lengths(plan.program), ASSUMED)
    room = math.inf
    for node in _list_generations(plan):
        if not node.layout.cache_bytes or costs.unpriced_reason(node.name):
            continue
        limits, rows = costs.decode_limits(node.name), _count_rows(plan, node)
        at_once = -(-rows // max(node.chunks, node.layout.replicas))
        if node.binds_late:
            at_once = -(-rows * (1 + node.lag) // node.layout.replicas)
        at_once = min(limits.slots, at_once)
        prompts = work.distributions(node.name).prompts.mean / limits.shared
        # A token of each row's next pass has to find room, too.
        answers = limits.room / at_once - prompts - 1.0
        room = min(room, max(0.0, answers * rows))
    return room


def make_table(
    layouts: Sequence[RunLayout],
    grid: Mapping[int, Sequence[float]],
    *,
    switch_seconds: float = 0.0,
    begins: float = 0.0,
) -> LayoutTable:
    """Make a table of few of these layouts, the smallest first. grid: live tokens -> seconds of a
    Step in each, whether there is room or not; infinite where there is no plan.
    """
    rooms = _let_room(layouts, grid)
    cells: dict[int, list[float]] = {}
    for live, seconds in grid.items():
        fitting = zip(seconds, rooms, strict=True)
        cells[live] = [time if live <= room else math.inf for time, room in fitting]
    numbers = _choose_few(cells)
    chosen = [replace(layouts[number], most=rooms[number]) for number in numbers]
    few: dict[int, list[float]] = {}
    for live, seconds in cells.items():
        few[live] = [seconds[number] for number in numbers]
    table = measured_table(chosen, few, switch_seconds=switch_seconds, begins=begins)
    return replace(table, buckets=tuple(_go_on(table.buckets)))


def _go_on(buckets: Sequence[LayoutBucket]) -> Iterator[LayoutBucket]:
    """Each bucket with the layout of the one before it, where that is little longer than the best:
    what simulations differ by is worth no switch.
    """
    before: LayoutBucket | None = None
    for bucket in buckets:
        if before is not None:
            seconds, least = bucket.seconds[before.best], min(bucket.seconds)
            if seconds <= least * (1.0 + LEAST_GAIN) and math.isfinite(least):
                bucket = replace(bucket, best=before.best)
        yield bucket
        before = bucket


def _let_room(layouts: Sequence[RunLayout], grid: Mapping[int, Sequence[float]]) -> list[float]:
    """The live tokens up to which each layout may be taken: those for which it has room, and any
    where it is the fastest and none has.
    """
    rooms = [layout.most for layout in layouts]
    for live, seconds in grid.items():
        fitting = zip(seconds, rooms, strict=True)
        fits = any(math.isfinite(time) and live <= room for time, room in fitting)
        if not fits and math.isfinite(min(seconds)):
            rooms[seconds.index(min(seconds))] = math.inf
    return rooms


def _choose_few(cells: Mapping[int, Sequence[float]]) -> list[int]:
    """Numbers of the layouts that stay: one after another that is worth least is left out, as long
    as a Step becomes nowhere much longer.
    """
    first = next(iter(cells.values()))
    numbers = list(range(len(first)))
    while len(numbers) > 1:
        losses: list[tuple[float, int]] = []
        for number in numbers:
            others = [other for other in numbers if other != number]
            losses.append((_find_loss(cells, others), -number))
        loss, least_useful = min(losses)
        if loss >= LEAST_GAIN:
            break
        numbers.remove(-least_useful)
    return numbers


def _find_loss(cells: Mapping[int, Sequence[float]], numbers: Sequence[int]) -> float:
    """The share by which a Step of the fastest of these is longer than of the fastest of all, where
    that is most.
    """
    losses = [0.0]
    for seconds in cells.values():
        best = min(seconds)
        if math.isfinite(best):
            losses.append(min(seconds[number] for number in numbers) / best - 1.0)
    return max(losses)
