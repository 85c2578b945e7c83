"""Episodes: what has happened in each, and how many tokens it may still have.

Owns: what begins one, its state, its turns, its budget, and its rows once they are over. Does not
own: who writes and who answers (episode_pass.py), the batch (episode_chunk.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dataflow.prompt_types import Message
from operators.kernels.decoding import Written
from operators.kernels.environments.replies import EnvironmentFault

Finish = Literal["stop", "length", "turns", "timeout", "segment"]
"""Why a row ended; `segment`: its episode goes on in another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """The most tokens: of a row's completion, written and answered; of one turn; of prompt and
    completion. None: no limit of its own.
    """

    completion: int
    turn: int | None = None
    context: int | None = None

    def row_limit(self, prompt: int) -> int:
        """The most tokens of the completion of a prompt with so many."""
        if self.context is None:
            return self.completion
        return min(self.completion, self.context - prompt)

    def turn_limit(self, length: int, row_limit: int) -> int:
        """The length of the completion at which a turn that begins at `length` ends in any case; no
        more than `length` if there is no room for one.
        """
        if self.turn is None:
            return row_limit
        return min(row_limit, length + self.turn)


@dataclass(slots=True, kw_only=True)
class EpisodeTurn:
    """A turn of the model: completion tokens begin..end, the message that they are, and what came
    of it.
    """

    begin: int
    end: int
    message: Message = field(default_factory=dict)
    reward: float | None = None
    model_seconds: float = 0.0
    environment_seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class EpisodeState:
    """One episode under way: the row that it is in, and what is the same in all its rows.

    number: that its environment is asked by. row: that it has in the decode loop; -1 before it has
    one. raw: whether its prompt is plain text. messages: the conversation so far; opening: what of
    it the row's prompt shows, in place of the first `opened_at` messages. tools: what the model may
    call. limit: the most completion tokens. seconds_left: of its time, which runs from the row's
    first token on; deadline: of the clock, when it is up; turn_began likewise. answers: turns of
    this row that were answered. overflowed: whether it ended because an answer did not fit.
    earlier: its rows before this one, in order.
    """

    number: int
    raw: bool
    messages: list[Message]
    opening: Sequence[Message]
    opened_at: int
    prompt: np.ndarray
    limit: int
    row: int = -1
    earlier: Sequence[EpisodeRow] = ()
    seconds_left: float = math.inf
    tools: Sequence[Mapping[str, Any]] = ()
    deadline: float = math.inf
    turn_began: float = 0.0
    turns: list[EpisodeTurn] = field(default_factory=list)
    answers: int = 0
    finish: Finish | None = None
    overflowed: bool = False
    final_reward: float | None = None
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def segment(self) -> int:
        """Which of the episode's rows this is, from 0 on."""
        return len(self.earlier)

    @property
    def turn_count(self) -> int:
        """Turns that the model has written, in all rows."""
        return len(self.turns) + sum(len(row.episode.turns) for row in self.earlier)

    @property
    def shown(self) -> list[Message]:
        """What the model was shown and wrote in this row, and what it was answered last."""
        return [*self.opening, *self.messages[self.opened_at :]]

    @property
    def length(self) -> int:
        """Tokens of the row's completion up to the last one that the model wrote."""
        return self.turns[-1].end if self.turns else 0

    @property
    def written(self) -> int:
        """Tokens that the model wrote."""
        return sum(turn.end - turn.begin for turn in self.turns)

    @property
    def reward(self) -> float | None:
        """The sum of the row's rewards; None if there is none."""
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        if self.final_reward is not None:
            rewards.append(self.final_reward)
        return sum(rewards) if rewards else None

    def copy_row(self, written: Written) -> EpisodeRow:
        """Copy the tokens of its row of a decode loop, up to the last one that the model wrote."""
        row, end = self.row, self.length
        mass = None
        if written.mass is not None:
            mass = written.mass[row, :end].copy()
        return EpisodeRow(
            episode=self,
            tokens=written.tokens[row, :end].copy(),
            logprobs=written.logprobs[row, :end].copy(),
            versions=written.versions[row, :end].copy(),
            mass=mass,
        )


@dataclass(slots=True, kw_only=True)
class EpisodeStart:
    """A row of an episode that is to begin. number: that its environment is asked by; raw: whether
    its prompt is plain text; messages: what the prompt shows; tools: what the model may call; ids
    int32: the prompt. before: the row that the episode goes on from, None for its first;
    seconds_left: of its time then, as it does not run between two rows.
    """

    number: int
    raw: bool
    messages: list[Message]
    tools: Sequence[Mapping[str, Any]]
    ids: np.ndarray
    before: EpisodeRow | None = None
    seconds_left: float = math.inf

    def begin(self, budget: TokenBudget) -> EpisodeState:
        """The episode at the beginning of this row."""
        messages: Sequence[Message] = self.messages
        earlier: Sequence[EpisodeRow] = ()
        if self.before is not None:
            messages = self.before.episode.messages
            earlier = self.before.all_rows
        return EpisodeState(
            number=self.number,
            raw=self.raw,
            # A list of its own, which grows.
            messages=list(messages),
            opening=self.messages,
            opened_at=len(messages),
            prompt=self.ids,
            limit=budget.row_limit(len(self.ids)),
            tools=self.tools,
            earlier=earlier,
            seconds_left=self.seconds_left,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """The row of an episode that is over. All [tokens]: tokens, versions int32, logprobs, mass
    float32; mass None unless the sampler truncates.
    """

    episode: EpisodeState
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    mass: np.ndarray | None

    def make_mask(self) -> np.ndarray:
        """uint8 [tokens]: 1 where the model wrote."""
        mask = np.zeros(len(self.tokens), np.uint8)
        for turn in self.episode.turns:
            mask[turn.begin : turn.end] = 1
        return mask

    def make_turn_numbers(self) -> np.ndarray:
        """uint16 [tokens]: the turn that wrote each token, or that it answers."""
        numbers = np.zeros(len(self.tokens), np.uint16)
        for number, turn in enumerate(self.episode.turns):
            numbers[turn.begin :] = number
        return numbers

    @property
    def all_rows(self) -> list[EpisodeRow]:
        """The rows of the episode up to this one."""
        return [*self.episode.earlier, self]

    @property
    def is_last(self) -> bool:
        """Whether the episode is over with it."""
        return self.episode.finish != "segment"

    @property
    def total_reward(self) -> float | None:
        """The sum of the rewards of the episode up to this row; None if there is none."""
        rewards = [row.episode.reward for row in self.all_rows]
        known_rewards = [reward for reward in rewards if reward is not None]
        if not known_rewards:
            return None
        return sum(known_rewards)

    @property
    def turn_ends(self) -> list[int]:
        """Of each turn, the completion tokens up to its last one."""
        return [turn.end for turn in self.episode.turns]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOutcome:
    """What came of an episode in one row of a decode loop: either `row`, with which it is over, or
    what it goes on with in another row, or a fault.
    """

    episode: EpisodeState
    row: EpisodeRow | None = None
    going_on: EpisodeStart | None = None
    fault: EnvironmentFault | None = None
