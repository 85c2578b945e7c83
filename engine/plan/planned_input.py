"""What a planned node takes: its inputs, each with the columns that are fetched for it.

Owns: these data types. Does not own: the nodes (plan.py), which columns travel
(passes/project.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from dataflow.loss_terms import ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Columns that one input takes from a producer. `ratio`: input rows for each producer row."""

    producer: str
    columns: tuple[str, ...]
    ratio: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedInput:
    """One input; its fetches bring the bytes."""

    name: str
    gate: str
    """The node that decides which rows exist; a select, which moves no rows, can be one."""
    fetches: tuple[Fetch, ...] = ()
    ratio: int = 1
    """Rows of the node for each row of the gate; more than one for `parent` inputs."""
    fan_in: int = 0
    """Of a reduced input: most rows of the gate for a row of the node; 0 for all others."""
    offset: int = 0
    width: int = 0
    """Of a part of a concat: its rows are the node's samples `offset` to `offset + width` of each
    prompt; 0 for all others.
    """
    row_set: str = ROWS
    """The input of a train node with whose rows it goes."""

    def rows(self, inner: int) -> int:
        """Count its rows for each prompt, where the node's chunks have `inner`."""
        return self.width or inner * max(1, self.fan_in)

    def within(self, sample: np.ndarray) -> np.ndarray:
        """Boolean: which of a concat's samples are its rows."""
        return (sample >= self.offset) & (sample < self.offset + self.width)


def list_fetches(inputs: Iterable[PlannedInput]) -> Iterator[Fetch]:
    """Every fetch of these inputs, in their order."""
    for planned_input in inputs:
        yield from planned_input.fetches
