"""Which chunks of a source's nodes can begin.

Owns: what has changed since it was asked last, and which rows were given to a chunk already. Does
not own: the rows (tables.py), the prompts (prompts.py), nor what becomes of a prompt
(prompt_table.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from dataflow.arrays import any_true
from engine.coordinator.blocks import Blocks
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.chunk_inputs import held_blocks, table_readings
from engine.coordinator.concat_rows import joined_state
from engine.coordinator.lost_rows import lengthen
from engine.coordinator.prompts import FIRST_SLOTS, NO_PART, RUNNING, PromptStates
from engine.coordinator.reduced_rows import reduced_state, uppers
from engine.coordinator.tables import (
    ABSENT,
    PENDING,
    PRESENT,
    RowTable,
    input_state,
    read_by,
    split_by_prompt,
    states_in,
)
from engine.plan.plan import PlannedNode


class Readiness:
    """For the nodes of a source, in running order; the source is the first."""

    def __init__(
        self,
        nodes: Sequence[PlannedNode],
        prompts: PromptStates,
        tables: Mapping[str, RowTable],
        blocks: Blocks,
    ) -> None:
        self._nodes = nodes
        self._prompts = prompts
        self._tables = tables
        self._blocks = blocks
        self._gates = {n.name: frozenset(n.gates) for n in nodes}
        self._uppers = uppers(nodes)
        self._issued = {n.name: np.zeros((FIRST_SLOTS, n.inner), dtype=bool) for n in nodes}
        self._dirty: set[int] = set()
        """Slots."""
        self._touched: set[str] = set()
        self._waits: dict[tuple[str, int], int] = {}
        """(node, cohort) -> the slot of a prompt of it that was not decided when last looked at."""
        self._unmade = False
        """Whether lost rows are being made again: a gate may then be there, and the bytes not."""

    # --- what has changed -------------------------------------------------------------------------

    def note_changed(self, node: str, slots: np.ndarray) -> None:
        """Rows of a node have come, or never will."""
        self._dirty.update(slots.tolist())
        self._touched.add(node)

    def changed_one(self, node: str, slot: int) -> None:
        """A row of a node has come."""
        self._dirty.add(slot)
        self._touched.add(node)

    def changed_all(self) -> None:
        """A cohort no longer waits for prompts that are gone."""
        self._dirty.update(self._prompts.slots(RUNNING).tolist())
        self._touched.update(n.name for n in self._nodes)

    def note_part(self, slots: np.ndarray, roots: Iterable[str]) -> None:
        """These prompts are a part of a streamed Step: nodes below the roots can run on them."""
        self._dirty.update(slots.tolist())
        self._touched.update(roots)

    def has_unissued(self, name: str) -> bool:
        """Whether a row of this node may still come and is in no chunk yet."""
        slots = self._prompts.slots(RUNNING)
        pending = (self._tables[name].state[slots] == PENDING).any(axis=1)
        return bool((~self._issued[name][slots[pending]]).any())

    def note_settled(self) -> None:
        """Nothing has changed."""
        self._dirty.clear()
        self._touched.clear()

    def give_up(self, node: str, slots: np.ndarray) -> None:
        """No chunk of the node is to have these prompts."""
        self._issued[node][slots] = True

    def unmade(self) -> None:
        """From now on, rows that have come may be gone."""
        if not self._unmade:
            self._unmade = True
            self._gates = {n.name: read_by(n) for n in self._nodes}

    def reopen(self, node: PlannedNode, at: np.ndarray, samples: np.ndarray) -> list[NodeChunk]:
        """Another chunk is to make these rows: returns the source's; `pump` finds the others."""
        if node.relation == "source":
            prompts = self._prompts.sort_slots(np.unique(at))
            if not len(prompts):
                return []
            samples = np.zeros(len(prompts), dtype=np.int64)
            return [NodeChunk(node, self._prompts.keys(prompts, samples), {})]
        self._issued[node.name][at, samples] = False
        self._dirty.update(at.tolist())
        self._touched.update(node.gates)
        return []

    def forget(self, slots: np.ndarray) -> None:
        """Forget these prompts."""
        for issued in self._issued.values():
            issued[slots] = False
        if self._dirty:
            self._dirty.difference_update(slots.tolist())
        if self._waits:
            gone = set(slots.tolist())
            waits = ((cohort, slot) for cohort, slot in self._waits.items() if slot not in gone)
            self._waits = dict(waits)

    def grow(self, slots: int) -> None:
        """Room for this many slots."""
        self._issued = {name: lengthen(old, slots) for name, old in self._issued.items()}

    # --- what can begin ---------------------------------------------------------------------------

    def pump(self) -> tuple[np.ndarray, list[NodeChunk]]:
        """The prompts that changed, and the chunks that can run now and could not before; passes
        absent rows on downstream.
        """
        slots = np.array([*self._dirty], dtype=np.int64)
        slots = self._prompts.sort_slots(slots[self._prompts.status[slots] == RUNNING])
        chunks: list[NodeChunk] = []
        nodes = self._nodes[1:] if len(slots) else ()
        # In running order: a node that passes absent rows on touches itself, for those below it.
        for node in nodes:
            if not self._touched.isdisjoint(self._gates[node.name]):
                chunks += self._ready(node, slots)
        self.note_settled()
        return slots, chunks

    @property
    def has_changes(self) -> bool:
        """Whether `pump` may find anything."""
        return bool(self._touched)

    def _ready(self, node: PlannedNode, slots: np.ndarray) -> Iterator[NodeChunk]:
        """The chunks of a node that can begin, now that rows of these prompts are decided."""
        state = self._input_state(node, slots)
        states = states_in(state)
        if ABSENT in states:
            self._pass_on_absent(node, slots, state)
        cohorts = node.chunking != "ready"
        if PENDING in states and (cohorts or node.scope == "group"):
            decided = (state != PENDING).all(axis=1)
            slots, state = slots[decided], state[decided]
        if not len(slots):
            return
        if cohorts:
            yield from self._whole_cohorts(node, slots)
            return
        ready = (state == PRESENT) & ~self._issued[node.name][slots]
        if any_true(ready):
            yield from self._issue(node, slots, ready)

    def _whole_cohorts(self, node: PlannedNode, slots: np.ndarray) -> Iterator[NodeChunk]:
        """The chunks of each cohort of these prompts (of a node that takes parts of a streamed
        Step, of each part) of which every row is decided.
        """
        cohort = self._cohort(node)
        for number in sorted(set(cohort[slots].tolist()) - {NO_PART}):
            if self._still_waits(node, number):
                continue
            of_cohort = (self._prompts.status == RUNNING) & (cohort == number)
            mates = self._prompts.sort_slots(of_cohort.nonzero()[0])
            state = self._input_state(node, mates)
            if PENDING in states_in(state):
                pending = mates[(state == PENDING).any(axis=1)]
                self._waits[node.name, number] = int(pending[-1])  # as rows come about in order
                continue
            ready = (state == PRESENT) & ~self._issued[node.name][mates]
            if any_true(ready):
                yield from self._issue(node, mates, ready)

    def _cohort(self, node: PlannedNode) -> np.ndarray:
        """int64 [slots]: the number of the prompts that share a chunk of this node."""
        return self._prompts.part if node.chunking == "part" else self._prompts.cohort

    def _still_waits(self, node: PlannedNode, number: int) -> bool:
        """Whether the prompt that a cohort was seen to wait for is still not decided: all others
        are looked at only once it is.
        """
        slot = self._waits.pop((node.name, number), -1)
        prompts = self._prompts
        if slot < 0 or prompts.status[slot] != RUNNING or self._cohort(node)[slot] != number:
            return False
        waits = PENDING in states_in(self._input_state(node, np.array([slot])))
        if waits:
            self._waits[node.name, number] = slot
        return waits

    def _input_state(self, node: PlannedNode, slots: np.ndarray) -> np.ndarray:
        """uint8 [slots, inner]: PRESENT if every input has come, ABSENT if one never will."""
        above, unmade = self._uppers.get(node.name, ()), self._unmade
        if node.relation == "concat":
            return joined_state(node, self._tables, slots, above, unmade=unmade)
        reduced = partial(
            reduced_state, tables=self._tables, slots=slots, above=above, unmade=unmade
        )
        return input_state(node, self._tables, slots, unmade=unmade, reduced=reduced)

    def _pass_on_absent(self, node: PlannedNode, slots: np.ndarray, state: np.ndarray) -> None:
        gone = (state == ABSENT) & ~self._issued[node.name][slots]
        if any_true(gone):
            where, sample = np.nonzero(np.repeat(gone, node.rows // node.inner, axis=1))
            self._tables[node.name].state[slots[where], sample] = ABSENT
            self._issued[node.name][slots] |= gone
            self._touched.add(node.name)

    def _issue(
        self, node: PlannedNode, slots: np.ndarray, ready: np.ndarray
    ) -> Iterator[NodeChunk]:
        """Chunks of these rows, prompts whole; `slots` are sorted by position, so rows by key."""
        where, samples = ready.nonzero()
        at = slots[where]
        issued = self._issued[node.name]
        issued.reshape(-1)[at * issued.shape[1] + samples] = True
        if node.chunks == 1:
            yield self._chunk(node, at, samples)
            return
        tokens = self._blocks.tokens(self._chunk(node, at, samples).inputs, len(at))
        for rows in split_by_prompt(self._prompts.position[at], tokens, node.chunks):
            yield self._chunk(node, at[rows], samples[rows])

    def _chunk(self, node: PlannedNode, at: np.ndarray, samples: np.ndarray) -> NodeChunk:
        inputs = table_readings(node, self._tables, self._blocks, at, samples, self._prompts.keys)
        return NodeChunk(node, self._prompts.keys(at, samples), inputs, held_blocks(inputs))
