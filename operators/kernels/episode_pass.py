"""A pass over some episodes: the model and the environments in turn, until each episode is over.

    waits for                                    unblocked by
    a turn of the model                          the decode loop's steps
    an environment's answer                      its process, or its time limit
    (pace rounds) the answers of all of a round  the last of them

Owns: who is asked what, when an episode ends, and its tokens. Does not own: an episode's state
(episodes.py), which rows leave together (interacting.py), processes (environments/), how turns are
rendered (turn_rendering.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflow.errors import DataError
from dataflow.kernel import Session
from dataflow.prompt_types import Message
from operators.kernels.environments.replies import (
    EnvironmentFault,
    EnvironmentPool,
    EnvironmentReply,
)
from operators.kernels.episode_segments import Segments
from operators.kernels.episodes import (
    EpisodeRow,
    EpisodeStart,
    EpisodeState,
    EpisodeTurn,
    Finish,
    TokenBudget,
)
from operators.kernels.turn_loop import TurnLoop

NO_ROWS = np.zeros(0, np.int64)

WAIT = "environments"
"""What a wait for environments is called in a run's records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """When an episode ends. timeout: seconds. rounds: whether all environments answer before the
    model goes on.
    """

    max_turns: int
    budget: TokenBudget
    timeout: float
    rounds: bool


@dataclass(slots=True)
class EpisodeCounts:
    """What a pass has counted: calls of `step` that were answered, and their seconds."""

    steps: int = 0
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _RowAnswer:
    """What a row is to go on with."""

    row: int
    episode: EpisodeState
    reply: EnvironmentReply


class EpisodePass:
    """Runs episodes whose environments are reset; `write_rows` drives it.

    episodes: by the row of the loop; the loop has no other rows. rows: of each that is over;
    going_on: what others go on with in a row of another pass; faults: why others came to nothing.
    """

    def __init__(
        self,
        episodes: Mapping[int, EpisodeState],
        loop: TurnLoop,
        pool: EnvironmentPool,
        segments: Segments,
        rules: EpisodeRules,
        session: Session,
    ) -> None:
        self.rows: dict[int, EpisodeRow] = {}
        self.going_on: dict[int, EpisodeStart] = {}
        self.faults: dict[int, EnvironmentFault] = {}
        self.counts = EpisodeCounts()
        self._episodes = dict(episodes)
        self._loop = loop
        self._pool = pool
        self._segments = segments
        self._renderer = segments.renderer
        self._rules = rules
        self._session = session
        self._open = set(episodes)
        self._over: list[int] = []
        """Rows that are no longer open, and were not yielded yet."""
        self._unbegun = np.array(sorted(episodes), np.int64)
        """Rows without a token."""
        self._row_of = {episode.number: row for row, episode in episodes.items()}
        self._asked: set[int] = set()
        """Rows whose environment has not answered yet."""
        self._replies: list[EnvironmentReply] = []
        """What came and was not taken yet: in rounds, until the last one of a round is there."""
        session.flight(len(episodes))
        for row, episode in episodes.items():
            loop.written.limit[row] = rules.budget.turn_limit(0, episode.limit)

    def write_rows(self, interrupted: Callable[[], bool]) -> Iterator[np.ndarray]:
        """Run all episodes; yields the rows of the loop that are over, or none at all after an
        interruption, as the decode loops of `generate` do.
        """
        while self._open:
            if interrupted():
                yield NO_ROWS
            if self._loop.is_idle:
                assert self._asked or self._replies, "nobody writes and nobody answers"
                yield from self._await_replies(interrupted)
                self._take_replies()
            else:
                self._step()
            if self._over:
                self._session.flight(len(self._open))
                over, self._over = self._over, []
                yield np.array(sorted(over), np.int64)

    def abandon(self) -> None:
        """Give up the episodes that are open, and their environments."""
        for row in self._open:
            self._pool.abandon(self._episodes[row].number)
        self._open.clear()
        self._session.flight(0)

    def _step(self) -> None:
        """Write a token of each live row. The pool is looked at as well: it sends, reads and ends
        calls that are late only when it is.
        """
        begun_at = time.monotonic()
        ended_rows = self._loop.step()
        if len(self._unbegun):
            self._begin_clocks(begun_at)
        if len(ended_rows):
            self._end_turns(ended_rows.tolist())
        if self._asked:
            self._hear(0.0)
            if not self._rules.rounds:
                self._take_replies()

    def _begin_clocks(self, begun_at: float) -> None:
        """The time of an episode begins when it has a slot, not while it waits for one."""
        has_begun = self._loop.written.length[self._unbegun] > 0
        for row in self._unbegun[has_begun].tolist():
            episode = self._episodes[row]
            episode.turn_began = begun_at
            episode.deadline = begun_at + min(episode.seconds_left, self._rules.timeout)
        self._unbegun = self._unbegun[~has_begun]

    # The model has written a turn.

    def _end_turns(self, rows: Sequence[int]) -> None:
        """Read the turns of all rows that ended with a token in one call, then end each."""
        written = self._loop.written
        ids: list[np.ndarray] = []
        tools: list[Sequence[Mapping[str, Any]]] = []
        for row in rows:
            ids.append(written.tokens[row, written.begin[row] : written.length[row]])
            tools.append(self._episodes[row].tools)
        # All prompts of a data set are of one kind.
        raw = self._episodes[rows[0]].raw
        messages = self._renderer.parse_all(ids, raw=raw, tools=tools)
        for row, message in zip(rows, messages, strict=True):
            self._end_turn(row, self._episodes[row], message)

    def _end_turn(self, row: int, episode: EpisodeState, message: Message) -> None:
        """Show the turn to the environment, unless the episode ends with it."""
        written = self._loop.written
        begin, end = int(written.begin[row]), int(written.length[row])
        now = time.monotonic()
        turn = EpisodeTurn(
            begin=begin, end=end, message=message, model_seconds=now - episode.turn_began
        )
        episode.turns.append(turn)
        episode.messages.append(message)
        if end >= episode.limit and not written.stop[row]:
            self._finish(row, episode, "length")
        elif now >= episode.deadline:
            self._finish(row, episode, "timeout")
        else:
            self._pool.step(episode.number, message)
            self._asked.add(row)

    def _finish(self, row: int, episode: EpisodeState, reason: Finish) -> None:
        """End an episode: nothing more is written, and its environment is told why."""
        self._end_row(row, episode, reason)
        self._pool.finish(episode.number, reason)
        self._asked.add(row)

    def _end_row(self, row: int, episode: EpisodeState, reason: Finish) -> None:
        episode.finish = reason
        self.rows[row] = episode.copy_row(self._loop.written, row)
        self._loop.drop(np.array([row]))

    def _close(self, row: int) -> None:
        """An episode is over, in whichever way."""
        self._open.discard(row)
        self._over.append(row)

    # Environments answer.

    def _await_replies(self, interrupted: Callable[[], bool]) -> Iterator[np.ndarray]:
        """Wait for replies while nothing can be written: in rounds for all of them. Yields no rows
        after an interruption.
        """
        while self._asked:
            if interrupted():
                yield NO_ROWS
            with self._session.waiting(WAIT):
                self._hear(self._seconds_left())
            if self._replies and not self._rules.rounds:
                break

    def _hear(self, seconds: float | None) -> None:
        """Wait for replies at most so long, then end the episodes that are out of time."""
        replies = self._pool.wait(seconds)
        for reply in replies:
            self._asked.discard(self._row_of[reply.episode])
        self._replies += replies
        self._end_overdue()

    def _seconds_left(self) -> float | None:
        """Until the first of the episodes whose environments step is out of time; None where none
        does. `finish` has the pool's time alone.
        """
        stepping = [self._episodes[row] for row in self._asked]
        deadlines = [episode.deadline for episode in stepping if episode.finish is None]
        if not deadlines:
            return None
        return max(0.0, min(deadlines) - time.monotonic())

    def _end_overdue(self) -> None:
        """End the episodes that are out of time although their environments have not answered:
        what these still answer is not waited for.
        """
        now = time.monotonic()
        for row in sorted(self._asked):
            episode = self._episodes[row]
            if episode.finish is None and now >= episode.deadline:
                self._asked.discard(row)
                self._pool.abandon(episode.number, "timeout")
                self._end_row(row, episode, "timeout")
                self._close(row)

    def _take_replies(self) -> None:
        """Take all replies, in the order of their rows."""
        replies, self._replies = self._replies, []
        answers: list[_RowAnswer] = []
        for reply in sorted(replies, key=lambda each: self._row_of[each.episode]):
            row = self._row_of[reply.episode]
            episode = self._episodes[row]
            if reply.fault is not None:
                self._lose(row, episode, reply.fault)
            elif reply.call == "finish":
                episode.final_reward = reply.reward
                episode.state = reply.state
                self._close(row)
            elif self._note_answer(row, episode, reply):
                answers.append(_RowAnswer(row, episode, reply))
        if answers:
            self._go_on(answers)

    def _lose(self, row: int, episode: EpisodeState, fault: EnvironmentFault) -> None:
        self.faults[row] = fault
        self._close(row)
        if episode.finish is None:
            self._loop.drop(np.array([row]))
        else:
            del self.rows[row]

    def _note_answer(self, row: int, episode: EpisodeState, reply: EnvironmentReply) -> bool:
        """Note what the environment answered; returns whether the episode goes on with it."""
        turn = episode.turns[-1]
        turn.reward, turn.environment_seconds = reply.reward, reply.seconds
        self.counts.steps += 1
        self.counts.step_seconds += reply.seconds
        episode.messages += reply.messages
        if reply.done:
            self._finish(row, episode, "stop")
        elif episode.turn_count >= self._rules.max_turns:
            self._finish(row, episode, "turns")
        elif time.monotonic() >= episode.deadline:
            self._finish(row, episode, "timeout")
        return episode.finish is None

    def _go_on(self, answers: Sequence[_RowAnswer]) -> None:
        """Append answers to their rows; what does not fit ends its row."""
        rows: list[int] = []
        ids: list[np.ndarray] = []
        limits: list[int] = []
        appended: list[_RowAnswer] = []
        for answer in answers:
            if self._segments.must_begin(answer.reply.messages):
                self._leave_row(answer.row, answer.episode, overflowed=False, ends=True)
            else:
                appended.append(answer)
        for answer, rendered in zip(appended, self._render(appended), strict=True):
            row, episode = answer.row, answer.episode
            if isinstance(rendered, EnvironmentFault):
                self._fail(row, episode, rendered)
                continue
            length = episode.turns[-1].end + len(rendered)
            limit = self._rules.budget.turn_limit(length, episode.limit)
            if limit - length < self._segments.least:
                ends = limit <= length
                if self._leave_row(row, episode, overflowed=True, ends=ends):
                    continue
            episode.turn_began = time.monotonic()
            rows.append(row)
            ids.append(rendered)
            limits.append(limit)
        if rows:
            self._loop.extend(np.array(rows, np.int64), ids, np.array(limits, np.int32))

    def _leave_row(self, row: int, episode: EpisodeState, *, overflowed: bool, ends: bool) -> bool:
        """Let an episode go on in another row, if it can; returns whether it has left this one.

        overflowed: whether that is for want of room. ends: whether the episode is over if it
        cannot.
        """
        start = self._segments.start(episode, overflowed=overflowed)
        if isinstance(start, EnvironmentFault):
            self._fail(row, episode, start)
        elif start is not None:
            self._end_row(row, episode, "segment")
            start.before = self.rows.pop(row)
            start.seconds_left = max(0.0, episode.deadline - time.monotonic())
            self.going_on[row] = start
            self._close(row)
        elif ends:
            episode.overflowed = True
            self._finish(row, episode, "length")
        else:
            return False
        return True

    def _fail(self, row: int, episode: EpisodeState, fault: EnvironmentFault) -> None:
        """Lose an episode whose environment is as it should be: it is told `error`."""
        self._pool.abandon(episode.number, "error")
        self._lose(row, episode, fault)

    def _render(self, answers: Sequence[_RowAnswer]) -> list[np.ndarray | EnvironmentFault]:
        """The ids of each answer, or why there are none."""
        if not answers:
            return []
        try:
            parts = self._render_together(answers)
        except DataError as error:
            if len(answers) == 1:
                text = f"answered what cannot be appended: {error}"
                return [EnvironmentFault(kind="answer", text=text)]
            # One that cannot be appended is the end of its own episode alone.
            rendered: list[np.ndarray | EnvironmentFault] = []
            for answer in answers:
                rendered += self._render([answer])
            return rendered
        together = zip(answers, parts, strict=True)
        return [ids if len(ids) else refuse_answer(answer.reply) for answer, ids in together]

    def _render_together(self, answers: Sequence[_RowAnswer]) -> list[np.ndarray]:
        written = self._loop.written
        turns = [answer.episode.turns[-1] for answer in answers]
        spans = zip(answers, turns, strict=True)
        return self._renderer.between_all(
            [written.tokens[answer.row, turn.begin : turn.end] for answer, turn in spans],
            [answer.reply.messages for answer in answers],
            raw=answers[0].episode.raw,
            turns=[turn.message for turn in turns],
        )


def refuse_answer(reply: EnvironmentReply) -> EnvironmentFault:
    """The fault of an answer without a token: there is none, or the tokenizer knows nothing of
    it.
    """
    contents = "".join(str(message.get("content", "")) for message in reply.messages)
    shown_answer = "nothing"
    if contents:
        shown_answer = f"{contents!r:.80}, of which the tokenizer makes no token"
    text = f"answered {shown_answer}, and the episode is not over"
    return EnvironmentFault(kind="answer", text=text)
