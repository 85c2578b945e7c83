"""What the coordinator says of a Step that is trained part by part, and what it hears.

    a task        its answers, with its id; the last one may be FetchFailed
    TrainPart     PartTrained; of several ranks with parts of the weights Prepared first, then
                  PartTrained after Go
    FinishStep    Stepped; of several ranks Prepared first, then Stepped after Go

Owns: these values. Does not own: other messages (messages.py), when a part begins (the
coordinator).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dataflow.batch import Keys
from dataflow.memory_limits import MemoryLimits
from engine.protocol.refs import Gather, OwnRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainPart:
    """Compute the gradients of some whole groups of a Step, and add them to those of the parts
    before; each rank of a node gets a message of the same id, also one without a row.

    part: counts from 0, and says the order of the sums; part 0 drops what is summed, and begins
    anew. keys, inputs, mine, total, others, giver: of this part's rows, as in TrainStep;
    so are limits.
    """

    id: int
    node: str
    worker: str
    step: int
    part: int
    keys: Keys
    inputs: Mapping[str, tuple[Gather, ...]]
    mine: np.ndarray | None = None
    total: int | None = None
    others: Mapping[str, OwnRows] = field(default_factory=dict)
    giver: str = ""
    limits: MemoryLimits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTrained:
    """A train node (or one rank of it) has added the gradients of a part; no weight has changed."""

    id: int
    node: str
    step: int
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishStep:
    """Make the one update of a Step from the sums of its parts, as many as `parts`."""

    id: int
    node: str
    worker: str
    step: int
    parts: int
