"""What a concat puts side by side: the rows of its inputs, one after another in each prompt.

Owns: when these rows are decided, and which rows of an input become which of its own. Does not own:
the tables (tables.py), nor the rows of a Step (step.py).

Where a prompt was given up or emptied above one of the inputs, or a select that refills kept
nothing of it, none of its rows go on: those of the other inputs would be a group that lacks some.
As in reduced_rows.py, this does not depend on what came first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.reduced_rows import dropped_prompts
from engine.coordinator.tables import ABSENT, PRESENT, RowTable, with_bytes
from engine.plan.plan import PlannedNode
from engine.plan.planned_input import PlannedInput


def joined_state(
    node: PlannedNode,
    tables: Mapping[str, RowTable],
    slots: np.ndarray,
    above: Sequence[PlannedNode],
    *,
    unmade: bool,
) -> np.ndarray:
    """uint8 [slots, rows]: the state of each row in the input that it comes from; ABSENT where the
    prompt is dropped and the row has come. unmade: as in `tables.input_state`.
    """
    parts = []
    for i in node.inputs:
        state = tables[i.gate].state[slots]
        if unmade:
            state = with_bytes(state, i.fetches, tables, slots)
        parts.append(state)
    joined = np.concatenate(parts, axis=1)
    gone = dropped_prompts(tables, slots, above)
    return np.where(gone[:, None] & (joined == PRESENT), np.uint8(ABSENT), joined)


def keys_beside(inputs: Sequence[PlannedInput], keys_of: Mapping[str, Keys]) -> Keys:
    """The keys of a concat's rows, sorted. keys_of: those of each gate."""
    parts = [shift_samples(keys_of[i.gate], i.offset) for i in inputs]
    keys = Keys.concat(parts)
    return keys.take(keys.order())


def shift_samples(keys: Keys, offset: int) -> Keys:
    """The same prompts, with samples so much greater."""
    return Keys(keys.position, (keys.sample + offset).astype(np.int32), keys.attempt)


def parts_of_concats(nodes: Sequence[PlannedNode]) -> frozenset[str]:
    """The nodes with more than a row a prompt that a concat stands on, directly or not."""
    by_name = {n.name: n for n in nodes}
    parts: set[str] = set()
    for node in reversed(nodes):
        if node.relation == "concat" or node.name in parts:
            gates = (gate for gate in node.gates if gate in by_name)
            parts.update(gate for gate in gates if by_name[gate].rows > 1)
    return frozenset(parts)
