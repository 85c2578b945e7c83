"""A pass over episodes: the model and the environments in turn, until each episode's row is over.

    waits for                                    unblocked by
    a turn of the model                          the decode loop's steps
    an environment's answer                      its process, or its time limit
    (pace rounds) the answers of all of a round  the last of them

Owns: who is asked what, when an episode ends, and its tokens. Does not own: an episode's state
(episodes.py), which episodes begin and what becomes of those that are over (episode_flow.py),
processes (environments/), how turns are rendered (turn_rendering.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflow.errors import DataError
from dataflow.prompt_types import Message
from operators.kernels.environments.replies import (
    EnvironmentFault,
    EnvironmentPool,
    EnvironmentReply,
)
from operators.kernels.episode_segments import Segments
from operators.kernels.episodes import (
    EpisodeRow,
    EpisodeState,
    EpisodeTurn,
    Finish,
    RowOutcome,
    TokenBudget,
)
from operators.kernels.turn_loop import TurnLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """When an episode ends. timeout: seconds. rounds: whether all environments answer before the
    model goes on.
    """

    max_turns: int
    budget: TokenBudget
    timeout: float
    rounds: bool


@dataclass(frozen=True, slots=True)
class _RowAnswer:
    """What a row is to go on with."""

    episode: EpisodeState
    reply: EnvironmentReply


class EpisodePass:
    """Runs episodes whose environments are reset, each in one row of a decode loop that has no
    other rows. Episodes are known by their numbers, as a row's may be given to another one.
    """

    def __init__(
        self, loop: TurnLoop, pool: EnvironmentPool, segments: Segments, rules: EpisodeRules
    ) -> None:
        self.loop = loop
        self._pool = pool
        self._segments = segments
        self._renderer = segments.renderer
        self._rules = rules
        self._open: dict[int, EpisodeState] = {}
        self._by_row: dict[int, EpisodeState] = {}
        """Those whose rows the loop still has."""
        self._unbegun: list[EpisodeState] = []
        """Without a token."""
        self._asked: set[int] = set()
        """Those whose environment has not answered yet."""
        self._replies: list[EnvironmentReply] = []
        """What came and was not taken yet: in rounds, until the last one of a round is there."""
        self._ended: dict[int, EpisodeRow] = {}
        """Rows of episodes whose environments have not answered to `finish` yet."""
        self._outcomes: list[RowOutcome] = []
        """Of rows that are no longer open, and were not popped yet."""

    @property
    def open_count(self) -> int:
        """How many episodes are not over."""
        return len(self._open)

    @property
    def writing_count(self) -> int:
        """How many of them the model writes, or will as soon as there is a slot."""
        return len(self._open) - len(self._asked) - len(self._replies)

    @property
    def is_answered(self) -> bool:
        """Whether no environment is asked."""
        return not self._asked

    def add(self, episodes: Sequence[EpisodeState]) -> None:
        """Run these as well, whose rows the loop has got."""
        for episode in episodes:
            self._open[episode.number] = self._by_row[episode.row] = episode
            limit = self._rules.budget.turn_limit(0, episode.limit)
            self.loop.written.limit[episode.row] = limit
        self._unbegun += episodes

    def pop_outcomes(self) -> list[RowOutcome]:
        """What came of the rows that were over since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def step(self) -> None:
        """Write a token of each live row."""
        begun_at = time.monotonic()
        ended_rows = self.loop.step()
        if self._unbegun:
            self._begin_clocks(begun_at)
        if len(ended_rows):
            self._end_turns(ended_rows)

    def _begin_clocks(self, begun_at: float) -> None:
        """The time of an episode begins when it has a slot, not while it waits for one."""
        rows = np.array([episode.row for episode in self._unbegun], np.int64)
        lengths = self.loop.written.length[rows].tolist()
        unbegun: list[EpisodeState] = []
        for episode, length in zip(self._unbegun, lengths, strict=True):
            if not length:
                unbegun.append(episode)
                continue
            episode.turn_began = begun_at
            episode.deadline = begun_at + min(episode.seconds_left, self._rules.timeout)
        self._unbegun = unbegun

    # The model has written a turn.

    def _end_turns(self, rows: np.ndarray) -> None:
        """Read the turns of all rows that ended with a token in one call, then end each."""
        written = self.loop.written
        episodes = [self._by_row[row] for row in rows.tolist()]
        ids: list[np.ndarray] = []
        tools: list[Sequence[Mapping[str, Any]]] = []
        for episode in episodes:
            row = episode.row
            ids.append(written.tokens[row, written.begin[row] : written.length[row]])
            tools.append(episode.tools)
        # All prompts of a data set are of one kind.
        raw = episodes[0].raw
        messages = self._renderer.parse_all(ids, raw=raw, tools=tools)
        for episode, message in zip(episodes, messages, strict=True):
            self._end_turn(episode, message)

    def _end_turn(self, episode: EpisodeState, message: Message) -> None:
        """Show the turn to the environment, unless the episode ends with it."""
        written, row = self.loop.written, episode.row
        begin, end = int(written.begin[row]), int(written.length[row])
        now = time.monotonic()
        turn = EpisodeTurn(
            begin=begin, end=end, message=message, model_seconds=now - episode.turn_began
        )
        episode.turns.append(turn)
        episode.messages.append(message)
        if end >= episode.limit and not written.stop[row]:
            self._finish(episode, "length")
        elif now >= episode.deadline:
            self._finish(episode, "timeout")
        else:
            self._pool.step(episode.number, message)
            self._asked.add(episode.number)

    def _finish(self, episode: EpisodeState, reason: Finish) -> None:
        """End an episode: nothing more is written, and its environment is told why."""
        self._ended[episode.number] = self._end_row(episode, reason)
        self._pool.finish(episode.number, reason)
        self._asked.add(episode.number)

    def _end_row(self, episode: EpisodeState, reason: Finish) -> EpisodeRow:
        episode.finish = reason
        row = episode.copy_row(self.loop.written)
        self._drop(episode)
        return row

    def _drop(self, episode: EpisodeState) -> None:
        """Nothing more is written to its row, which the loop may give to another episode."""
        row, episode.row = episode.row, -1
        del self._by_row[row]
        self.loop.drop(np.array([row]))

    # Environments answer.

    def hear(self, replies: Sequence[EnvironmentReply]) -> None:
        """Note replies, to be taken later, and end the episodes that are out of time although their
        environments have not answered: what these still answer is not waited for.
        """
        for reply in replies:
            self._asked.discard(reply.episode)
        self._replies += replies
        now = time.monotonic()
        for number in sorted(self._asked):
            episode = self._open[number]
            if episode.finish is None and now >= episode.deadline:
                self._asked.discard(number)
                self._pool.abandon(number, "timeout")
                row = self._end_row(episode, "timeout")
                self._close(RowOutcome(episode=episode, row=row))

    def compute_seconds_left(self) -> float | None:
        """Until the first of the episodes whose environments step is out of time; None where none
        does. `finish` has the pool's time alone.
        """
        stepping = [self._open[number] for number in self._asked]
        deadlines = [episode.deadline for episode in stepping if episode.finish is None]
        if not deadlines:
            return None
        return max(0.0, min(deadlines) - time.monotonic())

    def take_replies(self) -> None:
        """Take all replies, in the order of their episodes: rows go on in the order in which the
        loop is told, which in rounds is not to depend on who answered first.
        """
        replies, self._replies = self._replies, []
        answers: list[_RowAnswer] = []
        for reply in sorted(replies, key=lambda each: each.episode):
            episode = self._open[reply.episode]
            if reply.fault is not None:
                self._lose(episode, reply.fault)
            elif reply.call == "finish":
                episode.final_reward = reply.reward
                episode.state = reply.state
                row = self._ended.pop(episode.number)
                self._close(RowOutcome(episode=episode, row=row))
            elif self._note_answer(episode, reply):
                answers.append(_RowAnswer(episode, reply))
        if answers:
            self._go_on(answers)

    def _close(self, outcome: RowOutcome) -> None:
        """An episode's row is over, in whichever way."""
        del self._open[outcome.episode.number]
        self._outcomes.append(outcome)

    def _lose(self, episode: EpisodeState, fault: EnvironmentFault) -> None:
        if episode.finish is None:
            self._drop(episode)
        self._ended.pop(episode.number, None)
        self._close(RowOutcome(episode=episode, fault=fault))

    def _note_answer(self, episode: EpisodeState, reply: EnvironmentReply) -> bool:
        """Note what the environment answered; returns whether the episode goes on with it."""
        turn = episode.turns[-1]
        turn.reward, turn.environment_seconds = reply.reward, reply.seconds
        episode.answers += 1
        episode.messages += reply.messages
        if reply.done:
            self._finish(episode, "stop")
        elif episode.turn_count >= self._rules.max_turns:
            self._finish(episode, "turns")
        elif time.monotonic() >= episode.deadline:
            self._finish(episode, "timeout")
        return episode.finish is None

    def _go_on(self, answers: Sequence[_RowAnswer]) -> None:
        """Append answers to their rows; what does not fit ends its row."""
        rows: list[int] = []
        ids: list[np.ndarray] = []
        limits: list[int] = []
        appended: list[_RowAnswer] = []
        for answer in answers:
            if self._segments.must_begin(answer.reply.messages):
                self._leave_row(answer.episode, overflowed=False, ends=True)
            else:
                appended.append(answer)
        for answer, rendered in zip(appended, self._render(appended), strict=True):
            episode = answer.episode
            if isinstance(rendered, EnvironmentFault):
                self._fail(episode, rendered)
                continue
            length = episode.length + len(rendered)
            limit = self._rules.budget.turn_limit(length, episode.limit)
            if limit - length < self._segments.least:
                ends = limit <= length
                if self._leave_row(episode, overflowed=True, ends=ends):
                    continue
            episode.turn_began = time.monotonic()
            rows.append(episode.row)
            ids.append(rendered)
            limits.append(limit)
        if rows:
            self.loop.extend(np.array(rows, np.int64), ids, np.array(limits, np.int32))

    def _leave_row(self, episode: EpisodeState, *, overflowed: bool, ends: bool) -> bool:
        """Let an episode go on in another row, if it can; returns whether it has left this one.

        overflowed: whether that is for want of room. ends: whether the episode is over if it
        cannot.
        """
        start = self._segments.start(episode, overflowed=overflowed)
        if isinstance(start, EnvironmentFault):
            self._fail(episode, start)
        elif start is not None:
            start.before = self._end_row(episode, "segment")
            start.seconds_left = max(0.0, episode.deadline - time.monotonic())
            self._close(RowOutcome(episode=episode, going_on=start))
        elif ends:
            episode.overflowed = True
            self._finish(episode, "length")
        else:
            return False
        return True

    def _fail(self, episode: EpisodeState, fault: EnvironmentFault) -> None:
        """Lose an episode whose environment is as it should be: it is told `error`."""
        self._pool.abandon(episode.number, "error")
        self._lose(episode, fault)

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
        tokens = self.loop.written.tokens
        turns = [answer.episode.turns[-1] for answer in answers]
        spans = zip(answers, turns, strict=True)
        return self._renderer.between_all(
            [tokens[answer.episode.row, turn.begin : turn.end] for answer, turn in spans],
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
