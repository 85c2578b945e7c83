"""How the prompts of a source are admitted, and into what their Step is cut.

Owns: this data type. Does not own: which value it has (passes/batching.py, passes/streaming.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Streaming = Literal["off", "ordered", "arrival"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRoom:
    """What memory holds of rows that wait for their Step.

    prompts: with the longest rows that the graph allows. tokens: of answers, with `beside` more for
    each prompt: what its rows take besides, in such tokens.
    """

    prompts: int
    tokens: int
    beside: int = 0

    def live_tokens(self, prompts: int) -> int:
        """Tokens of the answers of so many prompts that fit."""
        return max(0, self.tokens - prompts * self.beside)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSource:
    """How a source is admitted."""

    name: str
    batch: int
    """Prompts a Step."""
    max_lag: int = 0
    intake: Literal["exact", "admission", "drop"] = "exact"
    cohort: int = 0
    """Prompts that are admitted at once; 0 for all."""
    stream: Streaming = "off"
    """How a synchronous Step is cut into parts that are worked on while it is generated."""
    part_tokens: int = 0
    """Tokens of answers that a part has at least; of a source with a lag, of a Step that is formed.
    0: there are no parts.
    """
    room: LiveRoom | None = None
    """Where not all that the lag allows fits with the longest rows; else None."""
    live_tokens: int = 0
    """Tokens of answers, of all outstanding prompts, that were asked for at most; 0: no such
    number.
    """

    @property
    def allowed(self) -> int:
        """Prompts that the lag allows to be outstanding."""
        return (1 + self.max_lag) * self.batch

    @property
    def most(self) -> int:
        """Prompts that may be outstanding with the longest rows: estimates count so many."""
        return self.allowed if self.room is None else self.room.prompts
