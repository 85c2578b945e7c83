"""Episodes: what has happened in each, and how many tokens it may still have.

Owns: the state of an episode, its turns, its budget, and its row once it is over. Does not own:
who writes and who answers (episode_pass.py), the batch (interacting.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dataflow.prompt_types import Message
from operators.kernels.decoding import Written

Finish = Literal["stop", "length", "turns", "timeout", "error"]


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
    """One episode under way.

    number: that its environment is asked by. raw: whether its prompt is plain text. tools: what the
    model may call. limit: the most completion tokens. deadline: of the clock, when its time is up,
    which begins with its first token; turn_began likewise. overflowed: whether it ended because an
    answer did not fit.
    """

    number: int
    raw: bool
    messages: list[Message]
    prompt: np.ndarray
    limit: int
    tools: Sequence[Mapping[str, Any]] = ()
    deadline: float = math.inf
    turn_began: float = 0.0
    turns: list[EpisodeTurn] = field(default_factory=list)
    finish: Finish | None = None
    overflowed: bool = False
    final_reward: float | None = None
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def written(self) -> int:
        """Tokens that the model wrote."""
        return sum(turn.end - turn.begin for turn in self.turns)

    @property
    def reward(self) -> float | None:
        """The sum of all rewards; None if there is none."""
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        if self.final_reward is not None:
            rewards.append(self.final_reward)
        return sum(rewards) if rewards else None

    def copy_row(self, written: Written, row: int) -> EpisodeRow:
        """Copy the tokens of the row of a decode loop, up to the last one that the model wrote."""
        end = self.turns[-1].end
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
    def turn_ends(self) -> list[int]:
        """Of each turn, the completion tokens up to its last one."""
        return [turn.end for turn in self.episode.turns]
