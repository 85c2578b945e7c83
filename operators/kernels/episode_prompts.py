"""The prompts of a chunk of episodes, as environments and chat templates read them.

Owns: a prompt's columns as Python values, and what a conversation begins with. Does not own: what
an environment adds to it, and its ids (episode_starts.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dataflow.batch import Batch
from dataflow.prompt_types import Message, is_messages, is_token_ids, with_json_values


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
