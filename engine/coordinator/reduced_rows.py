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
from engine.plan.plan import PlannedInput, PlannedNode


def uppers(nodes: Sequence[PlannedNode]) -> dict[str, tuple[PlannedNode, ...]]:
    """For each node that reduces or concatenates: the nodes that those rows come from."""
    named = {n.name: n for n in nodes}
    above: dict[str, frozenset[str]] = {}
    found = {}
    for node in nodes:
        gates = [g for g in node.gates if g in named]
        above[node.name] = frozenset(gates).union(*(above[g] for g in gates))
        of = [i.gate for i in node.inputs if i.fan_in or i.width]
        if of:
            uppers_of = frozenset(of).union(*(above[gate] for gate in of))
            found[node.name] = tuple(named[name] for name in sorted(uppers_of))
    return found


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
    found = _each(np.where(gate == PENDING, PENDING, PRESENT), i.fan_in)
    for fetch in i.fetches if unmade else ():
        held = np.repeat(tables[fetch.producer].state[slots], fetch.ratio, axis=1)
        lacks = (gate == PRESENT) & (held == PENDING)
        found = np.minimum(found, _each(np.where(lacks, PENDING, PRESENT), i.fan_in))
    gone = dropped(tables, slots, above)
    return np.where(gone[:, None] & (found == PRESENT), np.uint8(ABSENT), found)


def dropped(
    tables: Mapping[str, RowTable], slots: np.ndarray, above: Sequence[PlannedNode]
) -> np.ndarray:
    """Boolean [slots]: prompts that one of these nodes gave up, or kept nothing of and refills."""
    found = np.zeros(len(slots), dtype=bool)
    for node in above:
        found |= tables[node.name].given_up[slots]
        if node.refill:
            found |= (tables[node.name].state[slots] == ABSENT).all(axis=1)
    return found


def _each(state: np.ndarray, fan_in: int) -> np.ndarray:
    """The least state of the descendants of each row."""
    return state.reshape(len(state), -1, fan_in).min(axis=2).astype(np.uint8)


def descendants(
    table: RowTable, fan_in: int, at: np.ndarray, samples: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(row, sample) of each descendant that is there: the index of its row, and its sample."""
    below = samples[:, None] * fan_in + np.arange(fan_in)
    owner, which = np.nonzero(table.state[at[:, None], below] == PRESENT)
    return owner, below[owner, which]
