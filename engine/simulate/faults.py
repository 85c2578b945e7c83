"""What goes wrong in a simulated run.

Owns: drawing who dies or stops, when, and what becomes of messages on their way. Does not own:
what follows from it (workers.py, simulated_worker.py).

Everything is drawn from a generator of its own, so that a run with faults repeats exactly.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultModel:
    """Times are in simulated seconds.

    deaths: how many at most. rate: the chance of one for each event that the coordinator hears.
    stateful: the chance that a Worker with state may be hit as well. stops: the share that stops
    first, and is killed when it has not answered for `patience`, if it does not go on before.
    again: the chance that a Worker is hit once more while it is begun anew, or soon after. detect,
    respawn: the longest that it takes to tell of a death, and to begin anew. fetch: the longest
    that a fetch takes. delay: the longest that a message takes; doubles: the share that comes
    twice.
    """

    seed: int = 0
    deaths: int = 3
    rate: float = 0.05
    stateful: float = 0.2
    stops: float = 0.2
    patience: float = 30.0
    again: float = 0.25
    detect: float = 1.0
    respawn: float = 5.0
    fetch: float = 0.3
    delay: float = 0.5
    doubles: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """Somebody is hit, so many seconds from now. stopped: for how long it does not answer first; 0
    is death at once.
    """

    worker: str
    after: float
    stopped: float = 0.0


class Fate:
    """The faults of one run, as they come."""

    def __init__(self, faults: FaultModel) -> None:
        self._faults = faults
        self._draw = random.Random(faults.seed)
        self._left = faults.deaths

    def strikes(self) -> bool:
        """Asked at each event: whether somebody is hit now."""
        return self._left > 0 and self._draw.random() < self._faults.rate

    def strike(self, stateless: Sequence[str], stateful: Sequence[str]) -> Blow | None:
        """Who of these it is; None where nobody is left of the kind."""
        at_risk = (
            stateful if stateful and self._draw.random() < self._faults.stateful else stateless
        )
        if not at_risk:
            return None
        self._left -= 1
        blow = Blow(
            worker=self._draw.choice(at_risk),
            after=self._draw.choice((0.0, self._draw.uniform(0.0, 5.0))),
        )
        if self._draw.random() < self._faults.stops:
            stopped = self._draw.choice((0.2, 0.8, 2.0)) * self._faults.patience
            return Blow(worker=blow.worker, after=blow.after, stopped=stopped)
        return blow

    def strike_again(self, worker: str) -> Blow | None:
        """Asked when a Worker is begun anew."""
        if not self._left or self._draw.random() >= self._faults.again:
            return None
        self._left -= 1
        return Blow(worker=worker, after=self._draw.uniform(0.0, 2.0 * self._faults.respawn))

    def arrivals(self) -> list[float]:
        """After how many seconds a message comes, each time that it does."""
        copies = 2 if self._draw.random() < self._faults.doubles else 1
        return [
            self.upto(self._faults.delay) * self._draw.choice((0.0, 0.1, 1.0))
            for _ in range(copies)
        ]

    def upto(self, seconds: float) -> float:
        """Some time, no longer than this."""
        return self._draw.uniform(0.0, seconds)
