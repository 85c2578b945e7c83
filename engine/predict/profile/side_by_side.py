"""How much longer real kernels take while the host's other cores run the same, or the plan's
other kernels.

Owns: running processes of the same nodes at the same time, and then one alone. Does not own: what a
process measures (kernel_timing.py), which nodes there are (grid.py).

A process takes several seconds to start, so that each measures all nodes, one after another: where
nodes of a plan work at the same time, each process begins with another one, so that generation runs
beside training, which moves more memory than it does itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from engine.plan.cost.profile import ProfileCell
from engine.plan.plan import Plan
from engine.predict.profile.child import run_in_child
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
        timed = [each.cell.seconds for each in self.cells if each.cell.seconds]
        short = [seconds for seconds in timed if seconds <= _LONGEST]
        if short:
            return max(short)
        return min(timed, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowding:
    """slower: seconds of a call with all cores at work, over alone; 1 where only one such kernel
    has room, or where nothing was measured. others: the greatest share of the cores that its
    processes wanted which others had; by_cpu: whether that is of CPU seconds.
    """

    slower: float = 1.0
    others: float = 0.0
    by_cpu: bool = False


def measure_crowding(
    measured: Sequence[MeasuredWork], cores: int, *, quick: bool, mixed: bool = False
) -> list[Crowding]:
    """Measure how much longer each node takes. quick: fewer calls. mixed: beside the others of its
    process's kind, not beside itself.
    """
    crowdings = [Crowding()] * len(measured)
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, each in enumerate(measured):
        if each.typical and cores // max(1, each.work.cores) > 1:
            groups.setdefault(each.process, []).append(number)
    for numbers in groups.values():
        works = [measured[number] for number in numbers]
        processes = cores // works[0].work.cores
        crowded = _measure_together(works, processes, quick=quick, mixed=mixed)
        alone = _measure_together(works, 1, quick=quick)
        for number, slow, fast in zip(numbers, crowded, alone, strict=True):
            crowdings[number] = _compare(slow, fast)
    return crowdings


def _compare(crowded: Sequence[ProfileCell], alone: Sequence[ProfileCell]) -> Crowding:
    """Compare the call of one node in each of the processes beside each other with those alone."""
    slower = _median_seconds(crowded) / _median_seconds(alone)
    worst = max((*crowded, *alone), key=lambda cell: cell.others)
    return Crowding(slower=max(1.0, slower), others=worst.others, by_cpu=worst.by_cpu)


def _median_seconds(cells: Sequence[ProfileCell]) -> float:
    return median(cell.seconds or 0.0 for cell in cells)


def _measure_together(
    works: Sequence[MeasuredWork], processes: int, *, quick: bool, mixed: bool = False
) -> list[Sequence[ProfileCell]]:
    """Run so many processes at once; gives each node's call as each of them measured it. mixed:
    each process begins with another node.
    """
    first = works[0]
    calls = [_make_call(each, quick=quick) for each in works]

    def run(process: int) -> Sequence[ProfileCell]:
        begin = process % len(calls) if mixed else 0
        cells = run_in_child(
            partial(_time_calls, [*calls[begin:], *calls[:begin]]),
            threads=first.work.cores,
            needed=first.needed,
            title=first.work.node,
        ).outputs
        end = len(cells) - begin
        return [*cells[end:], *cells[:end]]

    with ThreadPoolExecutor(processes) as pool:
        cells_by_process = list(pool.map(run, range(processes)))
    return list(zip(*cells_by_process, strict=True))


def _make_call(measured: MeasuredWork, *, quick: bool) -> tuple[Plan, ProfiledWork, int]:
    """(plan, the one call of a node, how often)."""
    cells = [each.cell for each in measured.cells]
    cell = next(cell for cell in cells if cell.seconds == measured.typical)
    seconds = _QUICK_SECONDS if quick else _SECONDS
    repeats = min(_MOST, max(_LEAST, round(seconds / measured.typical)))
    unmeasured = replace(cell, seconds=None, cpu=0.0, by_cpu=False, others=0.0, peak=0)
    return measured.plan, replace(measured.work, cells=(unmeasured,)), repeats


def _time_calls(calls: Sequence[tuple[Plan, ProfiledWork, int]]) -> Iterator[ProfileCell]:
    """Each node's call. Nothing is made again: the other processes would have ended meanwhile."""
    for plan, work, repeats in calls:
        for measured in measure(plan, work, repeats=repeats, further=0):
            yield measured.cell
