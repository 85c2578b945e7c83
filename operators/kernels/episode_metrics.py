"""The metrics of a chunk's episodes.

Owns: their names and numbers. Does not own: what is counted (episode_pass.py, the decode loops).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from dataflow.kernel import Session
from operators.kernels.decoding import Counts
from operators.kernels.environments.replies import EnvironmentFault
from operators.kernels.episode_pass import EpisodeCounts, EpisodePass
from operators.kernels.episodes import EpisodeRow
from operators.kernels.turn_loop import TurnLoop


@dataclass(frozen=True, slots=True)
class _PassCounts:
    """What a pass and its loop count, without these: they hold keys. lengths: of the rows."""

    episodes: EpisodeCounts
    faults: Mapping[int, EnvironmentFault]
    decoding: Counts
    lengths: np.ndarray


class EpisodeMetrics:
    """Counts over all attempts of a chunk; `report` says them, once."""

    def __init__(self, session: Session, *, has_segments: bool = False) -> None:
        self._session = session
        self._has_segments = has_segments
        self._passes: list[_PassCounts] = []
        self._attempts = 0
        self._faults: list[EnvironmentFault] = []

    def watch(self, episode_pass: EpisodePass, loop: TurnLoop) -> None:
        """Count what this pass counts, also what it has not counted yet."""
        counts = _PassCounts(
            episode_pass.counts, episode_pass.faults, loop.counts, loop.written.length
        )
        self._passes.append(counts)

    def count_attempts(self, attempts: int) -> None:
        """Count episodes that are begun."""
        self._attempts += attempts

    def count_faults(self, faults: Iterable[EnvironmentFault]) -> None:
        """Count episodes that did not begin."""
        self._faults += faults

    def report(self, rows: Collection[EpisodeRow]) -> None:
        """Report all of them. rows: all rows of the chunk's episodes that are over."""
        session = self._session
        faults = list(self._faults)
        for counts in self._passes:
            faults += counts.faults.values()
        if self._attempts:
            timeouts = sum(fault.kind == "timeout" for fault in faults)
            errors = len(faults) - timeouts
            session.metric("env/timeouts", timeouts)
            session.metric("env/errors", errors)
        self._report_rows(rows)
        self._report_passes()

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
        known_rewards = [reward for reward in rewards if reward is not None]
        if known_rewards:
            mean = sum(known_rewards) / len(known_rewards)
            metric("episode/reward", mean, len(known_rewards))

    def _report_passes(self) -> None:
        counts = [each.episodes for each in self._passes]
        steps = _total(each.steps for each in counts)
        if steps:
            seconds = _total(each.step_seconds for each in counts)
            self._session.metric("env/step/seconds", seconds / steps, steps)
        loops = [each.decoding for each in self._passes]
        slots = _total(each.slots for each in loops)
        if slots:
            idle = 1.0 - _total(each.rows for each in loops) / slots
            self._session.metric("generate/slot_idle", idle, slots)
        again = _total(each.again for each in loops)
        tokens = _total(int(each.lengths.sum()) for each in self._passes)
        if again and tokens:
            self._session.metric("generate/recomputed", again / tokens, tokens)


def _total(numbers: Iterable[float]) -> float:
    return sum(numbers)
