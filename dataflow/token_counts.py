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
        fitting = self.prompts[self.prompts <= limit]
        cut = np.minimum(self.prompts, limit)
        return replace(self, prompts=fitting if drops and len(fitting) else cut, longest=limit)

    def __str__(self) -> str:
        spans = _span(self.prompts)
        if self.answers is not None:
            spans += f", with answers of {_span(self.answers)}"
        longer = f", and of its longest {self.longest:,}" if self.longest > self.prompts[-1] else ""
        if self.answers is not None:
            longer = f", and of its longest {self.longest_row:,} in all"
        rows = f"{len(self.prompts):,} row{'s' * (len(self.prompts) != 1)} of {self.place}"
        return f"{spans}, from {rows}{longer}"


def _span(lengths: np.ndarray) -> str:
    few, many = int(lengths[0]), int(lengths[-1])
    mean = f", mean {lengths.mean():,.0f}"
    return f"{few:,} to {many:,} tokens{mean}" if few != many else f"{few:,} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCounted:
    """why: in words, as one cause."""

    why: str
