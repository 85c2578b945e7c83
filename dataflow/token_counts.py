"""How many tokens rows of a source's data have, counted before a run, or why nobody counted them.

Owns: the values, and what is said of them. Does not own: reading and tokenizing rows
(operators/kernels/token_counts.py), what follows for a plan (engine/plan/cost/lengths.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenCounts:
    """Of a sample of rows, the same for equal data. prompts: tokens of each row's prompt, int64
    [rows], ascending, none below 1. longest: of the sample's prompts, and of those that have most
    bytes in all of the data. answers, longest_answer: the same of the answers that the data has,
    longest_row: of both together; None and 0 if it has none. place: the file, or what else the rows
    are from.
    """

    prompts: np.ndarray
    longest: int
    place: str
    answers: np.ndarray | None = None
    longest_answer: int = 0
    longest_row: int = 0

    def within(self, limit: int, *, drops: bool) -> TokenCounts:
        """With no prompt of more tokens than a limit: drops: longer ones are left out, where any
        stays; else they are cut.
        """
        if self.longest <= limit:
            return self
        prompts = self.prompts[self.prompts <= limit]
        if not drops or not len(prompts):
            prompts = np.minimum(self.prompts, limit)
        return replace(self, prompts=prompts, longest=limit)

    def __str__(self) -> str:
        spans, longest = _describe_lengths(self.prompts), ""
        if self.answers is not None:
            spans += f", with answers of {_describe_lengths(self.answers)}"
            longest = f", and of its longest {self.longest_row:,} in all"
        elif self.longest > self.prompts[-1]:
            longest = f", and of its longest {self.longest:,}"
        count = len(self.prompts)
        rows = f"{count:,} row" if count == 1 else f"{count:,} rows"
        return f"{spans}, from {rows} of {self.place}{longest}"


def _describe_lengths(lengths: np.ndarray) -> str:
    """lengths: ascending."""
    few, many = int(lengths[0]), int(lengths[-1])
    if few == many:
        return f"{few:,} tokens"
    return f"{few:,} to {many:,} tokens, mean {lengths.mean():,.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCounted:
    """why: in words, as one cause."""

    why: str
