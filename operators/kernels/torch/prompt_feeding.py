"""Feeding prompts and written tokens to a module, as packed tokens in parts that fit the budget.

Owns: how tokens are laid out for a pass, and the call of the module. Does not own: where keys are
stored (cache.py, static_keys.py), which rows are fed (shared_step.py, static_step.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dataflow.batch import Ragged
from operators.kernels.decoding import DecodeTask
from operators.kernels.task_rows import TaskRows
from operators.kernels.torch.alike_lengths import cut_alike
from operators.kernels.torch.attention import AttentionPass, compute_hidden, forward
from operators.kernels.torch.cache import Cache, Common, Prefill
from operators.kernels.torch.products import fast_products

LEAST_PREFIX = 8
"""Shared tokens that justify a prefix level, which costs a few small products per step."""

MOST_PIECE = 1024
"""Tokens of one row's completion that are fed at once at most: each of them attends to all keys of
the row, which may be many more than the tokens of a pass.
"""


PASS_TOKENS = 128
"""Padded tokens of rows' completions that a further pass over them must spare on a CPU: each
attends to all keys of its row.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """Tokens of some rows that are fed at once: of each row begins .. ends - 1. rows int64: which,
    as indices; is_last: whether these are the last tokens of these rows.
    """

    rows: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    is_last: bool


class Feeder:
    """Feeds the tokens of a decode loop's rows to a module. prefix: how many tokens all of their
    prompts share. predicts: whether anybody here reads logits; without, they have no columns.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        task: DecodeTask,
        rows: TaskRows,
        *,
        predicts: bool = True,
    ) -> None:
        self.module, self.device = module, module.device
        self._predicts = predicts
        self._rows = rows
        self._set_prefix(task.prompts[0], common_prefix(task.prompts))
        self._budget = task.budget
        self._products = fast_products(module)

    def prefill(self, cache: Cache, prompts: np.ndarray, first: int) -> Tensor:
        """Feed some prompts, int64 [prompts], whose keys go to the cache's groups first, first + 1,
        ... Returns the logits [prompts, vocabulary] after them. The cache's prefix is that of the
        task.
        """
        prefix = cache.prefix
        ids = [self._rows.prompt(prompt) for prompt in prompts.tolist()]
        if prefix and not cache.prefixes:
            common = Common(cache=cache, longest=prefix)
            self.fill(ids[0][:prefix], np.arange(prefix), common)
        lengths = self._rows.lengths[prompts] - prefix
        segment, within = lay_out_segments(lengths)
        tokens = np.concatenate([prompt_ids[prefix:] for prompt_ids in ids])
        width = int(lengths.max())
        place = None
        if (lengths != width).any():
            place = self.to_device(segment * width + within)
        prefill = Prefill(cache=cache, first=first, groups=len(prompts), width=width, place=place)
        last_tokens = self.to_device(np.cumsum(lengths) - 1)
        return self.compute_logits(tokens, prefix + within, prefill, keep=last_tokens)

    def shorten_prefix(self, prompts: np.ndarray) -> bool:
        """Shorten `prefix` to what these prompts share too. Returns whether it is shorter now."""
        shared = self._count_shared(self._prefix_ids, prompts, self.prefix)
        is_shorter = shared < self.prefix
        self._set_prefix(self._prefix_ids, shared)
        return is_shorter

    def find_prefix(self, prompts: np.ndarray) -> None:
        """Set `prefix` to what these prompts share, all that will be fed from now on."""
        first = self._rows.prompt(int(prompts[0]))
        shared = 0
        if len(prompts) > 1:
            shared = self._count_shared(first, prompts, len(first) - 1)
        self._set_prefix(first, shared)

    def _set_prefix(self, ids: np.ndarray, length: int) -> None:
        self.prefix, self._prefix_ids = length, ids[:length]

    def _count_shared(self, ids: np.ndarray, prompts: np.ndarray, most: int) -> int:
        """Count the tokens, at most so many, that these ids and all of these prompts begin with,
        leaving each prompt one; 0 if too few to matter.
        """
        length = most
        for prompt in prompts.tolist():
            others = self._rows.prompt(prompt)
            length = min(length, len(others) - 1)
            differs = ids[:length] != others[:length]
            if differs.any():
                length = int(differs.argmax())
        return length if length >= LEAST_PREFIX else 0

    def split_prompts(self, prompts: np.ndarray) -> list[np.ndarray]:
        """Split prompts, in order, into parts that are fed at once."""
        return self.split(prompts, self._rows.lengths[prompts])

    def split(self, indices: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        """Split indices, in order, into parts whose padded size fits the budget; at least one in
        each. lengths: of each index's row.
        """
        cuts, begin, longest = [], 0, 0
        for index, length in enumerate(lengths.tolist()):
            longest = max(longest, length)
            if index > begin and longest * (index - begin + 1) > self._budget:
                cuts.append(index)
                begin, longest = index, length
        return [part for part in np.split(indices, cuts) if len(part)]

    def split_rows(
        self, begins: np.ndarray, ends: np.ndarray, prompts: np.ndarray
    ) -> list[RowPart]:
        """Split tokens begins .. ends - 1 of rows' completions into parts that fit the budget, a
        long row into several. prompts: the lengths of their prompts. All int64 [rows].
        """
        most = min(self._budget, MOST_PIECE)
        begins, parts = begins.copy(), list[RowPart]()
        for row in np.flatnonzero(ends - begins > most):
            for begin in range(begins[row], ends[row] - most, most):
                begins[row] = begin + most
                part = RowPart(
                    rows=np.array([row]),
                    begins=np.array([begin]),
                    ends=begins[[row]],
                    is_last=False,
                )
                parts.append(part)
        # Copying a row's keys costs far less than feeding its tokens.
        cost = np.maximum(ends - begins, (prompts + ends) // 4)
        for rows in self._split_alike(ends - begins, cost):
            parts.append(RowPart(rows=rows, begins=begins[rows], ends=ends[rows], is_last=True))
        return parts

    def _split_alike(self, widths: np.ndarray, cost: np.ndarray) -> Iterator[np.ndarray]:
        """Split rows of so many tokens, whose costs are these, into parts that fit the budget; on a
        CPU, where padding costs more than a pass, also into rows alike.
        """
        alike = [(0, len(widths))]
        if self.device.type == "cpu":
            alike = cut_alike(widths, PASS_TOKENS)
        for begin, end in alike:
            yield from self.split(np.arange(begin, end), cost[begin:end])

    def compute_logits(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        attention_pass: AttentionPass,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Feed tokens; returns the logits after those at `keep`, after all if it is None."""
        return self.forward(
            self.to_device(ids), self.to_device(positions), attention_pass, keep=keep
        )

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attention_pass: AttentionPass,
        keep: Tensor | None = None,
    ) -> Tensor:
        """`compute_logits` of tokens that are on the device already."""
        with self._products:
            if self._predicts:
                return forward(self.module, ids, positions, attention_pass, keep=keep)
            hidden = compute_hidden(self.module, ids, positions, attention_pass)
            return hidden.new_empty(len(ids if keep is None else keep), 0)

    def fill(self, ids: np.ndarray, positions: np.ndarray, attention_pass: AttentionPass) -> None:
        """Compute these tokens' keys and values alone."""
        with self._products:
            compute_hidden(
                self.module, self.to_device(ids), self.to_device(positions), attention_pass
            )

    def to_device(self, index: np.ndarray) -> Tensor:
        """Copy whole numbers to the device, as int64."""
        return torch.from_numpy(index.astype(np.int64, copy=False)).to(self.device)


def common_prefix(prompts: Ragged) -> int:
    """Count the tokens that all prompts share, leaving each at least one; 0 if too few to
    matter.
    """
    least = int(prompts.lengths.min()) - 1
    if len(prompts) < 2 or least < LEAST_PREFIX:
        return 0
    places = prompts.offsets[:-1, None] + np.arange(least)
    heads = prompts.values[places]
    differs = (heads != heads[0]).any(0)
    length = int(differs.argmax()) if differs.any() else least
    return length if length >= LEAST_PREFIX else 0


def lay_out_segments(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lay segments out one after another: for each token its segment, and its place in that."""
    segment = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return segment, np.arange(len(segment)) - starts[segment]
