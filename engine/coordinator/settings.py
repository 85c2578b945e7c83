"""What a coordinator is told before it begins.

Owns: how long a run is, and what a checkpoint says. Does not own: what is made of it (core.py), nor
the checkpoint's files (engine/checkpoint).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.coordinator.messages import Ref, SourceCut


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long a run is. steps None: one pass over each training source. checkpoint_every 0: at the end only.

    error_budget: the share of admitted prompts that may be dropped (never less than 10 prompts). patience: seconds that
    a run may give prompts up in vain (livelock.py) before it fails; 0 is for ever.
    """

    steps: int | None = None
    checkpoint_every: int = 0
    error_budget: float = 0.1
    last_batch: Literal["train", "drop"] = "train"
    patience: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a checkpoint says: the Step, each source's cut, and the rows of finished prompts by source and node."""

    step: int
    sources: Mapping[str, SourceCut]
    rows: Mapping[str, Mapping[str, Ref]] = field(default_factory=dict)
