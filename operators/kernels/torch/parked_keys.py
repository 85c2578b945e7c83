"""Keys and values of rows between two turns, each row's in memory of its own, of exact length.

Owns: which parked rows have keys, how many tokens these are, and which go where room is bounded.
Does not own: how keys are laid out (cache.py, static_keys.py), what a row without them does
(shared_turns.py, static_turns.py).

Outside of the tensors that a decode step reads, a parked row costs a step nothing, and what is
freed is free at once. Keys are copied out and in once a turn, which costs as much as one step reads
of them.
"""

from __future__ import annotations

import numpy as np

from operators.kernels.torch.cache import Level

LayerKeys = dict[int, Level]
"""By layer, the keys and values of one row or prompt."""


class ParkedKeys:
    """The keys of parked rows, oldest first. most: the tokens that they may be; 0: any number.
    prompts: int64 [prompts], tokens that a row needs of its prompt besides its own, counted once
    for all rows of the prompt, n each. tokens: how many there are.
    """

    def __init__(self, most: int, prompts: np.ndarray, n: int) -> None:
        self.tokens = 0
        self._most, self._prompt_tokens, self._n = most, prompts, n
        self._rows: dict[int, LayerKeys] = {}
        self._lengths: dict[int, int] = {}
        self._members = np.zeros(len(prompts), np.int64)
        self._prompts: dict[int, LayerKeys] = {}

    def park(self, row: int, keys: LayerKeys, length: int) -> None:
        """Keep a row's keys, of so many tokens, and make room for them."""
        prompt = row // self._n
        self._rows[row], self._lengths[row] = keys, length
        self._members[prompt] += 1
        self.tokens += length
        if self._members[prompt] == 1:
            self.tokens += int(self._prompt_tokens[prompt])
        while self._most and self.tokens > self._most:
            self.pop(next(iter(self._rows)))

    def get_length(self, row: int) -> int:
        """How many tokens of this row have keys here; 0 if none."""
        return self._lengths.get(row, 0)

    def holds(self, row: int) -> bool:
        """Whether this row's keys are here, be they of no token."""
        return row in self._rows

    def pop(self, row: int) -> LayerKeys:
        """Remove a row's keys; returns them, of no layer if there are none."""
        keys = self._rows.pop(row, None)
        if keys is None:
            return {}
        prompt = row // self._n
        self.tokens -= self._lengths.pop(row)
        self._members[prompt] -= 1
        if self._members[prompt] == 0:
            self.tokens -= int(self._prompt_tokens[prompt])
            self._prompts.pop(prompt, None)
        return keys

    def clear(self) -> None:
        """Remove all keys: they are of weights that are no longer there."""
        self._rows.clear()
        self._lengths.clear()
        self._prompts.clear()
        self._members[:] = 0
        self.tokens = 0

    def needs_prompt(self, prompt: int) -> bool:
        """Whether a row here is useless without the keys of this prompt."""
        return bool(self._members[prompt])

    def park_prompt(self, prompt: int, keys: LayerKeys) -> None:
        """Keep the keys of a prompt for as long as a row here needs them."""
        self._prompts[prompt] = keys

    def pop_prompt(self, prompt: int) -> LayerKeys | None:
        """Remove a prompt's keys; returns them, None if they are not here."""
        return self._prompts.pop(prompt, None)
