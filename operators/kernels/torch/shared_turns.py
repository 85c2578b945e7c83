"""The decode step with shared keys, for rows that stop and go on.

Owns: where keys are while a row is parked, and the pass over what it was given. Does not own: the
step (shared_step.py), which rows go on (turns.py), which keys must go (parked_keys.py).

A parked row's own keys leave the cache. So do those of a prompt that only parked rows have. Where
they come back, a row is fed from its last written token on, which has no keys yet; where they were
evicted or are of older weights, from its first on.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from operators.kernels.decoding import Counts, DecodeTask, Written
from operators.kernels.torch.decode_step import StepTokens
from operators.kernels.torch.parked_keys import LayerKeys, ParkedKeys
from operators.kernels.torch.shared_step import SharedStep


class SharedTurns(SharedStep):
    """Implements TurnStep. A parked row counts its completion, and its prompt once for all rows of
    it, without what all prompts share.
    """

    def __init__(
        self, module: PreTrainedModel, task: DecodeTask, written: Written, counts: Counts
    ) -> None:
        super().__init__(module, task, written, counts)
        self._parked = ParkedKeys(task.parked)
        # [rows]: of how many tokens a parked row had keys when it was parked.
        self._computed = np.zeros(len(self._unbegun), np.int64)

    def join(self, task: DecodeTask) -> np.ndarray:
        """See DecodeStep."""
        prefix = self._cache.prefix
        rows = super().join(task)
        self._computed = np.pad(self._computed, (0, len(self._unbegun) - len(self._computed)))
        self._computed[rows] = 0
        if self._cache.prefix < prefix:
            # Those of parked prompts begin behind what all shared.
            self._parked.clear_prompts()
        return rows

    def park(self, rows: np.ndarray) -> None:
        """Copy the keys of these rows out of the cache."""
        for slot in np.flatnonzero(np.isin(self._row, rows)).tolist():
            row = int(self._row[slot])
            length = int(self._written.length[row]) - 1
            self._computed[row] = length
            keys: LayerKeys = {}
            if length:  # a row that was fed nothing has no place in the cache yet
                for layer, level in self._cache.own.items():
                    keys[layer] = level.copy_out(slot, length)
            prompt = int(self._rows.prompt_of_row[row])
            rest = int(self._lengths[prompt]) - self._cache.prefix
            self._parked.park(row, keys, length, prompt=prompt, prompt_length=rest)
        self.drop(rows)

    def go_on(self, rows: np.ndarray) -> StepTokens:
        """Copy the keys of these rows into the cache, and feed what has none in few passes."""
        fed = np.array([self._parked.get_length(row) for row in rows.tolist()], np.int64)
        ends = self._written.length[rows].astype(np.int64)
        # Rows that are fed at once are alike in what they are fed, and those next to each other in
        # what they read in each step.
        order = np.lexsort((ends, np.frexp(ends - fed)[1]))
        rows, fed, ends = rows[order], fed[order], ends[order]
        self._bring_prompts(np.unique(self._rows.prompt_of_row[rows]))
        first = len(self._row)
        self._row, self._layout = np.concatenate([self._row, rows]), None
        for level in self._cache.own.values():
            level.reserve(len(self._row), int(ends.max()))
        for slot, row in enumerate(rows.tolist(), first):
            for layer, keys in self._parked.pop(row).items():
                self._cache.own[layer].copy_in(slot, keys)
        self._counts.again += int((self._computed[rows] - fed).sum())
        return self._draw(rows, self._feed(first, fed, ends))

    def forget(self, rows: np.ndarray) -> None:
        """Free these rows' keys, and those of prompts of which no row is left."""
        for row in rows.tolist():
            self._parked.pop(row)
        self._drop_groups()

    def renew(self) -> int:
        """Compute live rows' keys again, and free those of parked rows."""
        self._parked.clear()
        return super().renew()

    def _feed(self, first: int, begins: np.ndarray, ends: np.ndarray) -> Tensor:
        """Feed tokens begins .. ends - 1 of the rows in slots first, first + 1, ... Returns the
        logits [rows, vocabulary] after them.
        """
        prompts = self._lengths[self._rows.prompt_of_row[self._row[first:]]]
        logits: list[Tensor] = []
        for part in self._feeder.split_rows(begins, ends, prompts):
            laid_out = self._lay_out_own(first + part.rows, part.begins, part.ends)
            if not part.is_last:
                self._feeder.fill(*laid_out)
                continue
            last_tokens = self._to(np.cumsum(part.ends - part.begins) - 1)
            logits.append(self._feeder.compute_logits(*laid_out, keep=last_tokens))
        return torch.cat(logits)

    def _bring_prompts(self, prompts: np.ndarray) -> None:
        """Make these prompts groups of the cache, from parked keys where there are some."""
        absent: list[int] = []
        for prompt in prompts[self._group[prompts] < 0].tolist():
            keys = self._parked.pop_prompt(prompt)
            if keys is None:
                absent.append(prompt)
            else:
                self._copy_prompt_in(prompt, keys)
        for part in self._feeder.split_prompts(np.array(absent, np.int64)):
            self._prefill(part)
        self._counts.again += int(self._lengths[absent].sum())

    def _copy_prompt_in(self, prompt: int, keys: LayerKeys) -> None:
        group = len(self._prompt)
        rest = int(self._lengths[prompt]) - self._cache.prefix
        for layer, its in keys.items():
            level = self._cache.prompts[layer]
            level.reserve(group + 1, rest)
            level.copy_in(group, its)
        self._group[prompt] = group
        self._prompt = np.append(self._prompt, prompt)

    def _release_prompts(self, prompts: np.ndarray) -> None:
        """Copy those out of the cache which parked rows need."""
        for prompt in prompts.tolist():
            if not self._parked.needs_prompt(prompt):
                continue
            rest = int(self._lengths[prompt]) - self._cache.prefix
            keys: LayerKeys = {}
            for layer, level in self._cache.prompts.items():
                keys[layer] = level.copy_out(int(self._group[prompt]), rest)
            self._parked.park_prompt(prompt, keys)
        super()._release_prompts(prompts)
