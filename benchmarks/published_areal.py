"""AReaL's asynchronous training, as its paper describes it, on this project's cost model.

Owns: engines that are never idle, the admission rule, interruption by new weights, and the exact
intake of this project beside it. Does not own: what engines and trainers are made of
(published_schedules.py).

Events come in the order of the engines' clocks; one stretch of passes is one event, so that rows
are handed over at most a stretch late. Weights reach all engines at once; each then computes the
keys and values of its rows once more (AReaL, arXiv:2505.24298, section 4.1).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from benchmarks.published_schedules import SLOTS, Engines, Rollouts, Trainer, pushed
from engine.plan.cost.model_passes import Passes

_STRETCH = 256
"""Passes that one pass stands for at most."""


@dataclass(slots=True, kw_only=True)
class _Answer:
    """One row under way. number: its place in the order of submission; begun: the version that it
    was submitted at; left: tokens that it still needs; tokens: that it has, with its prompt; since:
    the engine's passes before it came into its slot.
    """

    number: int
    begun: int
    answer: int
    left: int
    tokens: int
    since: int = 0


@dataclass(slots=True, kw_only=True)
class _Engine:
    """One replica: rows in slots, into which others move up as soon as one is free."""

    decoding: Passes
    prefilling: Passes
    room: int
    now: float = 0.0
    passes: int = 0
    cached: float = 0.0
    fed: float = 0.0
    """Tokens to be fed before the next pass."""
    keys: float = 0.0
    """That they attend to."""
    waiting: deque[_Answer] = field(default_factory=deque[_Answer])
    active: dict[int, _Answer] = field(default_factory=dict[int, _Answer])
    soonest: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def load(self) -> int:
        """Rows that it has."""
        return len(self.active) + len(self.waiting)

    def run(self, until: float) -> list[_Answer]:
        """Passes until a row is finished, the cache is full, or it is `until`; finished rows."""
        self._admit()
        if self.fed:
            self.now += self.prefilling.at(self.fed, self.keys, predicted=0.0).seconds
            self.fed = self.keys = 0.0
        rows = len(self.active)
        free = int((self.room - self.cached) // rows)
        if free < 1 and rows > 1:
            self._send_back()
            return []
        most = max(1, int((until - self.now) / self._pass(self.cached))) if until else _STRETCH
        count = min(self._first_end() - self.passes, _STRETCH, max(free, 1), most)
        self.now += count * self._pass(self.cached + rows * (count - 1) / 2.0)
        self.passes += count
        self.cached += rows * count
        return self._finished()

    def interrupt(self, now: float) -> None:
        """Weights were put in by `now`; keys and values of all rows are computed once more."""
        self.now = max(self.now, now)
        self.fed = self.keys = 0.0
        for row in self.active.values():
            self._feed(row.tokens + self.passes - row.since)

    def _admit(self) -> None:
        """Waiting rows come in while there is a slot and room."""
        while self.waiting and len(self.active) < SLOTS:
            row = self.waiting[0]
            if self.active and self.cached + row.tokens + len(self.active) + 1 > self.room:
                return
            self.active[row.number] = self.waiting.popleft()
            row.since = self.passes
            heapq.heappush(self.soonest, (self.passes + row.left, row.number))
            self.cached += row.tokens
            self._feed(row.tokens)

    def _send_back(self) -> None:
        """The row that came in last waits with what it has."""
        row = next(reversed(self.active.values()))
        self._leave(row)
        self.waiting.appendleft(row)

    def _finished(self) -> list[_Answer]:
        found: list[_Answer] = []
        while self.active and self._first_end() <= self.passes:
            row = self.active[heapq.heappop(self.soonest)[1]]
            self._leave(row)
            found.append(row)
        return found

    def _first_end(self) -> int:
        """The pass after which the next row is finished; rows that were sent back do not count."""
        while True:
            last, number = self.soonest[0]
            row = self.active.get(number)
            if row is not None and row.since + row.left == last:
                return last
            heapq.heappop(self.soonest)

    def _leave(self, row: _Answer) -> None:
        made = self.passes - row.since
        del self.active[row.number]
        row.tokens, row.left = row.tokens + made, row.left - made
        self.cached -= row.tokens

    def _pass(self, cached: float) -> float:
        rows = len(self.active)
        return self.decoding.at(rows, cached + rows, cached=cached, rows=rows).seconds

    def _feed(self, tokens: float) -> None:
        self.fed += tokens
        self.keys += tokens * tokens / 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchronous:
    """What a run gave. seconds: of a Step, in the second half of the run; lag: most versions
    between a row's submission and its training; late: share of trained rows beyond eta.
    """

    seconds: float
    lag: int
    late: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRule:
    """AReaL's rule (section 5.1): row number n may begin while floor(n / rows) <= version + eta.
    exact: rows are only taken when no row can come to be trained later than that, which the rule
    alone does not promise, since finished rows overtake long ones.
    """

    eta: int
    exact: bool = False


class _AsynchronousRun:
    """Engines that never wait for the trainer, and a trainer that takes finished rows."""

    def __init__(
        self,
        rollouts: Rollouts,
        engines: Engines,
        trainer: Trainer,
        rule: AdmissionRule,
        *,
        scale: int,
        seed: int,
    ) -> None:
        self._rollouts, self._trainer, self._rule, self._scale = rollouts, trainer, rule, scale
        self._rows = rollouts.rows // scale
        self._random = np.random.default_rng(seed)
        self._push = pushed(trainer.where, engines)
        self._engines = [
            _Engine(
                decoding=Passes(engines.model, engines.where, "decode"),
                prefilling=Passes(engines.model, engines.where, "prefill"),
                room=engines.room,
            )
            for _ in range(engines.replicas // scale)
        ]
        self._version, self._submitted = 0, 0
        self._finished: list[_Answer] = []
        self._untrained: Counter[int] = Counter()
        """Rows by the version that they were submitted at."""
        self._trained_at = 0.0
        """When the batch in training will be trained; 0 while there is none."""
        self._free_at = 0.0
        self.times = [0.0]
        self.lags: Counter[int] = Counter()

    def step(self) -> None:
        """Until one more batch is trained."""
        self._submit(self._free_at)
        self._take(self._free_at)
        while True:
            engine = min((e for e in self._engines if e.load), key=lambda e: e.now, default=None)
            if self._trained_at and (engine is None or engine.now >= self._trained_at):
                break
            assert engine is not None  # a row that is admitted is in an engine until it is finished
            self._finished += engine.run(self._trained_at)
            self._take(engine.now)
        self._version += 1
        self._free_at = self._trained_at + self._push
        self._trained_at = 0.0
        self.times.append(self._free_at)
        for engine in self._engines:
            engine.interrupt(self._free_at)

    def _submit(self, now: float) -> None:
        """All rows that the rule admits at this version go to the engine with fewest."""
        allowed = (self._version + self._rule.eta + 1) * self._rows
        answers = self._rollouts.lengths.at(self._random.random(allowed - self._submitted))
        for answer in answers.tolist():
            row = _Answer(
                number=self._submitted,
                begun=self._version,
                answer=answer,
                left=answer,
                tokens=self._rollouts.prompt,
            )
            engine = min(self._engines, key=lambda e: e.load)
            engine.now = max(engine.now, now) if not engine.load else engine.now
            engine.waiting.append(row)
            self._submitted += 1
            self._untrained[self._version] += 1

    def _take(self, now: float) -> None:
        """Begin to train the oldest finished rows, if there are enough."""
        if self._trained_at or len(self._finished) < self._rows:
            return
        self._finished.sort(key=lambda row: row.number)
        batch = self._finished[: self._rows]
        begun = Counter(row.begun for row in batch)
        if self._rule.exact and not self._in_time(begun):
            return
        del self._finished[: self._rows]
        self._untrained -= begun
        self.lags.update({self._version - b: count for b, count in begun.items()})
        answers = np.array([row.answer for row in batch])
        seconds = self._trainer.seconds(self._rollouts, answers, scale=self._scale)
        self._trained_at = max(now, self._free_at) + seconds

    def _in_time(self, begun: Counter[int]) -> bool:
        """Whether all other rows can still be trained within eta: of those submitted up to version
        s, at most as many as the batches until s + eta take.
        """
        left = self._untrained - begun
        waiting = 0
        for version in range(self._version + 1):
            waiting += left[version]
            if waiting > self._rows * max(0, version + self._rule.eta - self._version):
                return False
        return True


def asynchronous(
    rollouts: Rollouts,
    engines: Engines,
    trainer: Trainer,
    rule: AdmissionRule,
    *,
    steps: int,
    scale: int,
    seed: int = 0,
) -> Asynchronous:
    """A run of so many Steps, with one part in `scale` of the rows, engines and trainer ranks."""
    run = _AsynchronousRun(rollouts, engines, trainer, rule, scale=scale, seed=seed)
    for _ in range(steps):
        run.step()
    half = steps // 2
    seconds = (run.times[-1] - run.times[half]) / (steps - half)
    late = sum(count for lag, count in run.lags.items() if lag > rule.eta)
    return Asynchronous(seconds=seconds, lag=max(run.lags), late=late / run.lags.total())
