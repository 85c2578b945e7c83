"""What a chunk reads: from tables to readings.

Owns: which row of which producer goes into each row of an input. Does not own: which rows a chunk
has (prompt_table.py), nor where the blocks are (blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.blocks import Blocks, Reading, Readings
from engine.coordinator.reduced_rows import descendants
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
            owner, below = descendants(tables[i.gate], i.fan_in, at, samples)
            slots, keys = at[owner], keys_of(at[owner], samples[owner])
        elif i.width:
            mine = i.within(samples)
            slots, below = at[mine], samples[mine] - i.offset
            keys = keys_of(slots, samples[mine])
        found = []
        for fetch in i.fetches:
            table = tables[fetch.producer]
            entry = table.entries(slots, below // fetch.ratio if fetch.ratio > 1 else below)
            block, row = table.block.reshape(-1)[entry], table.row.reshape(-1)[entry]
            found.append(blocks.reading(fetch.producer, fetch.columns, block, row, keys))
        inputs[i.name] = tuple(found)
    return inputs


def held(inputs: Readings) -> frozenset[int]:
    """The numbers of the blocks that are read."""
    return frozenset(
        number for many in inputs.values() for reading in many for number in reading.numbers
    )
