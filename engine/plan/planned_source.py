"""How the prompts of a source are admitted, and into what their Step is cut.

Owns: this data type. Does not own: which value it has (passes/batching.py, passes/streaming.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Streaming = Literal["off", "ordered", "arrival"]


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
