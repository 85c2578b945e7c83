"""What a train node is told of a Step that is trained in parts, and what it answers.

    a task       its answers, with its id; the last one may be FetchFailed
    TrainPart    PartTrained; of several ranks Prepared first, then PartTrained after Go
    FinishStep   Stepped (messages.py), likewise

Owns: these values. Does not own: which rows are a part (engine/coordinator/part_cut.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dataflow.batch import Keys
from engine.protocol.refs import Gather, OwnRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainPart:
    """Add the gradients of a part of a Step's rows to those of the parts before; no update. part:
    its number, from 0, with which the sums begin anew. The others as in TrainStep.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishStep:
    """Do the one update of a Step with the sums of all of its parts."""

    id: int
    node: str
    worker: str
    step: int
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTrained:
    """A train node (or one rank of it) has the gradients of a part."""

    id: int
    node: str
    step: int
    worker: str
