"""The beginning of episodes: environments are reset, and first prompts become token ids.

Owns: what an environment's `reset` gets, what its answer makes of a prompt, and which prompts fit.
Does not own: the environments (environments/), which prompts are too long (overlong.py), when an
episode begins (episode_flow.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflow.batch import Keys, Ragged
from dataflow.errors import DataError
from dataflow.kernel import Session
from dataflow.prompt_types import Message
from dataflow.randomness import row_seeds
from operators.kernels.environments.replies import (
    EnvironmentFault,
    EnvironmentPool,
    EnvironmentReply,
)
from operators.kernels.episode_chunk import EpisodeChunk
from operators.kernels.episode_prompts import PromptRows
from operators.kernels.episodes import EpisodeStart
from operators.kernels.overlong import Room
from operators.kernels.text import require_embedded_ids, to_ragged
from operators.kernels.turn_rendering import TurnRenderer

_STREAM = "environments"
"""The random stream of environments' seeds: the same in every node, so that two nodes that read one
prompt play one task.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRoom:
    """Which first prompts a node takes. node, model: their names; vocabulary: ids that the Model
    knows; room: the tokens of a prompt; require_fit: raises DataError for prompts, with these keys,
    that the kernel has no room for.
    """

    node: str
    model: str
    vocabulary: int
    room: Room
    require_fit: Callable[[Keys, Ragged], None]


class EpisodeStarts:
    """Resets environments, and makes first prompts of what they return."""

    def __init__(
        self, pool: EnvironmentPool, renderer: TurnRenderer, session: Session, room: PromptRoom
    ) -> None:
        self._node = room.node
        self._session = session
        self._pool = pool
        self._renderer = renderer
        self._room = room
        self._checked_tools: set[str] = set()

    def reset(self, chunk: EpisodeChunk, episodes: Sequence[int], first: int) -> None:
        """Ask an environment for each of these episodes to reset. first: the number of the first
        of them, by which replies know it; that of the next is one more.
        """
        seeds = self._make_seeds(chunk.keys_of_rows(episodes, [0] * len(episodes)))
        for number, (episode, seed) in enumerate(zip(episodes, seeds, strict=True), first):
            self._pool.reset(number, seed, chunk.prompts.row(chunk.group_of(episode)))

    def _make_seeds(self, keys: Keys) -> list[int]:
        """A seed for each episode by its source position, below 2^31, as NumPy takes them."""
        seeds = row_seeds(self._session.seed, _STREAM, Keys.of(keys.position))
        return (seeds >> np.uint64(33)).tolist()

    def begin(
        self, chunk: EpisodeChunk, replies: Mapping[int, EnvironmentReply]
    ) -> tuple[dict[int, EpisodeStart], dict[int, EnvironmentFault]]:
        """Make the first prompts of episodes whose environments are reset; replies by episode.
        Returns the starts, and the faults of others. Those that are in neither have a prompt that
        does not fit: their group is given up, unless the run ends.
        """
        episodes = list(replies)
        groups = [chunk.group_of(episode) for episode in episodes]
        rendered, faults = self.render(list(replies.values()), chunk.prompts, groups)
        starts = {episodes[index]: start for index, start in rendered.items()}
        episode_faults = {episodes[index]: fault for index, fault in faults.items()}
        return self._fit(chunk, starts), episode_faults

    def _fit(
        self, chunk: EpisodeChunk, starts: Mapping[int, EpisodeStart]
    ) -> dict[int, EpisodeStart]:
        """The starts whose prompts fit, cut where they are to be; of others the group is given up,
        or the run ends.
        """
        if not starts:
            return {}
        longest: dict[int, np.ndarray] = {}
        for episode, start in starts.items():
            group = chunk.group_of(episode)
            if len(start.ids) > len(longest.get(group, ())):
                longest[group] = start.ids
        groups = np.array(sorted(longest), np.int64)
        keys = chunk.keys_of_groups(groups)
        prompts = to_ragged([longest[group].tolist() for group in groups.tolist()])
        limits = self._room
        require_embedded_ids(limits.node, limits.model, prompts, keys, limits.vocabulary)
        fitting, fitted = limits.room.fit(prompts, keys, self._session)
        limits.require_fit(keys.take(fitting), fitted)
        fitting_groups = set(groups[fitting].tolist())
        fitting_starts: dict[int, EpisodeStart] = {}
        for episode, start in starts.items():
            if chunk.group_of(episode) in fitting_groups:
                if limits.room.most is not None:
                    start.ids = start.ids[-limits.room.most :]
                fitting_starts[episode] = start
            else:
                self._pool.abandon(start.number)
        chunk.lost_groups |= set(longest) - fitting_groups
        return fitting_starts

    def render(
        self, replies: Sequence[EnvironmentReply], prompts: PromptRows, groups: Sequence[int]
    ) -> tuple[dict[int, EpisodeStart], dict[int, EnvironmentFault]]:
        """Make the first prompts of all replies without a fault; returns those by their index, and
        the faults of the others. groups: the prompt of each reply.
        """
        starts: dict[int, EpisodeStart] = {}
        faults: dict[int, EnvironmentFault] = {}
        for index, (reply, group) in enumerate(zip(replies, groups, strict=True)):
            if reply.fault is not None:
                faults[index] = reply.fault
                continue
            self._require_tools_fit(reply.tools, prompts)
            starts[index] = EpisodeStart(
                number=reply.episode,
                raw=not prompts.has_messages,
                messages=add_reset_reply(prompts.begin(group), reply),
                tools=reply.tools,
                ids=prompts.ids(group) if prompts.has_ids else NO_IDS,
            )
        self._encode(starts, prompts, replies)
        return starts, faults

    def _encode(
        self,
        starts: Mapping[int, EpisodeStart],
        prompts: PromptRows,
        replies: Sequence[EnvironmentReply],
    ) -> None:
        if prompts.has_ids:
            for index, start in starts.items():
                if replies[index].messages or replies[index].text:
                    raise self._refuse_first_words()
                require_ids(self._node, start.ids)
            return
        # Most groups have one prompt, which is rendered once.
        prompts_by_key: dict[str, Any] = {}
        tools_by_key: dict[str, Sequence[Mapping[str, Any]]] = {}
        keys: list[str] = []
        for start in starts.values():
            prompt: Any = start.messages
            if start.raw:
                prompt = "".join(str(message["content"]) for message in start.messages)
            key = repr((prompt, start.tools))
            prompts_by_key[key] = prompt
            tools_by_key[key] = start.tools
            keys.append(key)
        ids = self._renderer.first(list(prompts_by_key.values()), list(tools_by_key.values()))
        places = {key: place for place, key in enumerate(prompts_by_key)}
        for start, key in zip(starts.values(), keys, strict=True):
            start.ids = ids[places[key]]

    def _refuse_first_words(self) -> DataError:
        return DataError(
            f"{self._node}: expected an environment whose `reset` returns None, as the prompts are"
            " token ids already, found one that begins the conversation. Fix: prompts that are"
            " text or messages."
        )

    def _require_tools_fit(self, tools: Sequence[Mapping[str, Any]], prompts: PromptRows) -> None:
        """Raise DataError for tools that no template can show."""
        if not tools:
            return
        if not prompts.has_messages:
            raise DataError(
                f"{self._node}: expected prompts that are messages, as its environment has tools,"
                " which the chat template shows, found text. Fix: a column of message lists."
            )
        names = repr(tools)
        if names not in self._checked_tools:
            self._renderer.check(tools)
            self._checked_tools.add(names)


NO_IDS = np.zeros(0, np.int32)


def require_ids(node: str, ids: np.ndarray) -> None:
    """Raise DataError for a prompt without tokens."""
    if not len(ids):
        raise DataError(
            f"{node}: expected at least one token in each prompt, found none. Fix: prompts that"
            " are not empty."
        )


def add_reset_reply(messages: list[Message], reply: EnvironmentReply) -> list[Message]:
    """A prompt's conversation with what `reset` returned: text is added to its last user message,
    messages stand behind it.
    """
    if reply.text:
        if messages and messages[-1]["role"] == "user":
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": f"{last['content']}{reply.text}"}]
        else:
            messages = [*messages, {"role": "user", "content": reply.text}]
    return [*messages, *reply.messages]
