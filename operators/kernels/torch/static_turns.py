"""The decode step at fixed places, for rows that stop and go on.

Owns: where keys are while a row is parked, and the pass over what it was given. Does not own: the
step (static_step.py), which rows go on (turns.py), which keys must go (parked_keys.py).

A parked row leaves its slot, with its prompt's keys and its own, in memory of exact length. A step
computes the first slots and as many keys as the longest row has room for, so parked rows among the
slots would be computed with each step; slots beyond the live ones would each have the room of the
longest row, and when they grew, tensors would move and graphs be captured again. One copy a turn
costs a step or two at most.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from operators.kernels.decoding import Counts, DecodeTask, Written
from operators.kernels.torch.decode_step import StepTokens
from operators.kernels.torch.parked_keys import ParkedKeys
from operators.kernels.torch.static_memory import FEWEST_KEYS, StaticMemory, round_up_keys
from operators.kernels.torch.static_step import StaticStep


class StaticTurns(StaticStep):
    """Implements TurnStep. A parked row counts its prompt and its completion."""

    def __init__(
        self,
        module: PreTrainedModel,
        task: DecodeTask,
        written: Written,
        counts: Counts,
        memory: StaticMemory,
    ) -> None:
        super().__init__(module, task, written, counts, memory)
        self._parked = ParkedKeys(task.parked)
        # [rows]: of how many tokens of its completion a parked row had keys when it was parked.
        self._computed = np.zeros(len(self._unbegun), np.int64)

    def join(self, task: DecodeTask) -> np.ndarray:
        """See DecodeStep."""
        rows = super().join(task)
        self._computed = np.pad(self._computed, (0, len(self._unbegun) - len(self._computed)))
        self._computed[rows] = 0
        return rows

    def park(self, rows: np.ndarray) -> None:
        """Copy the keys of these rows out of their slots."""
        parked = np.isin(self._row, rows)
        for row, slot in zip(self._row[parked].tolist(), self._slot[parked].tolist(), strict=True):
            written = int(self._written.length[row]) - 1
            prompt = int(self._rows.prompt_of_row[row])
            length = int(self._lengths[prompt]) + written
            self._computed[row] = written
            keys = self._memory.keys.copy_out(slot, length)
            self._parked.park(row, keys, length, prompt=prompt)
        self.drop(rows)

    def go_on(self, rows: np.ndarray) -> StepTokens:
        """Copy the keys of these rows into slots, and feed what has none in few passes."""
        prompts = self._lengths[self._rows.prompt_of_row[rows]]
        ends = self._written.length[rows].astype(np.int64)
        fed = np.array([self._parked.get_length(row) for row in rows.tolist()], np.int64)
        fed = np.maximum(fed - prompts, 0)
        order = np.argsort(ends - fed, kind="stable")  # rows that are fed at once are alike
        rows, fed, ends, prompts = rows[order], fed[order], ends[order], prompts[order]
        keys, longest = self._memory.keys, int((prompts + ends).max())
        self._memory.reserve(keys.slots, round_up_keys(longest, FEWEST_KEYS))
        slots = self._take_slots(rows)
        absent = np.array([not self._parked.holds(row) for row in rows.tolist()])
        absent_prompts = np.unique(self._rows.prompt_of_row[rows[absent]])
        self._prefill(absent_prompts, rows[absent], slots[absent])
        for row, slot in zip(rows[~absent].tolist(), slots[~absent].tolist(), strict=True):
            keys.copy_in(slot, self._parked.pop(row))
        again = (self._computed[rows] - fed).sum() + self._lengths[absent_prompts].sum()
        self._counts.again += int(again)
        return self._draw_first(rows, self._feed(rows, slots, fed, ends))

    def forget(self, rows: np.ndarray) -> None:
        """Free these rows' keys."""
        for row in rows.tolist():
            self._parked.pop(row)

    def renew(self) -> int:
        """Compute live rows' keys again, and free those of parked rows."""
        self._parked.clear()
        return super().renew()

    def _feed(
        self, rows: np.ndarray, slots: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> Tensor:
        """Feed tokens begins .. ends - 1 of these rows. Returns the logits [rows, vocabulary] after
        them.
        """
        prompts = self._lengths[self._rows.prompt_of_row[rows]]
        logits: list[Tensor] = []
        for part in self._feeder.split_rows(begins, ends, prompts):
            its_rows, its_slots = rows[part.rows], slots[part.rows]
            laid_out = self._lay_out_own(its_rows, its_slots, part.begins, part.ends)
            if not part.is_last:
                self._feeder.fill(*laid_out)
                continue
            last_tokens = self._feeder.to_device(np.cumsum(part.ends - part.begins) - 1)
            logits.append(self._feeder.compute_logits(*laid_out, keep=last_tokens))
        return torch.cat(logits)
