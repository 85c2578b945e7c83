"""How much longer real kernels take while the host's other cores run the same.

Owns: running processes of the same nodes at the same time, and then one alone. Does not own: what a
process measures (kernel_timing.py), which nodes there are (grid.py).

A process takes several seconds to start, so that each measures all nodes, one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from engine.plan.cost.profile import ProfileCell
from engine.plan.plan import Plan
from engine.predict.profile.child import in_child
from engine.predict.profile.kernel_timing import measure
from engine.predict.profile.predictions import MeasuredCell, ProfiledWork

_LONGEST = 0.5
"""Seconds of the call that is repeated, at most, if there is one so short."""
_SECONDS = 4.0
"""Of all repeats of a node, about: the processes do not begin at the same moment."""
_QUICK_SECONDS = 2.0
_LEAST, _MOST = 5, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWork:
    """A node that was measured alone. needed: of its process's environment."""

    plan: Plan
    work: ProfiledWork
    cells: tuple[MeasuredCell, ...]
    needed: Mapping[str, str]

    @property
    def process(self) -> tuple[object, ...]:
        """Nodes for which it is equal may be in one process."""
        return self.work.cores, self.work.kernel, tuple(sorted(self.needed.items()))

    @property
    def typical(self) -> float:
        """Seconds of its longest call that is not too long; 0 where nothing was measured."""
        known = [c.cell.seconds for c in self.cells if c.cell.seconds]
        short = [seconds for seconds in known if seconds <= _LONGEST]
        return max(short) if short else min(known, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowding:
    """slower: seconds of a call with all cores at work, over alone; 1 where only one such kernel
    has room, or where nothing was measured. others: the greatest share of the cores that its
    processes wanted which others had; by_cpu: whether that is of CPU seconds.
    """

    slower: float = 1.0
    others: float = 0.0
    by_cpu: bool = False


def beside(measured: Sequence[MeasuredWork], cores: int, *, quick: bool) -> list[Crowding]:
    """Of each node. quick: fewer calls."""
    crowdings = [Crowding()] * len(measured)
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, each in enumerate(measured):
        if each.typical and cores // max(1, each.work.cores) > 1:
            groups.setdefault(each.process, []).append(number)
    for numbers in groups.values():
        some = [measured[number] for number in numbers]
        crowded = _together(some, cores // some[0].work.cores, quick=quick)
        alone = _together(some, 1, quick=quick)
        for number, slow, fast in zip(numbers, crowded, alone, strict=True):
            crowdings[number] = _crowding(slow, fast)
    return crowdings


def _crowding(crowded: Sequence[ProfileCell], alone: Sequence[ProfileCell]) -> Crowding:
    """Of the call of one node, in each of the processes."""
    slow, fast = (median(cell.seconds or 0.0 for cell in cells) for cells in (crowded, alone))
    worst = max((*crowded, *alone), key=lambda cell: cell.others)
    return Crowding(slower=max(1.0, slow / fast), others=worst.others, by_cpu=worst.by_cpu)


def _together(
    some: Sequence[MeasuredWork], processes: int, *, quick: bool
) -> list[Sequence[ProfileCell]]:
    """Of each node its call, as each of so many processes measured it at the same time."""
    first = some[0]
    task = partial(_calls, [(each.plan, *_repeated(each, quick=quick)) for each in some])
    how = {"threads": first.work.cores, "needed": first.needed, "title": first.work.node}
    with ThreadPoolExecutor(processes) as pool:
        told = list(pool.map(lambda _: in_child(task, **how).told, range(processes)))
    return list(zip(*told, strict=True))


def _repeated(each: MeasuredWork, *, quick: bool) -> tuple[ProfiledWork, int]:
    """The one call of a node, and how often."""
    cell = next(c.cell for c in each.cells if c.cell.seconds == each.typical)
    lasting = _QUICK_SECONDS if quick else _SECONDS
    repeats = min(_MOST, max(_LEAST, round(lasting / each.typical)))
    plain = replace(cell, seconds=None, cpu=0.0, by_cpu=False, others=0.0, peak=0)
    return replace(each.work, cells=(plain,)), repeats


def _calls(asked: Sequence[tuple[Plan, ProfiledWork, int]]) -> Iterator[ProfileCell]:
    """Each node's call. Nothing is made again: the other processes would have ended meanwhile."""
    for plan, work, repeats in asked:
        for cell in measure(plan, work, repeats=repeats, further=0):
            yield cell.cell
