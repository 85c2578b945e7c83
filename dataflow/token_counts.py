"""How many tokens rows of a source's data have, counted before a run, or why nobody counted them.

Owns: the values, and what is said of them. Does not own: reading and tokenizing rows
(operators/kernels/token_counts.py), what follows for a plan (engine/cost/lengths.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenCounts:
    """Of a sample of rows, the same for equal data. prompts: tokens of each row's prompt, int64
    [rows], ascending, none below 1. longest: of the sample's prompts, and of those that have most
    bytes in all of the data. place: the file, or what else the rows are from.
    """

    prompts: np.ndarray
    longest: int
    place: str

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
        few, many = int(self.prompts[0]), int(self.prompts[-1])
        mean = f", mean {self.prompts.mean():,.0f}"
        span = f"{few:,} to {many:,} tokens{mean}" if few != many else f"{few:,} tokens"
        longer = f", and of its longest {self.longest:,}" if self.longest > many else ""
        rows = f"{len(self.prompts):,} row{'s' * (len(self.prompts) != 1)} of {self.place}"
        return f"{span}, from {rows}{longer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCounted:
    """why: in words, as one cause."""

    why: str
