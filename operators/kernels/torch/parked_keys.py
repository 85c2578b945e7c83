"""Keys and values of rows between two turns, each row's in memory of its own, of exact length.

Owns: which parked rows have keys, how many tokens these are, and which go where room is bounded.
Does not own: how keys are laid out (cache.py, static_keys.py), what a row without them does
(shared_turns.py, static_turns.py).

Outside of the tensors that a decode step reads, a parked row costs a step nothing, and what is
freed is free at once. Keys are copied out and in once a turn, which costs as much as one step reads
of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from operators.kernels.torch.cache import Level

LayerKeys = dict[int, Level]
"""By layer, the keys and values of one row or prompt."""


@dataclass(frozen=True, slots=True)
class _ParkedRow:
    """Keys of a row: of so many tokens, behind those of this prompt."""

    keys: LayerKeys
    length: int
    prompt: int


@dataclass(slots=True)
class _ParkedPrompt:
    """What parked rows need of their prompt: how many rows, and of how many tokens. keys: None
    while they are where those of live rows are.
    """

    length: int
    rows: int = 0
    keys: LayerKeys | None = None


class ParkedKeys:
    """The keys of parked rows, oldest first. most: the tokens that they may be; 0: any number.
    tokens: how many there are.
    """

    def __init__(self, most: int) -> None:
        self.tokens = 0
        self._most = most
        self._rows: dict[int, _ParkedRow] = {}
        self._prompts: dict[int, _ParkedPrompt] = {}

    def park(
        self, row: int, keys: LayerKeys, length: int, *, prompt: int, prompt_length: int = 0
    ) -> None:
        """Keep a row's keys, of so many tokens, and make room for them. prompt_length: tokens that
        the row needs of its prompt besides its own, counted once for all rows of the prompt.
        """
        self._rows[row] = _ParkedRow(keys, length, prompt)
        self.tokens += length
        if prompt not in self._prompts:
            self._prompts[prompt] = _ParkedPrompt(prompt_length)
            self.tokens += prompt_length
        self._prompts[prompt].rows += 1
        while self._most and self.tokens > self._most:
            self.pop(next(iter(self._rows)))

    def get_length(self, row: int) -> int:
        """How many tokens of this row have keys here; 0 if none."""
        parked = self._rows.get(row)
        return 0 if parked is None else parked.length

    def holds(self, row: int) -> bool:
        """Whether this row's keys are here, be they of no token."""
        return row in self._rows

    def pop(self, row: int) -> LayerKeys:
        """Remove a row's keys; returns them, of no layer if there are none."""
        parked = self._rows.pop(row, None)
        if parked is None:
            return {}
        self.tokens -= parked.length
        prompt = self._prompts[parked.prompt]
        prompt.rows -= 1
        if not prompt.rows:
            self.tokens -= prompt.length
            del self._prompts[parked.prompt]
        return parked.keys

    def clear(self) -> None:
        """Remove all keys: they are of weights that are no longer there."""
        self._rows.clear()
        self._prompts.clear()
        self.tokens = 0

    def clear_prompts(self) -> None:
        """Remove the keys of prompts: those of all rows' own stay."""
        for prompt in self._prompts.values():
            prompt.keys = None

    def needs_prompt(self, prompt: int) -> bool:
        """Whether a row here is useless without the keys of this prompt."""
        return prompt in self._prompts

    def park_prompt(self, prompt: int, keys: LayerKeys) -> None:
        """Keep the keys of a prompt for as long as a row here needs them."""
        self._prompts[prompt].keys = keys

    def pop_prompt(self, prompt: int) -> LayerKeys | None:
        """Remove a prompt's keys; returns them, None if they are not here."""
        parked = self._prompts.get(prompt)
        if parked is None:
            return None
        keys, parked.keys = parked.keys, None
        return keys
