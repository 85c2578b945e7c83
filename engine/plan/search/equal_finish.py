"""Loads of unlike Workers that end together, alone and over a link that they share.

Owns: the two problems, solved by bisection on the seconds. Does not own: how long a load takes
(engine/plan/cost), which Workers there are (passes/place.py).

Source: partitioned edge learning (arXiv:2003.04544). It gives load by effective rate, bandwidth to
the bottleneck, and both at once: bisect on the seconds T, and for each T ask for the least
bandwidth that lets all end by T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, sqrt

_HALVINGS = 100
"""So many halve an interval of floats to nothing."""

LoadSeconds = Callable[[int], float]
"""Seconds of so many units, which grow with them; of 1 unit or more."""


def divide_units(seconds_of: Sequence[LoadSeconds], units: int) -> tuple[int, ...]:
    """Divide whole units (rows) among Workers so that the last of them ends as early as can be.

    seconds_of: of each Worker. Returns units of each Worker, whose sum is `units`; 0 where a Worker
    would be the last with one unit. Raises ValueError without Workers, and for units below 0.
    """
    if not seconds_of or units < 0:
        sizes = f"{len(seconds_of)} Workers and {units} units"
        raise ValueError(f"equal finish: expected Workers and units from 0, found {sizes}")
    if not units:
        return (0,) * len(seconds_of)
    shortest, longest = 0.0, max(seconds(units) for seconds in seconds_of)
    for _ in range(_HALVINGS):
        middle = (shortest + longest) / 2
        if sum(_count_within(seconds, middle, units) for seconds in seconds_of) >= units:
            longest = middle
        else:
            shortest = middle
    loads = [_count_within(seconds, longest, units) for seconds in seconds_of]
    for _ in range(sum(loads) - units):
        # What is too much is taken from who ends last.
        ends = [
            seconds(load) if load else -1.0 for seconds, load in zip(seconds_of, loads, strict=True)
        ]
        loads[ends.index(max(ends))] -= 1
    return tuple(loads)


def divide_by_rate(unit_seconds: Sequence[float], units: int) -> tuple[int, ...]:
    """Divide whole units among Workers that take so many seconds for each, as `divide_units`."""
    for seconds in unit_seconds:
        if not seconds > 0 or not isfinite(seconds):
            problem = f"expected seconds of a unit above 0, found {seconds}"
            raise ValueError(f"equal finish: {problem}")
    return divide_units([partial(_multiply, seconds) for seconds in unit_seconds], units)


def _multiply(unit_seconds: float, units: int) -> float:
    return unit_seconds * units


def _count_within(seconds_of: LoadSeconds, limit: float, units: int) -> int:
    """Count the units, up to so many, that a Worker does within a limit of seconds."""
    most, too_many = 0, units + 1
    while too_many - most > 1:
        middle = (most + too_many) // 2
        if seconds_of(middle) <= limit:
            most = middle
        else:
            too_many = middle
    return most


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedWorker:
    """A Worker whose units come over a shared link. compute: seconds of a unit, above 0. spectrum:
    bytes a second that it has for each share of the link.
    """

    compute: float
    spectrum: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShares:
    """Loads of Workers, and their shares of a link, by which all end at the same time."""

    seconds: float
    loads: tuple[float, ...]
    shares: tuple[float, ...]
    """0 where a Worker has no load."""


def share_link(
    workers: Sequence[LinkedWorker], *, load: float, unit_bytes: float, bandwidth: float
) -> LinkShares:
    """Divide a load and a link among Workers so that all with a load end together, earliest.

    load: in units, of all Workers; unit_bytes: that each unit brings over the link; bandwidth: the
    sum of the shares. A Worker with load w and share b ends after `w * (compute + unit_bytes /
    (spectrum * b))` seconds. Raises ValueError for numbers that are not above 0.
    """
    numbers = [load, unit_bytes, bandwidth]
    for worker in workers:
        numbers += [worker.compute, worker.spectrum]
    if not workers or not all(number > 0 for number in numbers):
        raise ValueError(f"shares of a link: expected Workers and numbers above 0, found {numbers}")
    computing = load / sum(1 / worker.compute for worker in workers)
    shortest, longest = computing, 2 * computing
    while _need(workers, load, unit_bytes, longest).sum_of_shares > bandwidth:
        longest *= 2
    for _ in range(_HALVINGS):
        middle = (shortest + longest) / 2
        if _need(workers, load, unit_bytes, middle).sum_of_shares <= bandwidth:
            longest = middle
        else:
            shortest = middle
    need = _need(workers, load, unit_bytes, longest)
    return LinkShares(seconds=longest, loads=need.loads, shares=need.shares)


@dataclass(frozen=True, slots=True)
class _Need:
    loads: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def sum_of_shares(self) -> float:
        return sum(self.shares)


def _need(workers: Sequence[LinkedWorker], load: float, unit_bytes: float, end: float) -> _Need:
    """Find the loads with which the least bandwidth lets all Workers end in time.

    A Worker needs `unit_bytes * w / (spectrum * (end - compute * w))`, convex in its load w. Where
    their sum is least, all with a load have the same slope, so the seconds that each has left for
    the link are as the square root of 1 / spectrum: one factor, found by bisection.
    """
    if sum(end / worker.compute for worker in workers) <= load:
        return _Need((), (float("inf"),))
    least, most = 0.0, max(end * sqrt(worker.spectrum) for worker in workers)
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        if sum(_load_of(worker, middle, end) for worker in workers) >= load:
            least = middle
        else:
            most = middle
    loads = tuple(_load_of(worker, least, end) for worker in workers)
    shares: list[float] = []
    for worker, own_load in zip(workers, loads, strict=True):
        left = end - worker.compute * own_load
        if own_load and left <= 0:
            return _Need(loads, (float("inf"),))
        share = 0.0
        if own_load:
            share = unit_bytes * own_load / (worker.spectrum * left)
        shares.append(share)
    return _Need(loads, tuple(shares))


def _load_of(worker: LinkedWorker, factor: float, end: float) -> float:
    return max(0.0, end - factor / sqrt(worker.spectrum)) / worker.compute
