"""The beginning of episodes: environments are reset, and first prompts become token ids.

Owns: what an environment's `reset` gets and what its answer makes of a prompt. Does not own: the
environments (environments/), which prompts are too long (overlong.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from dataflow.batch import Batch
from dataflow.errors import DataError
from dataflow.kernel import Session
from dataflow.prompt_types import Message, is_messages, is_token_ids, with_json_values
from operators.kernels.environments.replies import (
    EnvironmentFault,
    EnvironmentPool,
    EnvironmentReply,
)
from operators.kernels.episode_pass import NO_ROWS, WAIT
from operators.kernels.episodes import EpisodeStart
from operators.kernels.turn_rendering import TurnRenderer


class PromptRows:
    """A chunk's prompts, as environments and templates read them."""

    def __init__(self, prompts: Batch) -> None:
        column = prompts.array("prompt")
        self.has_messages = is_messages(column.type)
        self.has_ids = is_token_ids(column.type)
        self._columns: dict[str, list[Any]] = {}
        for name in prompts.names:
            self._columns[name] = with_json_values(prompts.array(name))

    def row(self, index: int) -> dict[str, Any]:
        """A prompt's columns by name, for `reset`."""
        return {name: column[index] for name, column in self._columns.items()}

    def begin(self, index: int) -> list[Message]:
        """A prompt as a conversation: text, and that of token ids, is one user message."""
        prompt = self._columns["prompt"][index]
        if self.has_messages:
            return list(prompt)
        text = self._columns["prompt_text"][index] if self.has_ids else prompt
        return [{"role": "user", "content": text}]

    def ids(self, index: int) -> np.ndarray:
        """A prompt that is token ids."""
        return np.array(self._columns["prompt"][index], np.int32)


class EpisodeStarts:
    """Resets environments, and makes first prompts of what they return."""

    def __init__(
        self, node: str, pool: EnvironmentPool, renderer: TurnRenderer, session: Session
    ) -> None:
        self._node = node
        self._session = session
        self._pool = pool
        self._renderer = renderer
        self._checked_tools: set[str] = set()

    def reset(
        self,
        rows: Sequence[Mapping[str, Any]],
        seeds: Sequence[int],
        first: int,
        interrupted: Callable[[], bool],
    ) -> Generator[np.ndarray, None, list[EnvironmentReply]]:
        """Reset an environment for each row; returns the replies, in order. Yields no rows after an
        interruption. first: the number of the first episode.
        """
        for index, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
            self._pool.reset(first + index, seed, row)
        replies: dict[int, EnvironmentReply] = {}
        while len(replies) < len(rows):
            if interrupted():
                yield NO_ROWS
            with self._session.waiting(WAIT):
                new_replies = self._pool.wait(None)
            for reply in new_replies:
                replies[reply.episode - first] = reply
        return [replies[index] for index in range(len(rows))]

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
