"""What goes up: the rows below each row of a node that reduces, as far as they are left.

Owns: when they are decided, which of them there are, and which prompts are dropped above. Does not
own: the tables (tables.py), nor what a kernel makes of a row without any (it tombstones it).

A row waits until each of its descendants has come or never will. Where its prompt was given up
above, or a select that refills kept nothing of it, it never comes: that prompt is dropped already,
and no row of it fails once more. All of this follows from tables that are decided when the
descendants are, so it does not depend on what came first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.coordinator.tables import ABSENT, PENDING, PRESENT, RowTable
from engine.plan.plan import PlannedNode
from engine.plan.planned_input import PlannedInput


def uppers(nodes: Sequence[PlannedNode]) -> dict[str, tuple[PlannedNode, ...]]:
    """For each node that reduces or concatenates: the nodes that those rows come from."""
    by_name = {n.name: n for n in nodes}
    above: dict[str, frozenset[str]] = {}
    """Node -> all nodes that it stands on."""
    uppers_of: dict[str, tuple[PlannedNode, ...]] = {}
    for node in nodes:
        gates = [gate for gate in node.gates if gate in by_name]
        above[node.name] = _with_above(gates, above)
        own_rows_from = [i.gate for i in node.inputs if i.fan_in or i.width]
        if own_rows_from:
            names = sorted(_with_above(own_rows_from, above))
            uppers_of[node.name] = tuple(by_name[name] for name in names)
    return uppers_of


def _with_above(gates: Sequence[str], above: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """These nodes, and all that they stand on."""
    return frozenset(gates).union(*(above[gate] for gate in gates))


def reduced_state(
    i: PlannedInput,
    tables: Mapping[str, RowTable],
    slots: np.ndarray,
    above: Sequence[PlannedNode],
    *,
    unmade: bool,
) -> np.ndarray:
    """uint8 [slots, inner]: PENDING until every descendant of a row is decided, then PRESENT, even
    if none is left; ABSENT where the prompt is dropped. unmade: as in `tables.input_state`.
    """
    gate = tables[i.gate].state[slots]
    state = _least_below(np.where(gate == PENDING, PENDING, PRESENT), i.fan_in)
    fetches = i.fetches if unmade else ()
    for fetch in fetches:
        fetched = np.repeat(tables[fetch.producer].state[slots], fetch.ratio, axis=1)
        lacks_bytes = (gate == PRESENT) & (fetched == PENDING)
        bytes_state = np.where(lacks_bytes, PENDING, PRESENT)
        state = np.minimum(state, _least_below(bytes_state, i.fan_in))
    gone = dropped_prompts(tables, slots, above)
    return np.where(gone[:, None] & (state == PRESENT), np.uint8(ABSENT), state)


def dropped_prompts(
    tables: Mapping[str, RowTable], slots: np.ndarray, above: Sequence[PlannedNode]
) -> np.ndarray:
    """Boolean [slots]: prompts that one of these nodes gave up, lost the last rows of, or kept
    nothing of and refills.
    """
    is_dropped = np.zeros(len(slots), dtype=bool)
    for node in above:
        table = tables[node.name]
        is_dropped |= table.given_up[slots]
        if table.lost is not None:
            is_dropped |= table.emptied(slots)
        if node.refill:
            is_dropped |= (table.state[slots] == ABSENT).all(axis=1)
    return is_dropped


def _least_below(state: np.ndarray, fan_in: int) -> np.ndarray:
    """The least state of the descendants of each row."""
    return state.reshape(len(state), -1, fan_in).min(axis=2).astype(np.uint8)


def find_descendants(
    table: RowTable, fan_in: int, at: np.ndarray, samples: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(row, sample) of each descendant that is there: the index of its row, and its sample."""
    below = samples[:, None] * fan_in + np.arange(fan_in)
    is_there = table.state[at[:, None], below] == PRESENT
    owner, which = is_there.nonzero()
    return owner, below[owner, which]
