"""What a coordinator is told before it begins.

Owns: how long a run is, and what a checkpoint says. Does not own: what is made of it
(coordinator.py), nor the checkpoint's files (engine/keep/checkpoint).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dataflow.memory_limits import MemoryLimits
from engine.coordinator.relayout_policy import RelayoutPolicy
from engine.protocol.refs import Ref, SourceCut

Scaling = Literal["balance", "most", "fixed"]
"""Who decides how many replicas a node has: the rule in replica_scaling.py; as many as there may
be; nobody but who asks.
"""


RecordedParts = Mapping[int, Sequence[Sequence[int]]]
"""Step -> the positions of each of its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long a run is. steps None: one pass over each training source.

    checkpoint_every: Steps between checkpoints. keep_every: Steps between those that are kept for
    good. checkpoint_seconds: seconds since the last one of any kind, after which the next Step's
    end gets a timed one. 0: none of the kind. stored_at: when the last was written, by the clock of
    `now`; None: count from the first event.

    error_budget: the share of admitted prompts that may be dropped (never less than 10 prompts).
    patience: seconds that a run may give prompts up in vain (livelock.py) before it fails; 0: for
    ever. grace: seconds that a replica has to leave (replicas.py). parts: by source, those into
    which groups were cut as they came, which a Step that is repeated has again. relayout: decides
    when the run goes on with another layout; of all its attempts the same. limits: of nodes whose
    memory ran out in an earlier attempt. measures_loads: whether what replicas took decides how
    much each gets (replica_loads.py).
    """

    steps: int | None = None
    checkpoint_every: int = 0
    keep_every: int = 0
    checkpoint_seconds: float = 0.0
    stored_at: float | None = None
    error_budget: float = 0.1
    patience: float = 0.0
    grace: float = 60.0
    scaling: Scaling = "fixed"
    parts: Mapping[str, RecordedParts] = field(default_factory=dict)
    relayout: RelayoutPolicy | None = None
    limits: Mapping[str, MemoryLimits] = field(default_factory=dict)
    measures_loads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a checkpoint says. rows: of finished prompts, by source and node. evaluated: the version
    at which each evaluate node ran last; None: older checkpoints do not say, and all that was due
    was done.
    """

    step: int
    sources: Mapping[str, SourceCut]
    rows: Mapping[str, Mapping[str, Ref]] = field(default_factory=dict)
    evaluated: Mapping[str, int] | None = None
