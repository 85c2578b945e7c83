"""Which chunks of a source's nodes can begin.

Owns: what has changed since it was asked last, and which units were given to a chunk already, or
to the pool of a node whose rows are bound late. Does not own: the rows (tables.py), the prompts
(prompts.py), what a unit is (units.py), nor what becomes of a prompt (prompt_table.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from dataflow.arrays import any_true
from engine.coordinator.blocks import Blocks, Readings
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.chunk_inputs import held_blocks, table_readings
from engine.coordinator.concat_rows import joined_state
from engine.coordinator.lost_rows import lengthen
from engine.coordinator.prompts import FIRST_SLOTS, NO_PART, RUNNING, PromptStates
from engine.coordinator.reduced_rows import reduced_state, uppers
from engine.coordinator.replica_loads import FindLoads, lead_of_chunk, planned_loads
from engine.coordinator.tables import (
    ABSENT,
    PENDING,
    PRESENT,
    RowTable,
    input_state,
    read_by,
    split_by_loads,
    split_by_prompt,
    states_in,
)
from engine.coordinator.unit_pool import UnitPool, WaitingUnit
from engine.coordinator.units import NodeUnits, cut_by_loads, cut_by_weight, whole_weights
from engine.plan.plan import PlannedNode


class Readiness:
    """For the nodes of a source, in running order; the source is the first."""

    def __init__(
        self,
        nodes: Sequence[PlannedNode],
        prompts: PromptStates,
        tables: Mapping[str, RowTable],
        blocks: Blocks,
        loads: FindLoads = planned_loads,
    ) -> None:
        self._nodes = nodes
        self._loads = loads
        self._prompts = prompts
        self._tables = tables
        self._blocks = blocks
        self._gates = {n.name: frozenset(n.gates) for n in nodes}
        self._uppers = uppers(nodes)
        self.units = {n.name: NodeUnits(n) for n in nodes}
        self._issued = {
            name: np.zeros((FIRST_SLOTS, units.count), dtype=bool)
            for name, units in self.units.items()
        }
        """Units that are in a chunk, or in the pool."""
        self._trained = {n.name for n in nodes if any(use.trained for use in n.models)}
        self._has_begun = np.zeros(FIRST_SLOTS, dtype=bool)
        """Prompts that a node which reads a trained Model was given rows of, or may have been."""
        self._weighed_by = _weighed_by(nodes)
        self.pools = {
            n.name: UnitPool(n, prompts, self.units[n.name].sizes.tolist(), partial(self._bind, n))
            for n in nodes
            if n.binds_late
        }
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

    def note_begun(self, slots: np.ndarray) -> None:
        """These prompts have rows, whatever was given to whom here."""
        self._has_begun[slots] = True

    def find_unbegun(self) -> np.ndarray:
        """Slots of the running prompts that no trained Model has had a part in."""
        running = self._prompts.slots(RUNNING)
        return running[~self._has_begun[running]]

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

    def reopen(self, node: PlannedNode, at: np.ndarray, rows: np.ndarray) -> list[NodeChunk]:
        """Another chunk is to make these output rows: returns the source's; `pump` finds the
        others.
        """
        if node.relation == "source":
            prompts = self._prompts.sort_slots(np.unique(at))
            if not len(prompts):
                return []
            samples = np.zeros(len(prompts), dtype=np.int64)
            return [NodeChunk(node, self._prompts.keys(prompts, samples), {})]
        self._issued[node.name][at, self.units[node.name].of_rows[rows]] = False
        self._dirty.update(at.tolist())
        self._touched.update(node.gates)
        return []

    def recall(self, slots: np.ndarray) -> None:
        """Rows of these prompts are no longer what they were: take their units back from the pools,
        to be looked at again.
        """
        at = frozenset(slots.tolist())
        for node in self._nodes:
            pool = self.pools.get(node.name)
            for unit in pool.recall(at) if pool is not None else ():
                self._issued[node.name][unit.slot, unit.unit] = False
                self._dirty.add(unit.slot)
                self._touched.update(node.gates)

    def forget(self, slots: np.ndarray) -> None:
        """Forget these prompts."""
        for issued in self._issued.values():
            issued[slots] = False
        self._has_begun[slots] = False
        if self._dirty:
            self._dirty.difference_update(slots.tolist())
        if self._waits:
            gone = set(slots.tolist())
            waits = ((cohort, slot) for cohort, slot in self._waits.items() if slot not in gone)
            self._waits = dict(waits)

    def grow(self, slots: int) -> None:
        """Room for this many slots."""
        self._issued = {name: lengthen(old, slots) for name, old in self._issued.items()}
        self._has_begun = lengthen(self._has_begun, slots)

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

    def waiting(self) -> list[str]:
        """For the watchdog: which node waits for whose rows, in words."""
        lines = []
        slots = self._prompts.slots(RUNNING)
        for node in self._nodes:
            missing = self._tables[node.name].state[slots] == PENDING
            if missing.any():
                gates = ", ".join(node.gates) or "its data"
                first = int(self._prompts.position[slots[missing.any(axis=1)][0]])
                count = int(missing.sum())
                what = f"{count} rows have not come (first: prompt {first})"
                lines.append(f"{node.name}: {what}; it reads {gates}")
        return lines

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
        yield from self._issue_present(node, slots, state)

    def _issue_present(
        self, node: PlannedNode, slots: np.ndarray, state: np.ndarray
    ) -> Iterator[NodeChunk]:
        """Chunks of the units whose input row is there and that are in none."""
        is_there = self.units[node.name].widen(state == PRESENT)
        ready = is_there & ~self._issued[node.name][slots]
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
            yield from self._issue_present(node, mates, state)

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
        units = self.units[node.name]
        gone = units.widen(state == ABSENT) & ~self._issued[node.name][slots]
        if any_true(gone):
            where, sample = np.nonzero(gone[:, units.of_rows])
            self._tables[node.name].state[slots[where], sample] = ABSENT
            self._issued[node.name][slots] |= gone
            self._touched.add(node.name)

    def _issue(
        self, node: PlannedNode, slots: np.ndarray, ready: np.ndarray
    ) -> Iterator[NodeChunk]:
        """Chunks of these units; `slots` are sorted by position, so rows by key. Where rows are
        bound late they go into the pool.
        """
        where, units = ready.nonzero()
        at = slots[where]
        issued = self._issued[node.name]
        issued.reshape(-1)[at * issued.shape[1] + units] = True
        if node.name in self.pools:
            self._wait_for_slots(node, at, units)
        elif node.name in self._weighed_by or node.tail or self.units[node.name].per_row > 1:
            yield from self._cut_by_weight(node, at, units)
        elif node.chunks == 1:
            yield self._chunk(node, at, units)
        elif loads := self._loads(node):
            tokens = self._tokens(node, at, units)
            for number, rows in enumerate(
                split_by_loads(self._prompts.position[at], tokens, loads)
            ):
                yield from self._chunk_of_replica(node, number, len(loads), at[rows], units[rows])
        else:
            tokens = self._tokens(node, at, units)
            for rows in split_by_prompt(self._prompts.position[at], tokens, node.chunks):
                yield self._chunk(node, at[rows], units[rows])

    def _chunk_of_replica(
        self, node: PlannedNode, number: int, chunks: int, at: np.ndarray, units: np.ndarray
    ) -> Iterator[NodeChunk]:
        """The chunk that was cut for one replica, if it has a unit."""
        if len(at):
            chunk = self._chunk(node, at, units)
            chunk.replica = lead_of_chunk(node, number, chunks)
            yield chunk

    def _wait_for_slots(self, node: PlannedNode, at: np.ndarray, units: np.ndarray) -> None:
        """Put these units into the pool."""
        weights = [0.0] * len(at)
        if node.name in self._weighed_by:
            samples = self.units[node.name].inputs_of(units)
            weights = self._weights(node, at, samples).tolist()
        self.pools[node.name].add(at.tolist(), units.tolist(), weights)

    def _cut_by_weight(
        self, node: PlannedNode, at: np.ndarray, units: np.ndarray
    ) -> Iterator[NodeChunk]:
        """Chunks of equal weight: of what the node is told, else of the tokens that are known."""
        of_node = self.units[node.name]
        samples = of_node.inputs_of(units)
        if node.name in self._weighed_by:
            of_rows = whole_weights(self._weights(node, at, samples))
        else:
            of_rows = self._tokens(node, at, units) + 1
        weights = of_rows * of_node.sizes_of(units)
        row = self._prompts.position[at] * node.inner + samples
        loads = () if node.tail else self._loads(node)
        if loads:
            cut = cut_by_loads(weights, row, loads)
        else:
            cut = cut_by_weight(weights, row, node.chunks, node.tail, node.tail_chunks)
        for number, mine in enumerate(cut):
            if node.name in self._weighed_by:  # else by key, as in every other chunk
                mine = mine[np.lexsort((mine, -of_rows[mine]))]
            if loads:
                yield from self._chunk_of_replica(node, number, len(loads), at[mine], units[mine])
            else:
                yield self._chunk(node, at[mine], units[mine])

    def _tokens(self, node: PlannedNode, at: np.ndarray, units: np.ndarray) -> np.ndarray:
        """int64: the tokens that are known of each unit's input row."""
        inputs = self._inputs(node, at, self.units[node.name].inputs_of(units))
        return self._blocks.tokens(inputs, len(at))

    def _weights(self, node: PlannedNode, at: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """float32: how much each of these input rows is expected to take; 0 where nobody says."""
        if node.name not in self._weighed_by:
            return np.zeros(len(at), dtype=np.float32)
        producer, ratio = self._weighed_by[node.name]
        block, row = self._tables[producer].where(at, samples, ratio)
        return self._blocks.weights(block, row)

    def _bind(self, node: PlannedNode, waiting: Sequence[WaitingUnit]) -> NodeChunk:
        """The chunk of some units of the pool: by key, but the heavier first where weights say."""
        at = np.array([unit.slot for unit in waiting], dtype=np.int64)
        units = np.array([unit.unit for unit in waiting], dtype=np.int64)
        if len(waiting) == 1:
            return self._chunk(node, at, units)
        lightness = np.array([unit.lightness for unit in waiting])
        order = np.lexsort((units, self._prompts.position[at], lightness))
        return self._chunk(node, at[order], units[order])

    def _inputs(self, node: PlannedNode, at: np.ndarray, samples: np.ndarray) -> Readings:
        return table_readings(node, self._tables, self._blocks, at, samples, self._prompts.keys)

    def _chunk(self, node: PlannedNode, at: np.ndarray, units: np.ndarray) -> NodeChunk:
        of_node = self.units[node.name]
        first, spans = of_node.join(at, units)
        at, samples = at[first], of_node.inputs_of(units[first])
        if node.name in self._trained:
            self._has_begun[at] = True
        inputs = self._inputs(node, at, samples)
        chunk = NodeChunk(node, self._prompts.keys(at, samples), inputs, held_blocks(inputs))
        chunk.spans = spans
        if node.name in self._weighed_by:
            chunk.weights = self._weights(node, at, samples)
        return chunk


def _weighed_by(nodes: Sequence[PlannedNode]) -> dict[str, tuple[str, int]]:
    """Generations whose rows have weights: the producer of these, and the generation's input rows
    for each of its rows.
    """
    by_name = {n.name: n for n in nodes}
    weighed_by: dict[str, tuple[str, int]] = {}
    for node in nodes:
        gates = [i.gate for i in node.inputs if i.name == "weight" and not i.fetches]
        for gate in gates if node.traits.generates else ():
            producer = by_name[gate]
            while producer.relation == "subset" and not producer.weight:
                producer = by_name[producer.inputs[0].gate]  # it moves no rows
            if producer.weight:
                weighed_by[node.name] = (producer.name, node.inner // producer.rows)
    return weighed_by
