"""Tables of arrived rows, as arrays.

Owns: for each node, which rows of which prompts have come and in which block they lie. Does not
own: which prompts there are (prompts.py), where the blocks are (blocks.py), nor any row: these are
a few bytes each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dataflow.arrays import all_true, any_true, same_array
from dataflow.batch import Keys
from engine.coordinator.balance import split_by_load, split_evenly
from engine.coordinator.lost_rows import LostRows, lengthen
from engine.plan.plan import PlannedNode
from engine.plan.planned_input import Fetch, PlannedInput
from engine.protocol.grouping import group_indices
from engine.protocol.refs import Ref
from engine.protocol.staleness import NO_VERSION

PENDING, PRESENT, ABSENT = 0, 1, 2
"""A row that may still come; has come; never will (selected away, or its group dropped)."""

NO_BLOCK = -1

_SAMPLE_BITS = np.int64(20)


class RowTable:
    """The output rows of one node: arrays [slots, rows]; a slot is an outstanding prompt.

    state says which rows go on downstream. block is the number of a row's block, NO_BLOCK where
    none came: the rows of a failed group are ABSENT, and hold their blocks until the prompt is
    retired. given_up [slots]: whether a row of the node failed for good. dated: whether any row had
    a version, which rows that no trained Model had a part in never have. lost: None until a row is
    lost alone (lost_rows.py). remade: None until rows that had come have to be made again; which.
    """

    __slots__ = (
        *("block", "dated", "given_up", "lost", "remade", "row", "rows", "state", "version"),
    )

    def __init__(self, rows: int, slots: int) -> None:
        self.rows = rows
        self.dated = False
        self.state = np.full((slots, rows), PENDING, dtype=np.uint8)
        self.block = np.full((slots, rows), NO_BLOCK, dtype=np.int64)
        self.row = np.zeros((slots, rows), dtype=np.int32)
        self.version = np.full((slots, rows), NO_VERSION, dtype=np.int32)
        self.given_up = np.zeros(slots, dtype=bool)
        self.lost: LostRows | None = None
        self.remade: np.ndarray | None = None

    def grow(self, slots: int) -> None:
        """Room for this many slots."""
        wider = RowTable(self.rows, slots)
        for name in ("state", "block", "row", "version", "given_up"):
            old, new = getattr(self, name), getattr(wider, name)
            new[: len(old)] = old
            setattr(self, name, new)
        if self.lost is not None:
            self.lost.grow(slots)
        if self.remade is not None:
            self.remade = lengthen(self.remade, slots)

    def put(
        self, slots: np.ndarray, samples: np.ndarray, number: int, rows: np.ndarray, ref: Ref
    ) -> None:
        """These rows of a block have come."""
        entry = self.entries(slots, samples)
        self.state.reshape(-1)[entry] = PRESENT
        self.block.reshape(-1)[entry] = number
        self.row.reshape(-1)[entry] = rows
        version = ref.version[rows]
        self.version.reshape(-1)[entry] = version
        self.dated = self.dated or any_true(version != NO_VERSION)

    def entries(self, slots: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """int64: where these rows are in an array of the table that is laid flat, which NumPy reads
        and writes in a quarter of the time that two indices take.
        """
        return slots * self.rows + samples

    def where(
        self, slots: np.ndarray, samples: np.ndarray, ratio: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """(block, row) of each of these rows; with a ratio, of its ancestor row."""
        entry = self.entries(slots, samples // ratio if ratio > 1 else samples)
        return self.block.reshape(-1)[entry], self.row.reshape(-1)[entry]

    def put_one(self, slot: int, sample: int, number: int, version: int) -> bool:
        """The one row of a block has come; False, and nothing changes, where it is not awaited."""
        if self.state[slot, sample] != PENDING:
            return False
        self.state[slot, sample] = PRESENT
        self.block[slot, sample] = number
        self.row[slot, sample] = 0
        self.version[slot, sample] = version
        self.dated = self.dated or version != NO_VERSION
        return True

    def lose_one(self, slot: int, sample: int, *, failed: bool) -> None:
        """One row never comes, and its group goes on without it."""
        if self.lost is None:
            self.lost = LostRows(*self.state.shape)
        self.state[slot, sample] = ABSENT
        self.lost.add(slot, sample, failed=failed)

    def emptied(self, slots: np.ndarray) -> np.ndarray:
        """Boolean [slots]: the prompts of which no row is left, some of them lost alone."""
        if self.lost is None:
            return np.zeros(len(slots), dtype=bool)
        return self.lost.any_of(slots) & (self.state[slots] == ABSENT).all(axis=1)

    def remake(self, slots: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """These rows had come and are gone; returns the block of each."""
        if self.remade is None:
            self.remade = np.zeros(self.state.shape, dtype=bool)
        blocks = self.block[slots, samples]
        self.remade[slots, samples] = True
        self.state[slots, samples] = PENDING
        self.block[slots, samples] = NO_BLOCK
        self.version[slots, samples] = NO_VERSION
        return blocks

    def lies_in(self, slots: np.ndarray, blocks: frozenset[int]) -> np.ndarray:
        """Boolean [slots, rows]: the rows that have come, in one of these blocks."""
        return np.isin(self.block[slots], list(blocks)) & (self.state[slots] == PRESENT)

    def oldest(self, slots: np.ndarray) -> int:
        """The oldest version of the rows of these slots, NO_VERSION where none has one."""
        known = self.version[slots][self.version[slots] != NO_VERSION]
        return int(known.min()) if len(known) else NO_VERSION

    def clear(self, slots: np.ndarray) -> np.ndarray:
        """Forget these slots; returns the blocks of the rows that had come, one entry a row."""
        blocks = self.block[slots]
        self.state[slots] = PENDING
        self.block[slots] = NO_BLOCK
        self.version[slots] = NO_VERSION
        self.given_up[slots] = False
        if self.lost is not None:
            self.lost.clear(slots)
        if self.remade is not None:
            self.remade[slots] = False
        return blocks[blocks != NO_BLOCK]


def states_in(state: np.ndarray) -> bytes:
    """The states that occur, to ask `PENDING in`: for a few rows a tenth of the time of `any`."""
    return state.astype(np.uint8, copy=False).tobytes()


def input_state(
    node: PlannedNode,
    tables: Mapping[str, RowTable],
    slots: np.ndarray,
    *,
    unmade: bool,
    reduced: Callable[[PlannedInput], np.ndarray],
) -> np.ndarray:
    """uint8 [slots, inner]: PRESENT where every input of a node has come, ABSENT where some input
    never will; for whole cohorts PENDING until every input is decided, since a row that fails late
    takes its group with it, and the others of that are to be in a chunk or not whatever comes
    first.

    unmade: whether rows may have been lost that are to be made again: then a gate can be there, and
    the bytes not, or not ever, where the group was given up meanwhile. reduced: the state of an
    input that is reduced (reduced_rows.py).
    """
    first, rest = (PENDING, np.maximum) if node.chunking != "ready" else (ABSENT, np.minimum)
    state: np.ndarray | None = None
    for i in node.inputs:
        if i.fan_in:
            wide = reduced(i)
        else:
            gate = tables[i.gate].state[slots]
            wide = np.repeat(gate, i.ratio, axis=1) if i.ratio > 1 else gate
        if state is None:
            state = wide
        elif ABSENT not in states_in(wide) and ABSENT not in states_in(state):
            state = np.minimum(state, wide)
        else:
            is_first = (wide == first) | (state == first)
            state = np.where(is_first, first, rest(state, wide))
    assert state is not None  # only a source has no input, and a source is never asked
    if not unmade:
        return state
    for i in node.inputs:
        if not i.fan_in:
            state = with_bytes(state, i.fetches, tables, slots)
    return state


def with_bytes(
    state: np.ndarray, fetches: Iterable[Fetch], tables: Mapping[str, RowTable], slots: np.ndarray
) -> np.ndarray:
    """The same, with the state of a row that is fetched wherever that is not PRESENT."""
    for fetch in fetches:
        fetched = np.repeat(tables[fetch.producer].state[slots], fetch.ratio, axis=1)
        lacks_bytes = (fetched != PRESENT) & (state == PRESENT)
        state = np.where(lacks_bytes, fetched, state)
    return state


def read_by(node: PlannedNode) -> frozenset[str]:
    """The nodes whose rows a node waits for or reads."""
    nodes = set(node.gates)
    for i in node.inputs:
        nodes.update(fetch.producer for fetch in i.fetches)
    return frozenset(nodes)


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """Rows of one node within a Step, sorted by (position, sample), and where they lie."""

    keys: Keys
    block: np.ndarray
    row: np.ndarray

    def find(self, keys: Keys, ratio: int) -> tuple[np.ndarray, np.ndarray]:
        """(block, row) for each key; with a ratio, of its ancestor row. All have to be there."""
        if ratio == 1 and self._same(keys):
            return self.block, self.row
        want = codes(keys.position, keys.sample // ratio)
        at = np.searchsorted(codes(self.keys.position, self.keys.sample), want)
        return self.block[at], self.row[at]

    def having(self, keys: Keys, ratio: int) -> Keys:
        """Those of the keys whose row (with a ratio, whose ancestor's) is among these."""
        if ratio == 1 and self._same(keys):
            return keys
        ancestors = codes(keys.position, keys.sample // ratio)
        is_there = np.isin(ancestors, codes(self.keys.position, self.keys.sample))
        return keys if all_true(is_there) else keys.take(is_there)

    def below(self, keys: Keys, fan_in: int) -> tuple[Keys, Keys]:
        """The rows that descend from one of the keys (at most fan_in from each), and their keys."""
        owners = Keys(self.keys.position, self.keys.sample // fan_in, self.keys.attempt)
        mine = np.isin(codes(owners.position, owners.sample), codes(keys.position, keys.sample))
        return self.keys.take(mine), owners.take(mine)

    def _same(self, keys: Keys) -> bool:
        mine = self.keys
        return keys is mine or (
            same_array(keys.position, mine.position) and same_array(keys.sample, mine.sample)
        )

    @staticmethod
    def merge(parts: Iterable[StepRows]) -> StepRows:
        """All rows of the parts, sorted."""
        parts = list(parts)
        if not parts:
            no_block, no_row = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
            return StepRows(Keys.of([]), no_block, no_row)
        keys = Keys.concat([p.keys for p in parts])
        order = keys.order()
        block = np.concatenate([p.block for p in parts])
        row = np.concatenate([p.row for p in parts])
        return StepRows(keys.take(order), block[order], row[order])


def codes(position: np.ndarray, sample: np.ndarray) -> np.ndarray:
    """One sortable int64 for (position, sample)."""
    return (position << _SAMPLE_BITS) | sample.astype(np.int64)


def split_by_prompt(positions: np.ndarray, tokens: np.ndarray, parts: int) -> list[np.ndarray]:
    """Indices into sorted positions, ascending, in at most `parts` parts of whole prompts: with
    about equal tokens if any row has some, else runs of about equally many prompts.

    tokens: of each row. The result depends on nothing else.
    """
    if parts == 1 or not tokens.any():
        return split_in_runs(positions, parts)
    share = shares(positions, tokens, parts)
    full_parts = (rows for rows in group_indices(share, parts) if len(rows))
    return sorted(full_parts, key=lambda rows: int(rows[0]))


def shares(
    positions: np.ndarray, tokens: np.ndarray, parts: int, loads: Sequence[int] = ()
) -> np.ndarray:
    """int64 [rows]: each row's part; prompts whole, tokens (and one more a row) balanced. loads: of
    each part, in whose proportion; none: equal.
    """
    _, prompt = np.unique(positions, return_inverse=True)
    weights = np.zeros(prompt.max(initial=-1) + 1, dtype=np.int64)
    np.add.at(weights, prompt, tokens + 1)
    if loads:
        return split_by_load(weights, loads)[prompt]
    return split_evenly(weights, parts)[prompt]


def split_in_runs(positions: np.ndarray, parts: int) -> list[np.ndarray]:
    """Indices into sorted positions, in at most so many runs of about as many prompts each."""
    return [rows for rows in cut_runs(positions, (1,) * parts) if len(rows)]


def cut_runs(positions: np.ndarray, loads: Sequence[int]) -> list[np.ndarray]:
    """Indices into sorted positions, in one run for each load, of whole prompts, whose numbers are
    in the proportion of the loads; a run may be empty.
    """
    starts = np.flatnonzero(np.diff(positions, prepend=positions[0] - 1))
    ends = [sum(loads[: number + 1]) for number in range(len(loads))]
    edges = [0, *(len(starts) * end // ends[-1] for end in ends)]
    row_edges = np.append(starts, len(positions))[edges].tolist()
    return [np.arange(start, end) for start, end in pairwise(row_edges)]


def split_by_loads(
    positions: np.ndarray, tokens: np.ndarray, loads: Sequence[int]
) -> list[np.ndarray]:
    """The same as `split_by_prompt` in the proportion of loads: the rows of each part, which may be
    none.
    """
    if not tokens.any():
        return cut_runs(positions, loads)
    return group_indices(shares(positions, tokens, len(loads), loads), len(loads))
