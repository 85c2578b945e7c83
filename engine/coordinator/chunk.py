"""A chunk: rows that one node is run on by one call of its kernel.

Owns: what a chunk is. Does not own: which rows make one (prompt_table.py, step.py), nor who runs it
(dispatch.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dataflow.batch import Keys
from dataflow.memory_limits import MemoryLimits
from engine.coordinator.blocks import Readings
from engine.plan.plan import PlannedNode


@dataclass(slots=True, eq=False)
class NodeChunk:
    """A chunk and how far it has come. holds: the numbers of the blocks that it reads."""

    node: PlannedNode
    keys: Keys
    inputs: Readings
    holds: frozenset[int] = frozenset()
    spans: np.ndarray | None = None
    """Which samples of each row, as in `dataflow.kernel.Chunk`; None: all."""
    weights: np.ndarray | None = None
    """How much each row is expected to take, likewise; None where nobody says."""
    replica: str = ""
    """The lead for which it was cut, where loads are unlike; another takes it if that is gone."""
    written: int = 0
    """Tokens of the rows that have come of it, and one more for each row."""
    step: int = 0
    again: bool = False
    """Whether it may be run again."""
    state: Literal["parked", "told", "ended"] = "parked"
    watermark: int = 0
    """The least tokens that a row of it has had which had not ended."""
    closed: bool = False
    """Whether it has ended once."""
    has_counted: bool = False
    """Whether its metrics have counted though its rows were lost before it ended for the region."""
    owed: int = 0
    """Of rows that were bound late: those that have neither come nor been given up."""
    runs: int = 0
    limits: MemoryLimits | None = None
    """What its kernel may take at once, where that is less than the plan says."""
    was_short: bool = False
    """Whether its kernel's memory ran out, so that its runs had different limits."""
    loses_rows: bool = False
    """Whether rows of it were lost alone, in any of its runs."""
    blocks_made: dict[int, tuple[Keys, np.ndarray]] = field(default_factory=dict)
    """Keys and digests of each block of its output that is still needed."""
    blocks_remade: list[int] = field(default_factory=list)
    """Blocks of a further run, kept until it has ended."""
