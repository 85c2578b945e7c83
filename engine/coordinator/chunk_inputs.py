"""What a chunk reads: from tables to readings.

Owns: which row of which producer goes into each row of an input. Does not own: which rows a chunk
has (prompt_table.py), nor where the blocks are (blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.blocks import Blocks, Reading, Readings
from engine.coordinator.reduced_rows import find_descendants
from engine.coordinator.tables import RowTable
from engine.plan.plan import PlannedNode


def table_readings(
    node: PlannedNode,
    tables: Mapping[str, RowTable],
    blocks: Blocks,
    at: np.ndarray,
    samples: np.ndarray,
    keys_of: Callable[[np.ndarray, np.ndarray], Keys],
) -> Readings:
    """What to gather for each input of a node for these slots and samples. keys_of: their keys."""
    inputs: dict[str, tuple[Reading, ...]] = {}
    for i in node.inputs:
        slots, below, keys = at, samples, None
        if i.fan_in:
            owner, below = find_descendants(tables[i.gate], i.fan_in, at, samples)
            slots, keys = at[owner], keys_of(at[owner], samples[owner])
        elif i.width:
            mine = i.within(samples)
            slots, below = at[mine], samples[mine] - i.offset
            keys = keys_of(slots, samples[mine])
        readings = []
        for fetch in i.fetches:
            block, row = tables[fetch.producer].where(slots, below, fetch.ratio)
            readings.append(blocks.reading(fetch.producer, fetch.columns, block, row, keys))
        inputs[i.name] = tuple(readings)
    return inputs


def held_blocks(inputs: Readings) -> frozenset[int]:
    """The numbers of the blocks that are read."""
    # One by one: blocks are let go in this set's order, which depends on how it was filled.
    readings = chain.from_iterable(inputs.values())
    return frozenset(chain.from_iterable(reading.numbers for reading in readings))
