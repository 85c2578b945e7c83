"""Episodes of chunks on their way: they begin, are played, go on in another row, or begin again.

    pace     episodes begin                              go on in another row, or begin again
    rounds   all together                                together, when the others are over
    free     group by group, as slots come near          at once

Owns: which episodes begin when, attempts, and what becomes of each row that is over. Does not own:
turns (episode_pass.py), how an environment's reset becomes a prompt (episode_starts.py), what is
lost (episode_policy.py), which rows leave together (episode_chunk.py).

Environments are alive from their reset on. In rounds those of all episodes are needed in the first
round. With pace free a group begins when so many rows write or wait for a slot that those that are
reset now are the next ones; further chunks join those that are there, and begin after them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dataflow.batch import Keys, Ragged
from dataflow.kernel import Session
from operators.kernels.decoding import Counts, DecodeTask
from operators.kernels.environments.replies import (
    EnvironmentFault,
    EnvironmentPool,
    EnvironmentReply,
)
from operators.kernels.episode_chunk import EpisodeChunk
from operators.kernels.episode_metrics import LoopCounts
from operators.kernels.episode_pass import EpisodePass, EpisodeRules
from operators.kernels.episode_policy import EpisodePolicy
from operators.kernels.episode_segments import Segments
from operators.kernels.episode_starts import EpisodeStarts
from operators.kernels.episodes import EpisodeStart, EpisodeState, RowOutcome
from operators.kernels.text import to_ragged
from operators.kernels.turn_loop import TurnLoop

WAIT = "environments"
"""What a wait for environments is called in a run's records."""

Place = tuple[EpisodeChunk, int]
"""An episode of a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowParts:
    """What a kernel plays episodes with. slots: rows that are live at once. make_task: of prompts,
    the rows of each, int64 [prompts], and the keys of the rows. make_loop: one of such a task.
    """

    starts: EpisodeStarts
    pool: EnvironmentPool
    segments: Segments
    rules: EpisodeRules
    policy: EpisodePolicy
    session: Session
    slots: int
    make_task: Callable[[Ragged, np.ndarray, Keys], DecodeTask]
    make_loop: Callable[[DecodeTask], TurnLoop]


@dataclass(slots=True, kw_only=True, eq=False)
class _Beginning:
    """Episodes of one group whose environments are reset. first: the number of the first one."""

    chunk: EpisodeChunk
    episodes: Sequence[int]
    first: int
    replies: dict[int, EnvironmentReply] = field(default_factory=dict)

    @property
    def is_reset(self) -> bool:
        return len(self.replies) == len(self.episodes)


class EpisodeFlow:
    """Plays the episodes of one run's chunks; `play` drives it. first: the number of its first
    episode.
    """

    def __init__(self, parts: FlowParts, first: int) -> None:
        self.next_number = first
        """Of the next episode that begins."""
        self._parts = parts
        self._pass: EpisodePass | None = None
        self._counts = LoopCounts()
        self._unbegun: deque[tuple[EpisodeChunk, list[int]]] = deque()
        """Groups, or episodes that begin again, in the order in which they begin."""
        self._beginnings: dict[int, _Beginning] = {}
        """By the number of each episode that is being reset."""
        self._ready: list[_Beginning] = []
        self._starts: list[tuple[Place, EpisodeStart]] = []
        """Rows that are to begin."""
        self._faults: list[tuple[Place, EnvironmentFault]] = []
        """Episodes that came to nothing, and have not begun again or been lost yet."""
        self._places: dict[int, Place] = {}
        """Of the numbers of all episodes whose environments are alive."""

    @property
    def loop(self) -> TurnLoop | None:
        """The loop of the episodes that are open, if there are some."""
        return self._pass.loop if self._pass is not None and self._count_open() else None

    def add(self, chunk: EpisodeChunk) -> None:
        """Play the episodes of this chunk as well."""
        self._unbegun += [(chunk, episodes) for episodes in chunk.list_groups()]

    def take_counts(self) -> Counts:
        """What the loops counted since the last call."""
        return self._counts.take()

    def play(self, interrupted: Callable[[], bool]) -> Iterator[bool]:
        """Play until all episodes of all chunks are over. Yields after each step of the loop and
        each wait, and before one where it was interrupted, which is true then.
        """
        while self._unbegun or self._places or self._faults:
            self._begin()
            if interrupted():
                yield True
            self._move()
            self._settle()
            yield False

    def close(self) -> None:
        """Give up the episodes that are not over, and their environments."""
        for number in self._places:
            self._parts.pool.abandon(number)
        self._places.clear()
        if self._pass is not None:
            self._pass.loop.close()
            self._pass = None
        self._parts.session.flight(0)

    # Episodes begin.

    def _begin(self) -> None:
        """Give rows to episodes whose environments are reset, and reset further ones."""
        in_rounds = self._parts.rules.rounds
        if in_rounds and self._count_open():
            return
        if not in_rounds or not (self._unbegun or self._beginnings):
            for beginning in self._ready:
                self._make_starts(beginning)
            self._ready.clear()
            self._begin_rows()
        while self._unbegun and self._is_near():
            self._reset(*self._unbegun.popleft())

    def _is_near(self) -> bool:
        """Whether the next group is to be reset: with pace free while those that write, wait or are
        reset are less than the slots and half as many, which have time to reset meanwhile.
        """
        if self._parts.rules.rounds:
            return True
        coming = len(self._beginnings) + len(self._starts)
        if self._pass is not None:
            coming += self._pass.writing_count
        return coming < self._parts.slots + max(1, self._parts.slots // 2)

    def _reset(self, chunk: EpisodeChunk, episodes: list[int]) -> None:
        """Reset an environment for each of these episodes of one group."""
        if chunk.is_lost(episodes[0]):
            for episode in episodes:
                chunk.close(episode)
            return
        beginning = _Beginning(chunk=chunk, episodes=episodes, first=self.next_number)
        chunk.metrics.count_attempts(len(episodes))
        for episode in episodes:
            chunk.attempts[episode] += 1
            self._places[self.next_number] = (chunk, episode)
            self._beginnings[self.next_number] = beginning
            self.next_number += 1
        self._parts.starts.reset(chunk, episodes, beginning.first)

    def _make_starts(self, beginning: _Beginning) -> None:
        """Make rows' starts of what was reset, and faults."""
        chunk = beginning.chunk
        replies = {episode: beginning.replies[episode] for episode in beginning.episodes}
        starts, faults = self._parts.starts.begin(chunk, replies)
        for episode, start in starts.items():
            self._starts.append(((chunk, episode), start))
        for episode, fault in faults.items():
            chunk.metrics.count_fault(fault)
            self._faults.append(((chunk, episode), fault))
        for number, episode in enumerate(beginning.episodes, beginning.first):
            if episode not in starts:
                del self._places[number]
                if episode not in faults:
                    chunk.close(episode)

    def _begin_rows(self) -> None:
        """Give all rows that are to begin one in the loop: in a new one where no episode is open,
        so that what it writes depends on no other.
        """
        starts, self._starts = self._take_starts(), []
        if not starts:
            return
        episodes = [start.begin(self._parts.rules.budget) for _, start in starts]
        task = self._make_task([place for place, _ in starts], episodes)
        if self._pass is None or not self._pass.open_count:
            rows = np.arange(len(episodes))
            self._pass = self._make_pass(task)
        else:
            rows = self._pass.loop.join(task)
        for episode, row in zip(episodes, rows.tolist(), strict=True):
            episode.row = row
        self._pass.add(episodes)
        self._parts.session.flight(self._count_open())

    def _take_starts(self) -> list[tuple[Place, EpisodeStart]]:
        """Those of groups that are not given up, in rounds in the order of the chunk."""
        starts: list[tuple[Place, EpisodeStart]] = []
        for (chunk, episode), start in self._starts:
            if not chunk.is_lost(episode):
                starts.append(((chunk, episode), start))
                continue
            del self._places[start.number]
            self._parts.pool.abandon(start.number)
            chunk.close(episode)
        if self._parts.rules.rounds:
            starts.sort(key=lambda start: start[0][0].rank_of(start[0][1]))
        return starts

    def _make_task(self, places: Sequence[Place], episodes: Sequence[EpisodeState]) -> DecodeTask:
        """The rows of these episodes; those next to each other with one prompt share it."""
        prompts: list[list[int]] = []
        counts: list[int] = []
        keys: list[Keys] = []
        for (chunk, index), episode in zip(places, episodes, strict=True):
            ids = episode.prompt.tolist()
            if not prompts or prompts[-1] != ids:
                prompts.append(ids)
                counts.append(0)
            counts[-1] += 1
            keys.append(chunk.keys_of_rows([index], [episode.segment]))
        return self._parts.make_task(
            to_ragged(prompts), np.array(counts, np.int64), Keys.concat(keys)
        )

    def _make_pass(self, task: DecodeTask) -> EpisodePass:
        parts = self._parts
        if self._pass is not None:
            self._pass.loop.close()
        loop = parts.make_loop(task)
        self._counts.watch(loop.counts)
        return EpisodePass(loop, parts.pool, parts.segments, parts.rules)

    # They are played.

    def _move(self) -> None:
        """Write a token of each live row, or wait for environments where there is none. The pool is
        looked at in any case: it sends, reads and ends calls that are late only when it is.
        """
        playing = self._pass
        if playing is not None and not playing.loop.is_idle:
            playing.step()
            if self._beginnings or not playing.is_answered:
                self._hear(0.0)
        elif self._beginnings or (playing is not None and not playing.is_answered):
            seconds = None if playing is None else playing.compute_seconds_left()
            with self._parts.session.waiting(WAIT):
                self._hear(seconds)
        if playing is not None and self._may_take(playing):
            playing.take_replies()

    def _may_take(self, playing: EpisodePass) -> bool:
        """Whether what environments answered is taken now."""
        if not self._parts.rules.rounds:
            return True
        return playing.loop.is_idle and playing.is_answered

    def _hear(self, seconds: float | None) -> None:
        """Wait for replies at most so long."""
        replies = self._parts.pool.wait(seconds)
        answers: list[EnvironmentReply] = []
        for reply in replies:
            if reply.call != "reset":
                answers.append(reply)
                continue
            beginning = self._beginnings.pop(reply.episode)
            episode = beginning.episodes[reply.episode - beginning.first]
            beginning.replies[episode] = reply
            if beginning.is_reset:
                self._ready.append(beginning)
        if self._pass is not None:
            self._pass.hear(answers)

    # They are over.

    def _settle(self) -> None:
        """See what came of rows that are over, and of episodes that came to nothing."""
        outcomes: list[RowOutcome] = []
        if self._pass is not None:
            outcomes = self._pass.pop_outcomes()
        for outcome in outcomes:
            self._note_outcome(outcome)
        if outcomes:
            self._parts.session.flight(self._count_open())
        if self._faults and not (self._parts.rules.rounds and self._count_open()):
            self._settle_faults()

    def _note_outcome(self, outcome: RowOutcome) -> None:
        number = outcome.episode.number
        chunk, episode = place = self._places[number]
        chunk.metrics.count_row(outcome)
        if outcome.going_on is not None:
            self._starts.append((place, outcome.going_on))
            return
        del self._places[number]
        if outcome.fault is not None:
            self._faults.append((place, outcome.fault))
        elif outcome.row is not None:
            self._parts.policy.take(chunk, episode, outcome.row)

    def _settle_faults(self) -> None:
        """Begin failed episodes again, before others, or lose them."""
        policy = self._parts.policy
        faults, self._faults = self._faults, []
        again: list[Place] = []
        for (chunk, episode), fault in sorted(faults, key=lambda each: each[0][1]):
            if policy.begins_again(chunk, episode):
                again.append((chunk, episode))
            else:
                policy.lose(chunk, episode, fault)
        for chunk, episode in reversed(again):
            self._unbegun.appendleft((chunk, [episode]))

    def _count_open(self) -> int:
        return 0 if self._pass is None else self._pass.open_count
