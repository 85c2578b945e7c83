"""The metrics of a chunk's episodes.

Owns: their names and numbers. Does not own: what is counted (episode_pass.py, the decode loops).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from dataflow.kernel import Session
from operators.kernels.decoding import Counts
from operators.kernels.environments.replies import EnvironmentFault
from operators.kernels.episodes import EpisodeRow, RowOutcome


class LoopCounts:
    """What the decode loops of a run have counted. Their slots are shared by all chunks, so each
    chunk reports what was counted since another did: all is reported once.
    """

    def __init__(self) -> None:
        self._loop = Counts()
        self._reported = Counts()
        """Of this loop; less than nothing where loops before it have left some."""

    def watch(self, counts: Counts) -> None:
        """Count what this loop counts from now on; the one before counts no more."""
        self._reported = self._reported.since(self._loop)
        self._loop = counts

    def take(self) -> Counts:
        """What was counted since the last call."""
        counts = self._loop.since(self._reported)
        self._reported = replace(self._loop)
        return counts


class EpisodeMetrics:
    """Counts over all attempts of a chunk; `report` says them, once."""

    def __init__(self, session: Session, *, has_segments: bool = False) -> None:
        self._session = session
        self._has_segments = has_segments
        self._attempts = 0
        self._faults: list[EnvironmentFault] = []
        self._tokens = 0
        self._steps = 0
        self._step_seconds = 0.0

    def count_attempts(self, attempts: int) -> None:
        """Count episodes that are begun."""
        self._attempts += attempts

    def count_fault(self, fault: EnvironmentFault) -> None:
        """Count an episode that came to nothing."""
        self._faults.append(fault)

    def count_row(self, outcome: RowOutcome) -> None:
        """Count what was written and answered in a row, whatever came of it."""
        self._tokens += outcome.episode.length
        self._steps += outcome.episode.answers
        turns = outcome.episode.turns
        self._step_seconds += sum(turn.environment_seconds for turn in turns)
        if outcome.fault is not None:
            self.count_fault(outcome.fault)

    def report(self, rows: Collection[EpisodeRow], decoding: Counts) -> None:
        """Report all of them. rows: all rows of the chunk's episodes that are over; decoding: the
        chunk's part of what the loops counted.
        """
        session = self._session
        if self._attempts:
            timeouts = sum(fault.kind == "timeout" for fault in self._faults)
            errors = len(self._faults) - timeouts
            session.metric("env/timeouts", timeouts)
            session.metric("env/errors", errors)
        self._report_rows(rows)
        if self._steps:
            session.metric("env/step/seconds", self._step_seconds / self._steps, self._steps)
        self._report_decoding(decoding)

    def _report_rows(self, rows: Collection[EpisodeRow]) -> None:
        if not rows:
            return
        metric, count = self._session.metric, sum(row.is_last for row in rows)
        written = sum(row.episode.written for row in rows)
        metric("generate/tokens", written / count, count)
        metric("episode/tokens", sum(len(row.tokens) for row in rows) / count, count)
        metric("episode/turns", sum(len(row.episode.turns) for row in rows) / count, count)
        if self._has_segments:
            metric("episode/segments", len(rows) / count, count)
        contexts = (len(row.episode.prompt) + len(row.tokens) for row in rows)
        metric("episode/context/max", max(contexts))
        overflows = sum(row.episode.overflowed for row in rows)
        metric("episode/overflow", overflows / count, count)
        rewards = [row.total_reward for row in rows if row.is_last]
        _report_mean(self._session, "episode/reward", rewards)

    def _report_decoding(self, counts: Counts) -> None:
        if counts.slots:
            idle = 1.0 - counts.rows / counts.slots
            self._session.metric("generate/slot_idle", idle, counts.slots)
        if counts.again and self._tokens:
            again = counts.again / self._tokens
            self._session.metric("generate/recomputed", again, self._tokens)


def _report_mean(session: Session, name: str, numbers: Iterable[float | None]) -> None:
    known = [number for number in numbers if number is not None]
    if known:
        session.metric(name, sum(known) / len(known), len(known))
