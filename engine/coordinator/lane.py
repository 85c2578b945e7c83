"""One source's prompts on their way to the cut.

Owns: which prompts are outstanding, which of their rows have come, which rows a node may
run on next. Does not own: how many prompts are admitted and which form a Step (intake.py,
core.py), nor who runs a chunk.

A prompt is in one of these states:

    running    some row of it may still come          -> finished, rejected, dropped
    finished   every row at the cut has come           -> taken
    rejected   a refilling select kept nothing of it   -> retired at once, its credit returned
    dropped    a row of it failed for good             -> retired at once, its credit returned
    taken      its rows form the Step under way        -> retired when the Step is trained
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.messages import NO_VERSION, Gather, Key, Ref, SourceCut
from engine.coordinator.tables import ABSENT, PENDING, PRESENT, Blocks, StepRows, Table
from engine.plan.plan import Fetch, PlannedNode

FREE, RUNNING, FINISHED, REJECTED, DROPPED, TAKEN = range(6)
_FIRST_SLOTS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """Rows that a node may run on now."""

    node: PlannedNode
    keys: Keys
    inputs: dict[str, tuple[Gather, ...]]


class Lane:
    """The prompts of one source. `nodes`: the source and what stands on it above the cut, in running order.

    cut: names of the nodes whose rows have to be complete before a prompt is finished.
    """

    def __init__(self, source: str, nodes: Sequence[PlannedNode], cut: Sequence[str], blocks: Blocks) -> None:
        self.source = source
        self.nodes = tuple(nodes)
        self.cut = tuple(dict.fromkeys(cut))
        self.blocks = blocks
        self.next = 0
        self.watermark = 0
        self._retired: set[int] = set()
        self._tables = {n.name: Table(n.rows, _FIRST_SLOTS) for n in self.nodes}
        self._issued = {n.name: np.zeros((_FIRST_SLOTS, n.inner), dtype=bool) for n in self.nodes}
        self.status = np.zeros(_FIRST_SLOTS, dtype=np.uint8)
        self.position = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self.attempt = np.zeros(_FIRST_SLOTS, dtype=np.int32)
        self.begun = np.zeros(_FIRST_SLOTS, dtype=np.int32)
        self.cohort = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self.order = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        """Number of its admission: the age of a prompt among those of one version."""
        self._slot: dict[int, int] = {}
        self._free = list(range(_FIRST_SLOTS - 1, -1, -1))
        self._cohorts: dict[int, np.ndarray] = {}
        self._admissions = 0
        self._dirty: set[int] = set()
        self._refills = any(n.refill for n in self.nodes)

    # --- admission ----------------------------------------------------------------------------------------------

    def admit(self, positions: Sequence[int], attempts: Sequence[int], version: int) -> Ready:
        """Take up prompts as one cohort; returns the source's rows to make. `version`: the one they can begin with."""
        slots = np.array([self._take_slot(p) for p in positions], dtype=np.int64)
        self.position[slots] = positions
        self.attempt[slots] = attempts
        self.begun[slots] = version
        self.status[slots] = RUNNING
        self.order[slots] = self._admissions + np.arange(len(slots))
        number = self._admissions
        self.cohort[slots] = number
        self._cohorts[number] = slots
        self._admissions += len(slots)
        self.next = max(self.next, max(positions, default=-1) + 1)
        return Ready(self.nodes[0], self._keys(slots, np.zeros(len(slots), dtype=np.int64)), {})

    def outstanding(self) -> int:
        """Prompts that were admitted and are not retired; finished and taken ones count."""
        return len(self._slot)

    def running(self) -> bool:
        """Whether some prompt is on its way."""
        return bool((self.status == RUNNING).any())

    def slots(self, status: int) -> np.ndarray:
        """Slots in this state, in the order of their admission."""
        found = np.flatnonzero(self.status == status)
        return found[np.argsort(self.order[found], kind="stable")]

    # --- what comes in ------------------------------------------------------------------------------------------

    def produced(self, node: str, ref: Ref) -> None:
        """Rows have come. Those of a prompt that is not running, of an older attempt, or that came before are let go."""
        table = self._tables[node]
        slots = np.array([self._slot.get(int(p), -1) for p in ref.keys.position], dtype=np.int64)
        known = slots >= 0
        wanted = known & (self.status[slots] == RUNNING) & (self.attempt[slots] == ref.keys.attempt)
        samples = ref.keys.sample.astype(np.int64)
        wanted[wanted] = table.state[slots[wanted], samples[wanted]] == PENDING
        rows = np.flatnonzero(wanted)
        number = self.blocks.add(ref, len(rows))
        table.put(slots[rows], samples[rows], number, rows.astype(np.int32), ref)
        self._dirty.update(slots[rows].tolist())

    def closed(self, node: PlannedNode, keys: Keys) -> Key | None:
        """A chunk is done: a select's missing rows are absent; returns the first other row that never came, if any."""
        slots, samples = self._located(keys, node)
        table = self._tables[node.name]
        missing = table.state[slots, samples] == PENDING
        if not missing.any():
            return None
        if node.relation == "subset":
            table.state[slots[missing], samples[missing]] = ABSENT
            self._dirty.update(slots[missing].tolist())
            return None
        first = int(np.flatnonzero(missing)[0])
        return (int(self.position[slots[first]]), int(samples[first]), int(self.attempt[slots[first]]))

    def drop(self, position: int, attempt: int) -> bool:
        """The group of this prompt is given up; False where it was already, or is of another attempt."""
        slot = self._slot.get(position, -1)
        if slot < 0 or self.status[slot] != RUNNING or self.attempt[slot] != attempt:
            return False
        self.status[slot] = DROPPED
        self._dirty.add(slot)
        return True

    def _located(self, keys: Keys, node: PlannedNode) -> tuple[np.ndarray, np.ndarray]:
        """Slots and samples of the output rows of a chunk, as far as their prompts still run."""
        out = keys.expand(node.rows // node.inner) if node.rows > node.inner else keys
        slots = np.array([self._slot.get(int(p), -1) for p in out.position], dtype=np.int64)
        alive = (slots >= 0) & (self.status[slots] == RUNNING) & (self.attempt[slots] == out.attempt)
        return slots[alive], out.sample[alive].astype(np.int64)

    # --- what can run -------------------------------------------------------------------------------------------

    def pump(self) -> list[Ready]:
        """Everything that can run now and could not before. Absent rows are passed on downstream on the way."""
        slots = np.array(sorted(s for s in self._dirty if self.status[s] == RUNNING), dtype=np.int64)
        self._dirty.clear()
        found: list[Ready] = []
        if not len(slots):
            return found
        for node in self.nodes[1:]:
            state = self._input_state(node, slots)
            self._pass_on_absent(node, slots, state)
            if node.chunking == "cohort":
                found += [
                    r for c in np.unique(self.cohort[slots]) if (r := self._ready_cohort(node, int(c))) is not None
                ]
            else:
                ready = self._ready_rows(node, slots, state)
                found += [ready] if ready is not None else []
        self._settle(slots)
        return found

    def _input_state(self, node: PlannedNode, slots: np.ndarray) -> np.ndarray:
        """uint8 [slots, inner]: PRESENT where every input has come, ABSENT where some input never will."""
        state = np.full((len(slots), node.inner), PRESENT, dtype=np.uint8)
        for i in node.inputs:
            gate = self._tables[i.gate].state[slots]
            wide = np.repeat(gate, i.ratio, axis=1) if i.ratio > 1 else gate
            state = np.where((wide == ABSENT) | (state == ABSENT), ABSENT, np.minimum(state, wide))
        return state

    def _pass_on_absent(self, node: PlannedNode, slots: np.ndarray, state: np.ndarray) -> None:
        gone = (state == ABSENT) & ~self._issued[node.name][slots]
        if gone.any():
            where, sample = np.nonzero(np.repeat(gone, node.rows // node.inner, axis=1))
            self._tables[node.name].state[slots[where], sample] = ABSENT
            self._issued[node.name][slots] |= gone

    def _ready_rows(self, node: PlannedNode, slots: np.ndarray, state: np.ndarray) -> Ready | None:
        ready = (state == PRESENT) & ~self._issued[node.name][slots]
        if node.scope == "group":
            ready &= (state != PENDING).all(axis=1)[:, None]
        return self._issue(node, slots, ready) if ready.any() else None

    def _ready_cohort(self, node: PlannedNode, cohort: int) -> Ready | None:
        slots = self._cohorts[cohort]
        slots = slots[(self.status[slots] == RUNNING) & (self.cohort[slots] == cohort)]
        state = self._input_state(node, slots)
        ready = (state == PRESENT) & ~self._issued[node.name][slots]
        return self._issue(node, slots, ready) if ready.any() and (state != PENDING).all() else None

    def _issue(self, node: PlannedNode, slots: np.ndarray, ready: np.ndarray) -> Ready:
        where, samples = np.nonzero(ready)
        self._issued[node.name][slots[where], samples] = True
        keys = self._keys(slots[where], samples)
        order = keys.order()
        at, samples = slots[where][order], samples[order]
        inputs = {i.name: tuple(self._gather(f, at, samples) for f in i.fetches) for i in node.inputs}
        return Ready(node, keys.take(order), inputs)

    def _gather(self, fetch: Fetch, slots: np.ndarray, samples: np.ndarray) -> Gather:
        table = self._tables[fetch.producer]
        at = samples // fetch.ratio
        return self.blocks.gather(fetch.producer, fetch.columns, table.block[slots, at], table.row[slots, at])

    def _keys(self, slots: np.ndarray, samples: np.ndarray) -> Keys:
        return Keys(self.position[slots], samples.astype(np.int32), self.attempt[slots])

    # --- at the cut ---------------------------------------------------------------------------------------------

    def _settle(self, slots: np.ndarray) -> None:
        """Prompts of which every row at the cut has come, or never will, are finished or rejected."""
        open_, kept = np.zeros(len(slots), dtype=bool), np.zeros(len(slots), dtype=bool)
        for name in self.cut:
            state = self._tables[name].state[slots]
            open_ |= (state == PENDING).any(axis=1)
            kept |= (state == PRESENT).any(axis=1)
        done = slots[~open_]
        self.status[done] = FINISHED if not self._refills else np.where(kept[~open_], FINISHED, REJECTED)
        for node in self.nodes:
            version = self._tables[node.name].version[done]
            if version.size and (version != NO_VERSION).any():
                oldest = np.where(version == NO_VERSION, np.iinfo(np.int32).max, version).min(axis=1)
                known = oldest != np.iinfo(np.int32).max
                self.begun[done[known]] = oldest[known]

    def take(self, slots: np.ndarray) -> None:
        """These finished prompts form the Step under way."""
        self.status[slots] = TAKEN

    def rows(self, node: str, slots: np.ndarray) -> StepRows:
        """The rows of a node that have come for these prompts."""
        table = self._tables[node]
        where, samples = np.nonzero(table.state[slots] == PRESENT)
        at = slots[where]
        keys = self._keys(at, samples)
        order = keys.order()
        return StepRows(keys.take(order), table.block[at, samples][order], table.row[at, samples][order])

    def versions(self, slots: np.ndarray) -> np.ndarray:
        """int32: the oldest version of each row at the cut that a trained Model made."""
        names = [n.name for n in self.nodes]
        kept = np.zeros((len(slots), 1), dtype=bool)
        for name in self.cut:
            kept = kept | (self._tables[name].state[slots] == PRESENT).any(axis=1)[:, None]
        found = [v[(v != NO_VERSION) & kept] for v in (self._tables[n].version[slots] for n in names)]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int32)

    def retire(self, slots: np.ndarray) -> None:
        """Forget these prompts; their rows are wanted no longer."""
        for name, table in self._tables.items():
            self.blocks.drop(table.clear(slots))
            self._issued[name][slots] = False
        for slot in slots.tolist():
            self._retired.add(int(self.position[slot]))
            del self._slot[int(self.position[slot])]
            self._free.append(slot)
        for number in np.unique(self.cohort[slots]).tolist():
            members = self._cohorts[number]
            left = members[~np.isin(members, slots) & (self.cohort[members] == number)]
            if len(left):
                self._cohorts[number] = left
            else:
                del self._cohorts[number]
        self.status[slots] = FREE
        self.cohort[slots] = -1
        while self.watermark in self._retired:
            self._retired.discard(self.watermark)
            self.watermark += 1

    def again(self, slots: np.ndarray) -> list[tuple[int, int]]:
        """Give these prompts up in their present attempt; returns (position, next attempt) to admit again."""
        pairs = [(int(self.position[s]), int(self.attempt[s]) + 1) for s in slots]
        self.retire(slots)
        for position, _ in pairs:
            self._unretire(position)
        return pairs

    def _unretire(self, position: int) -> None:
        if position < self.watermark:
            self._retired.update(range(position + 1, self.watermark))
            self.watermark = position
        self._retired.discard(position)

    # --- the cut of a checkpoint --------------------------------------------------------------------------------

    def cut_state(self, again: Sequence[tuple[int, int]]) -> SourceCut:
        """Every position's fate. `again`: (position, attempt) that wait to be admitted a further time."""
        running = [(int(self.position[s]), 0, int(self.attempt[s])) for s in self.slots(RUNNING)]
        waiting = [(p, 0, a - 1) for p, a in again]
        finished = [(int(self.position[s]), 0, int(self.attempt[s])) for s in self.slots(FINISHED)]
        return SourceCut(
            next=self.next,
            watermark=self.watermark,
            retired=tuple(sorted(self._retired)),
            running=tuple(running + waiting),
            finished=tuple(finished),
        )

    def restore(self, cut: SourceCut, rows: dict[str, Ref], version: int) -> list[tuple[int, int]]:
        """Take up a cut: finished prompts with their rows; returns (position, attempt) of those that begin again."""
        self.next, self.watermark, self._retired = cut.next, cut.watermark, set(cut.retired)
        if cut.finished:
            self.admit([p for p, _, _ in cut.finished], [a for _, _, a in cut.finished], version)
            slots = self.slots(RUNNING)
            for name, ref in rows.items():
                self.produced(name, ref)
            for name in self.cut:  # what a select had taken away is known by its absence
                state = self._tables[name].state
                state[slots] = np.where(state[slots] == PENDING, ABSENT, state[slots])
            self._dirty.clear()
            self._settle(slots)
            self.status[slots] = FINISHED
        self.next = cut.next
        return [(p, a + 1) for p, _, a in cut.running]

    def stored(self, node: str) -> StepRows:
        """The rows of a node that belong to finished prompts."""
        return self.rows(node, self.slots(FINISHED))

    def waiting(self) -> list[str]:
        """For the watchdog: which node waits for whose rows, in words."""
        lines = []
        slots = self.slots(RUNNING)
        for node in self.nodes:
            table = self._tables[node.name]
            missing = int((table.state[slots] == PENDING).sum())
            if missing:
                gates = ", ".join(node.gates) or "its data"
                first = int(self.position[slots[(table.state[slots] == PENDING).any(axis=1)][0]])
                lines.append(f"{node.name}: {missing} rows have not come (first: prompt {first}); it reads {gates}")
        return lines

    def _take_slot(self, position: int) -> int:
        if not self._free:
            old = len(self.status)
            self._grow(2 * old)
            self._free = list(range(2 * old - 1, old - 1, -1))
        slot = self._free.pop()
        self._slot[position] = slot
        return slot

    def _grow(self, slots: int) -> None:
        for table in self._tables.values():
            table.grow(slots)
        for name, old in self._issued.items():
            self._issued[name] = np.concatenate([old, np.zeros((slots - len(old), old.shape[1]), dtype=bool)])
        for name in ("status", "position", "attempt", "begun", "cohort", "order"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(slots - len(old), dtype=old.dtype)]))
