"""Segments: when an episode goes on in another row, and what that row's prompt is.

Owns: the most rows of an episode, a user's `compact`, and the prompt of a further row. Does not
own: when a row has no room (episode_pass.py), how messages are rendered (turn_rendering.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflow.errors import DataError
from dataflow.prompt_types import Message
from operators.kernels.environments.replies import EnvironmentFault
from operators.kernels.episodes import EpisodeStart, EpisodeState
from operators.kernels.scoring_child import Caught
from operators.kernels.turn_rendering import TurnRenderer

Compact = Callable[[list[Message]], Sequence[Message]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Rows of one episode. most: how many. compact: what it leaves of a conversation begins a row
    where the one before had no room; None: such an episode ends. room: the most tokens of a
    prompt; None: any number. least: tokens that a turn is to have room for, or the episode looks
    for another row.
    """

    renderer: TurnRenderer
    most: int = 1
    compact: Compact | None = None
    room: int | None = None
    least: int = 1

    def must_begin(self, replies: Sequence[Message]) -> bool:
        """Whether these replies begin another row however much room there is."""
        return self.renderer.begins_segment(replies)

    def start(
        self, episode: EpisodeState, *, overflowed: bool
    ) -> EpisodeStart | EnvironmentFault | None:
        """What the episode goes on with in another row; None if it cannot, a fault if `compact`
        failed. overflowed: whether its conversation is to be made shorter in any case.
        """
        if episode.segment + 1 >= self.most:
            return None
        if not overflowed:
            start = self._render(episode, episode.shown)
            if isinstance(start, EnvironmentFault) or self._fits(start):
                return start
        if self.compact is None:
            return None
        messages = self._shorten(episode.shown)
        if isinstance(messages, EnvironmentFault):
            return messages
        start = self._render(episode, messages)
        if isinstance(start, EnvironmentFault) or self._fits(start):
            return start
        return None

    def _fits(self, start: EpisodeStart) -> bool:
        return self.room is None or len(start.ids) <= self.room

    def _shorten(self, messages: list[Message]) -> list[Message] | EnvironmentFault:
        """What `compact` leaves of a conversation."""
        assert self.compact is not None
        answer: Any = None
        with Caught() as caught:  # user code may raise anything
            answer = self.compact([dict(message) for message in messages])
        if caught.fault is not None:
            text = f"answered, and compact {caught.fault.text}"
            return EnvironmentFault(kind="answer", text=text, detail=caught.fault.detail)
        if not _are_messages(answer):
            text = (
                "answered, and compact returned no conversation: expected a list of messages, each"
                f" with a `role`, the last one not the assistant's, found {answer!r:.120}"
            )
            return EnvironmentFault(kind="answer", text=text)
        return [dict(message) for message in answer]

    def _render(
        self, episode: EpisodeState, messages: list[Message]
    ) -> EpisodeStart | EnvironmentFault:
        prompt: Any = messages
        if episode.raw:
            prompt = "".join(str(message.get("content") or "") for message in messages)
        try:
            ids = self.renderer.first([prompt], [episode.tools])[0]
        except DataError as error:
            text = f"answered, and the conversation cannot begin another row: {error}"
            return EnvironmentFault(kind="answer", text=text)
        if not len(ids):
            text = "answered, and what is left of the conversation has no token"
            return EnvironmentFault(kind="answer", text=text)
        return EpisodeStart(
            number=episode.number,
            raw=episode.raw,
            messages=messages,
            tools=episode.tools,
            ids=np.asarray(ids, np.int32),
        )


def _are_messages(answer: Any) -> bool:
    """Whether this is a conversation that the model may answer."""
    if not isinstance(answer, Sequence) or isinstance(answer, str) or not answer:
        return False
    for message in answer:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return False
    return answer[-1]["role"] != "assistant"
