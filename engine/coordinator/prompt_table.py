"""One source's prompts on their way to the cut: their rows, and what becomes of them.

Owns: which rows of the prompts have come, and what that means for a prompt. Does not own: the
prompts' states (prompts.py), what may run (readiness.py), how many are admitted and which form a
Step (admission.py), nor who runs a chunk (dispatch.py).

Where rows are lost, a finished prompt runs again, or begins again with the next attempt (`lose`); a
taken one whose Step comes to nothing is finished again.

A prompt leaves `running` only when every node above the cut has decided every row of it: were it to
leave as soon as its fate is known, then which other chunks it is in would depend on who was faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Literal

import numpy as np

from dataflow.arrays import all_true, any_true
from dataflow.batch import Keys
from engine.coordinator.blocks import Blocks
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.concat_rows import parts_of_concats
from engine.coordinator.lost_rows import EmptiedGroup
from engine.coordinator.part_cut import PartCut
from engine.coordinator.prompts import (
    DROPPED,
    FINISHED,
    FIRST_SLOTS,
    REJECTED,
    RUNNING,
    TAKEN,
    PromptStates,
)
from engine.coordinator.readiness import Readiness
from engine.coordinator.replica_loads import FindLoads, planned_loads
from engine.coordinator.streamed_groups import StreamedGroups, first_generations
from engine.coordinator.tables import (
    ABSENT,
    PENDING,
    PRESENT,
    RowTable,
    StepRows,
    states_in,
)
from engine.plan.plan import PlannedNode
from engine.protocol.refs import Key, Ref, SourceCut
from engine.protocol.staleness import NO_VERSION

_NEWEST = np.iinfo(np.int32).max


class PromptTable:
    """The prompts of one source.

    nodes: the source and the nodes above the cut that stand on it, in running order. cut: names of
    the nodes whose rows the Step (or the evaluation) reads.
    """

    def __init__(
        self,
        source: str,
        nodes: Sequence[PlannedNode],
        cut: Sequence[str],
        blocks: Blocks,
        loads: FindLoads = planned_loads,
    ) -> None:
        self.source = source
        self.nodes = tuple(nodes)
        self.cut = tuple(dict.fromkeys(cut))
        self.blocks = blocks
        self.prompts = PromptStates()
        self._tables = {n.name: RowTable(n.rows, FIRST_SLOTS) for n in self.nodes}
        self._slots = FIRST_SLOTS
        self._readiness = Readiness(self.nodes, self.prompts, self._tables, blocks, loads)
        self.pools = tuple(self._readiness.pools.values())
        """Of the nodes whose rows are bound late."""
        self._parts = parts_of_concats(self.nodes)
        self._emptied: list[EmptiedGroup] = []
        self._version = 0
        self.stream: StreamedGroups | None = None
        """Of a source whose Steps are streamed."""

    def stream_groups(self, make_cut: Callable[[int], PartCut]) -> None:
        """Work on parts of a Step while others are generated."""
        tables = [(name, self._tables[name]) for name in first_generations(self.nodes)]
        self.stream = StreamedGroups(
            self.source, tables, self.prompts, self._readiness, self.blocks, make_cut
        )

    # --- what comes in ----------------------------------------------------------------------------

    def admit(self, positions: Sequence[int], attempts: Sequence[int], version: int) -> NodeChunk:
        """Admit prompts as one cohort that can begin with `version`; returns the source's chunk."""
        slots = self.prompts.admit(positions, attempts, version)
        if len(self.prompts.status) > self._slots:
            self._slots = len(self.prompts.status)
            for table in self._tables.values():
                table.grow(self._slots)
            self._readiness.grow(self._slots)
        keys = self.prompts.keys(slots, np.zeros(len(slots), dtype=np.int64))
        return NodeChunk(self.nodes[0], keys, {})

    def begin_with(self, version: int) -> bool:
        """Every reader has this version: prompts that none was given rows of begin with it, too.
        Returns whether any was admitted with an older one.
        """
        if version <= self._version:
            return False
        self._version = version
        slots = self._readiness.find_unbegun()
        is_older = self.prompts.begun[slots] < version
        self.prompts.begun[slots[is_older]] = version
        return any_true(is_older)

    def add_rows(self, node: str, ref: Ref) -> int:
        """Rows have come; returns the block's number. Rows of a retired prompt or an older attempt,
        and duplicates, are dropped.
        """
        if len(ref.keys) == 1:
            return self._produced_one(node, ref)
        table = self._tables[node]
        slots = self.prompts.find(ref.keys)
        samples = ref.keys.sample
        is_awaited = (slots >= 0) & (samples < table.rows)
        states = table.state.reshape(-1)
        if all_true(is_awaited):
            is_awaited = states[table.entries(slots, samples)] == PENDING
        else:
            entries = table.entries(slots[is_awaited], samples[is_awaited])
            is_awaited[is_awaited] = states[entries] == PENDING
        rows = is_awaited.nonzero()[0]
        number = self.blocks.add(ref, len(rows))
        if len(rows) < len(samples):
            slots, samples = slots[rows], samples[rows]
        table.put(slots, samples, number, rows.astype(np.int32), ref)
        self._readiness.note_changed(node, slots)
        return number

    def _produced_one(self, node: str, ref: Ref) -> int:
        """The same for a block of one row, as small arrays cost ten times a number."""
        keys, table = ref.keys, self._tables[node]
        slot = self.prompts.find_one(keys.position.item(), keys.attempt.item())
        sample = keys.sample.item()
        number = self.blocks.add(ref, 1)
        awaited = slot >= 0 and sample < table.rows
        if awaited and table.put_one(slot, sample, number, ref.version.item()):
            self._readiness.changed_one(node, slot)
        else:
            self.blocks.mark_unwanted(number)
        return number

    def close_chunk(self, chunk: NodeChunk) -> Key | None:
        """A chunk is done: a select's missing rows are absent. Returns any other missing row."""
        node = chunk.node
        slots, samples = self._locate(chunk)
        table = self._tables[node.name]
        missing = table.state.reshape(-1)[table.entries(slots, samples)] == PENDING
        if not any_true(missing):
            return None
        if node.relation == "subset":
            table.state[slots[missing], samples[missing]] = ABSENT
            self._readiness.note_changed(node.name, slots[missing])
            return None
        return self.prompts.keys(slots[missing][:1], samples[missing][:1]).rows()[0]

    def drop(self, node: str, position: int, attempt: int) -> bool:
        """Give up a prompt's group; False if it was before, is retired, or in another attempt."""
        slots = self.prompts.find(Keys.of([position], attempt=[attempt]))
        slots = slots[slots >= 0]
        if not len(slots):
            return False
        first = not self.prompts.failed[slots[0]]
        self.prompts.failed[slots] = True
        self._tables[node].state[slots] = ABSENT
        self._tables[node].given_up[slots] = True
        self._readiness.recall(slots)
        self._readiness.give_up(node, slots)
        self._readiness.note_changed(node, slots)
        return bool(first)

    def lose_row(self, node: str, key: Key, *, failed: bool) -> Literal["", "row", "group"]:
        """Lose a row, which its group goes on without. Returns "" where it is lost already, has
        come, or its prompt is retired or in another attempt; "group" where its group is to be
        dropped instead.
        """
        position, sample, attempt = key
        slot, table = self.prompts.find_one(position, attempt), self._tables[node]
        if slot < 0 or table.state[slot, sample] != PENDING:
            return ""
        # Others have read it: rows below it would go on that nothing stands behind.
        if table.remade is not None and table.remade[slot, sample]:
            return "group"
        table.lose_one(slot, sample, failed=failed)
        self._readiness.changed_one(node, slot)
        return "row"

    def take_emptied(self) -> list[EmptiedGroup]:
        """The groups since the last call that were dropped as their last rows were lost alone."""
        emptied, self._emptied = self._emptied, []
        return emptied

    def _locate(self, chunk: NodeChunk) -> tuple[np.ndarray, np.ndarray]:
        """Slots and samples of the output rows of a chunk, as far as their prompts still run."""
        node, out = chunk.node, chunk.keys
        if node.rows > node.inner:
            out = out.expand_spans(node.rows // node.inner, chunk.spans)
        slots = self.prompts.find(out)
        runs = slots >= 0
        return (slots, out.sample) if all_true(runs) else (slots[runs], out.sample[runs])

    def pump(self) -> list[NodeChunk]:
        """Everything that can run now and could not before."""
        if not self._readiness.has_changes:
            return []
        slots, chunks = self._readiness.pump()
        if self.stream is not None:
            self.stream.note_chunks(chunks)
        if len(slots):
            self._settle(slots)
        return chunks

    # --- at the cut -------------------------------------------------------------------------------

    def _settle(self, slots: np.ndarray) -> None:
        """Finish, reject or drop the prompts of which every row has come or never will."""
        decided = slots
        for node in reversed(self.nodes):  # the last ones are the last to be decided
            state = self._tables[node.name].state[decided]
            if PENDING in states_in(state):
                decided = decided[(state != PENDING).all(axis=1)]
            if not len(decided):
                return
        self.prompts.move(decided, FINISHED)
        for node in self.nodes:
            if node.refill:
                has_rows = (self._tables[node.name].state[decided] == PRESENT).any(axis=1)
                self.prompts.move(decided[~has_rows], REJECTED)
        # After the refilling selects: a prompt that failed counts as dropped, whatever they kept.
        self._drop_emptied(decided)
        self.prompts.move(decided[self.prompts.failed[decided]], DROPPED)
        self._date(decided)

    def _drop_emptied(self, slots: np.ndarray) -> None:
        """Fail the prompts whose last rows were lost alone."""
        for node in self.nodes:
            table = self._tables[node.name]
            if table.lost is None:
                continue
            is_new = table.emptied(slots) & ~self.prompts.failed[slots]
            for slot in slots[is_new].tolist():
                self._emptied.append(self._sum_lost(slot))
                self.prompts.failed[slot] = True

    def _sum_lost(self, slot: int) -> EmptiedGroup:
        lost = [table.lost for table in self._tables.values() if table.lost is not None]
        share = sum(each.failed_share(slot) for each in lost)
        return EmptiedGroup(failed=share > 0, share=share)

    def _date(self, slots: np.ndarray) -> None:
        """Set `begun` to the oldest version that rows of a prompt were made with, if any."""
        oldest = np.full(len(slots), _NEWEST, dtype=np.int32)
        for table in self._tables.values():
            if not table.dated:
                continue
            version = table.version[slots]
            of_rows = np.where(version == NO_VERSION, _NEWEST, version)
            oldest = np.minimum(oldest, of_rows.min(axis=1))
        known = oldest != _NEWEST
        self.prompts.begun[slots[known]] = oldest[known]

    def oldest(self, slots: np.ndarray) -> tuple[str, int]:
        """The node and version of these prompts' oldest row; ("", NO_VERSION) if none has one."""
        oldest = [(table.oldest(slots), name) for name, table in self._tables.items()]
        dated = [(version, name) for version, name in oldest if version != NO_VERSION]
        version, name = min(dated, default=(NO_VERSION, ""))
        return name, version

    def take(self, slots: np.ndarray) -> None:
        """These finished prompts form the Step under way."""
        self.prompts.move(slots, TAKEN)

    def give_back(self, slots: np.ndarray) -> None:
        """The Step that these prompts were taken for is undone."""
        self.prompts.move(slots, FINISHED)

    def rows(self, node: str, slots: np.ndarray) -> StepRows:
        """The rows of a node that have come for these prompts."""
        table, slots = self._tables[node], self.prompts.sort_slots(slots)
        where, samples = (table.state[slots] == PRESENT).nonzero()
        at = slots[where]
        block, row = table.where(at, samples)
        return StepRows(self.prompts.keys(at, samples), block, row)

    def versions(self, slots: np.ndarray) -> np.ndarray:
        """int32: for each row at the cut that a trained Model had a part in, the oldest version of
        its lineage.

        Where nodes of different widths cross the cut, the rows are those of the widest; of two
        generations whose widths are no multiples of each other, those of both. The parts of a
        concat are among its rows.
        """
        cut = [name for name in self.cut if name not in self._parts] or self.cut
        widths = {self._tables[name].rows for name in cut}
        narrower = {w for w in widths if any(other > w and other % w == 0 for other in widths)}
        lines = self._lines(slots)
        versions = [
            self._versions_at(slots, width, cut, lines) for width in sorted(widths - narrower)
        ]
        return np.concatenate(versions)

    def _lines(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """int32 [slots, rows] for each node: the oldest version of a row and all it comes from."""
        lines: dict[str, np.ndarray] = {}
        dated: set[str] = set()
        for node in self.nodes:
            table = self._tables[node.name]
            if table.dated or not dated.isdisjoint(i.gate for i in node.inputs):
                dated.add(node.name)
            line = np.full((len(slots), table.rows), _NEWEST, dtype=np.int32)
            if table.dated:
                version = table.version[slots]
                np.copyto(line, version, where=version != NO_VERSION)
            lines[node.name] = line
            for i in node.inputs:
                if i.gate not in dated:
                    continue
                above, mine = lines[i.gate], line[:, i.offset : i.offset + i.width]
                if i.width:
                    np.minimum(mine, above, out=mine)
                elif i.fan_in:
                    below = above.reshape(len(slots), line.shape[1], i.fan_in).min(axis=2)
                    np.minimum(line, below, out=line)
                else:
                    each = line.shape[1] // above.shape[1]
                    wide = above if each == 1 else np.repeat(above, each, axis=1)
                    np.minimum(line, wide, out=line)
        return lines

    def _versions_at(
        self, slots: np.ndarray, width: int, cut: Sequence[str], lines: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """The same, of the nodes at the cut with so many rows a prompt."""
        is_there = np.zeros((len(slots), width), dtype=bool)
        oldest = np.full((len(slots), width), _NEWEST, dtype=np.int32)
        for name in cut:
            table, line = self._tables[name], lines[name]
            if table.rows == width:
                is_there |= table.state[slots] == PRESENT
            if width % table.rows == 0:
                oldest = np.minimum(oldest, np.repeat(line, width // table.rows, axis=1))
        return oldest[is_there & (oldest != _NEWEST)]

    def retire(self, slots: np.ndarray) -> None:
        """Forget these prompts for good, and release their rows."""
        self.prompts.retire(slots)
        self._forget(slots)

    def again(self, slots: np.ndarray) -> list[tuple[int, int]]:
        """Give these prompts up; returns (position, next attempt) to admit again."""
        positions, attempts = self.prompts.position[slots], self.prompts.attempt[slots] + 1
        self._forget(slots)
        return list(zip(positions.tolist(), attempts.tolist(), strict=True))

    def _forget(self, slots: np.ndarray) -> None:
        for table in self._tables.values():
            self.blocks.drop(table.clear(slots))
        self._readiness.forget(slots)
        self.prompts.free(slots)

    # --- losses -----------------------------------------------------------------------------------

    def reads(self, slots: np.ndarray, blocks: frozenset[int]) -> bool:
        """Whether a row of these prompts lies in one of these blocks."""
        return any(table.lies_in(slots, blocks).any() for table in self._tables.values())

    def lose(
        self, blocks: frozenset[int], *, trained: Set[str]
    ) -> tuple[np.ndarray, list[NodeChunk]]:
        """Rows in these blocks are gone. Those of a node that reads a trained Model (`trained`)
        cannot be made again, as the weights have changed: returns their prompts' slots, to begin
        again. All other rows are made again: returns the source's chunks; `pump` finds the rest.
        """
        slots = self.prompts.slots(RUNNING, FINISHED)
        lost = {name: table.lies_in(slots, blocks) for name, table in self._tables.items()}
        is_harmed = np.zeros(len(slots), dtype=bool)
        for name in trained & lost.keys():
            is_harmed |= lost[name].any(axis=1)
        chunks: list[NodeChunk] = []
        for node in self.nodes:
            where, samples = np.nonzero(lost[node.name] & ~is_harmed[:, None])
            if len(where):
                chunks += self._unmake(node, slots[where], samples)
        self._readiness.recall(slots)
        self._readiness.changed_all()
        return slots[is_harmed], chunks

    def _unmake(self, node: PlannedNode, at: np.ndarray, samples: np.ndarray) -> list[NodeChunk]:
        table = self._tables[node.name]
        self._readiness.unmade()
        self.blocks.drop(table.remake(at, samples))
        self.prompts.run_again(np.unique(at))
        return self._readiness.reopen(node, at, samples)

    def unissue(self, chunk: NodeChunk) -> list[NodeChunk]:
        """This chunk came to nothing: another one makes the rows that it did not. Returns the
        source's chunks; `pump` finds the rest.
        """
        at, rows = self._locate(chunk)
        is_unmade = self._tables[chunk.node.name].state[at, rows] == PENDING
        return self._readiness.reopen(chunk.node, at[is_unmade], rows[is_unmade])

    # --- checkpoints ------------------------------------------------------------------------------

    def restore(
        self, cut: SourceCut, rows: Mapping[str, Ref], version: int
    ) -> list[tuple[int, int]]:
        """Take up a cut; returns (position, attempt) of the prompts that begin again."""
        self.prompts.restore(cut)
        if cut.finished:
            positions = [position for position, _, _ in cut.finished]
            attempts = [attempt for _, _, attempt in cut.finished]
            self.admit(positions, attempts, version)
            for name, ref in rows.items():
                self.add_rows(name, ref)
            slots = self.prompts.slots(RUNNING)
            for table in self._tables.values():  # what a select took away is absent from `rows`
                state = table.state[slots]
                table.state[slots] = np.where(state == PENDING, ABSENT, state)
            self._date(slots)
            self._readiness.note_begun(slots)
            self.prompts.move(slots, FINISHED)
            self._readiness.note_settled()
        self.prompts.next = cut.next
        return [(position, attempt + 1) for position, _, attempt in cut.running]

    def stored_rows(self, node: str) -> StepRows:
        """The rows of a node that belong to finished prompts."""
        return self.rows(node, self.prompts.slots(FINISHED))

    def waiting(self) -> list[str]:
        """For the watchdog: which node waits for whose rows, in words."""
        return self._readiness.waiting()
