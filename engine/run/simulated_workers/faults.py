"""What goes wrong in a simulated run: which Worker dies, stops or has to leave when, and how
messages are delayed or doubled. All draws come from one generator of its own, so that a run with
faults repeats exactly.

Does not own: what follows from it (workers.py, simulated_worker.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine.plan.plan import Plan
from engine.plan.replica_ranges import elastic_nodes
from engine.protocol.replica_messages import LeaveRequested, ScaleRequested


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultModel:
    """How often things go wrong; times are in simulated seconds.

    deaths: how many at most. rate: the chance of one at each event that the coordinator hears.
    stateful: the chance that Workers with state are hit instead. stops: the share that stops first,
    and is killed if it does not go on within `patience`. again: the chance that a Worker is hit
    again as it restarts or soon after. scales, leaves: the chances, at each event, that another
    number of replicas is asked for, and that the machines of some are taken away; moves: how often
    at most. detect, respawn, fetch, delay: the longest time until a death is noticed, of a restart,
    a fetch, a message. doubles: the share of messages that arrive twice.
    shorts: how many tasks of kernels run out of memory at most; short_rate: the chance of each;
    short_lost: that a train node has then lost what it had.
    """

    seed: int = 0
    deaths: int = 3
    rate: float = 0.05
    stateful: float = 0.2
    stops: float = 0.2
    patience: float = 30.0
    again: float = 0.25
    scales: float = 0.0
    leaves: float = 0.0
    moves: int = 40
    detect: float = 1.0
    respawn: float = 5.0
    fetch: float = 0.3
    delay: float = 0.5
    doubles: float = 0.1
    shorts: int = 0
    short_rate: float = 0.1
    short_lost: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """A Worker is hit, after so many seconds. stopped: how long it stands still first."""

    worker: str
    after: float
    stopped: float = 0.0


class Fate:
    """Draws the faults of one run."""

    def __init__(self, faults: FaultModel) -> None:
        self._faults = faults
        self._draw = random.Random(faults.seed)
        self._left = faults.deaths
        self._moves = faults.moves

    def strikes(self) -> bool:
        """Whether a Worker is hit at this event."""
        return self._left > 0 and self._draw.random() < self._faults.rate

    def strike(self, stateless: Sequence[str], stateful: Sequence[str]) -> Blow | None:
        """Which of these is hit; None if none of the kind is left."""
        hits_state = stateful and self._draw.random() < self._faults.stateful
        at_risk = stateful if hits_state else stateless
        if not at_risk:
            return None
        self._left -= 1
        worker = self._draw.choice(at_risk)
        after, stopped = self._draw.choice((0.0, self.upto(5.0))), 0.0
        if self._draw.random() < self._faults.stops:
            stopped = self._draw.choice((0.2, 0.8, 2.0)) * self._faults.patience
        return Blow(worker=worker, after=after, stopped=stopped)

    def strike_again(self, worker: str) -> Blow | None:
        """Whether a Worker is hit again as it restarts."""
        if not self._left or self._draw.random() >= self._faults.again:
            return None
        self._left -= 1
        return Blow(worker=worker, after=self.upto(2.0 * self._faults.respawn))

    def moves(self, plan: Plan) -> list[LeaveRequested | ScaleRequested]:
        """What is asked of replicas that come and go, at this event."""
        requests: list[LeaveRequested | ScaleRequested] = []
        if self._moves <= 0 or not (self._faults.scales or self._faults.leaves):
            return requests
        for node in elastic_nodes(plan):
            if self._draw.random() < self._faults.scales:
                count = self._draw.randint(0, len(node.workers) + 1)
                requests.append(ScaleRequested(node=node.name, replicas=count))
            if self._draw.random() < self._faults.leaves:
                some = self._draw.sample(node.workers, self._draw.randint(1, len(node.workers)))
                requests.append(LeaveRequested(workers=tuple(some), reason="simulated"))
        self._moves -= len(requests)
        return requests

    def arrivals(self) -> list[float]:
        """The delays, in seconds, after which a message arrives, once or twice."""
        copies = 2 if self._draw.random() < self._faults.doubles else 1
        return [self.delay() for _ in range(copies)]

    def delay(self) -> float:
        """Seconds that a message is on its way."""
        return self.upto(self._faults.delay) * self._draw.choice((0.0, 0.1, 1.0))

    def upto(self, seconds: float) -> float:
        """A time of at most so many seconds."""
        return self._draw.uniform(0.0, seconds)
