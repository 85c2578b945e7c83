"""How much longer a real kernel takes while the host's other cores run the same.

Owns: running several processes of one node at the same time, then one alone. Does not own: what a
process measures (measuring.py), which nodes there are (grid.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from engine.plan.plan import Plan
from engine.profile.child import in_child
from engine.profile.measuring import measure
from engine.profile.predicting import MeasuredCell, ProfiledWork

_LONGEST = 0.5
"""Seconds of the call that is repeated, at most, if there is one so short."""
_SECONDS = 4.0
"""Of all repeats, about: the processes do not begin at the same moment."""
_LEAST, _MOST = 5, 60


def beside(
    plan: Plan,
    work: ProfiledWork,
    cells: Sequence[MeasuredCell],
    cores: int,
    needed: Mapping[str, str],
) -> float:
    """Seconds of a call with all cores at work, over alone; 1 where only one such kernel has room,
    or where nothing was measured.
    """
    together = cores // max(1, work.cores)
    known = [c for c in cells if c.cell.seconds]
    if together < 2 or not known:
        return 1.0
    cell = _typical(known)
    assert cell.cell.seconds is not None
    repeats = min(_MOST, max(_LEAST, round(_SECONDS / cell.cell.seconds)))
    one = replace(work, cells=(replace(cell.cell, seconds=None, cpu=0.0, peak=0),))
    # Wall-clock seconds, whoever else is there: that is what is asked.
    task = partial(measure, plan, one, repeats=repeats, busy=False)
    run = partial(_seconds, task, work, needed)
    with ThreadPoolExecutor(together) as pool:
        crowded = list(pool.map(lambda _: run(), range(together)))
    return max(1.0, median(crowded) / run())


def _typical(cells: Sequence[MeasuredCell]) -> MeasuredCell:
    """The longest that is not too long."""
    short = [c for c in cells if (c.cell.seconds or 0.0) <= _LONGEST]
    if short:
        return max(short, key=lambda c: c.cell.seconds or 0.0)
    return min(cells, key=lambda c: c.cell.seconds or 0.0)


def _seconds(
    task: Callable[[], Iterator[Any]], work: ProfiledWork, needed: Mapping[str, str]
) -> float:
    told = in_child(task, threads=work.cores, needed=needed, title=work.node).told
    return float(told[0].cell.seconds)
