"""Rows by reference: what the coordinator knows of them, and how it says where they lie.

Owns: Ref, Gather, OwnRows, and the cut of a source. Plain values that can cross a process boundary.
Does not own: the messages that carry them (messages.py), nor any row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from dataflow.batch import Keys

Key = tuple[int, int, int]
"""(position, sample, attempt)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ref:
    """A block of rows by reference; a few bytes a row.

    lengths int64 [rows]: tokens of each row. version int32 [rows]: what the row's oldest token
    counts as (engine/protocol/staleness.py). digest uint64 [rows]: a hash of each row's content, to
    compare rows that are made twice; empty where that cannot happen (one process). weight float32
    [rows]: how much a generation of each row is expected to take; empty where no node asks for it.
    """

    worker: str
    block: int
    keys: Keys
    lengths: np.ndarray
    version: np.ndarray
    digest: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    weight: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gather:
    """Where the rows of one fetch lie: for each row, the block (an index into `refs`) and its row
    there. keys: of an input that is reduced, for each gathered row the key of the row that it
    belongs to.
    """

    producer: str
    columns: tuple[str, ...]
    refs: tuple[tuple[str, int], ...]
    """(worker, block) of each block that occurs."""
    block: np.ndarray
    row: np.ndarray
    keys: Keys | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnRows:
    """Rows of one row set of a train node in a Step.

    keys: of the rows that a Worker gets. Where several ranks share the set, mine: where these are
    among all of its rows in the Step (ascending indices), and total: how many those are; None for
    one that gets all.
    """

    keys: Keys
    mine: np.ndarray | None = None
    total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCut:
    """The rows of one source at a Step boundary; each position is in one of four states.

    next: the first position not made yet. watermark: all positions below it are retired (trained,
    or given up for good). retired: the retired positions at or above it, ascending. running:
    prompts that begin again, with attempt + 1, in admission order. finished: prompts whose rows
    wait to be trained, likewise (sample is 0 in both). admitted, dropped, overlong (given up by a
    node's own policy): counts of prompts, for the metrics and the error budget. lost_rows: rows
    that failed alone; lost_share: the same, each its share of a prompt.
    """

    next: int = 0
    watermark: int = 0
    retired: tuple[int, ...] = ()
    running: tuple[Key, ...] = ()
    finished: tuple[Key, ...] = ()
    admitted: int = 0
    dropped: int = 0
    overlong: int = 0
    lost_rows: int = 0
    lost_share: float = 0.0

    def begun_again(self) -> SourceCut:
        """The same, but the finished prompts begin again, too, before the others."""
        return replace(self, running=self.finished + self.running, finished=())
