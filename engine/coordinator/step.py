"""One Step under way: the rows that the intake took, and the nodes below the cut.

Owns: which step-region node may run on them next, and the order of the train nodes. Does
not own: what comes before (prompt_table.py) or after (course.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.blocks import Blocks, Reading
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.concat_rows import keys_beside, shift_samples
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.replica_loads import FindLoads, lead_of_chunk, planned_loads
from engine.coordinator.tables import StepRows, split_by_loads, split_by_prompt
from engine.plan.plan import PlannedNode
from engine.plan.planned_input import PlannedInput
from engine.protocol.refs import Key, Ref


class StepRun:
    """The rows of one Step and how far its nodes have come.

    All nodes but the train nodes run as soon as their inputs are there; the train nodes then run
    one after another in the order of the sinks, after every reader at lag 0 has seen the version
    that the Step starts from.
    """

    def __init__(
        self,
        step: int,
        nodes: Sequence[PlannedNode],
        tables: Mapping[str, PromptTable],
        taken: Mapping[str, np.ndarray],
        blocks: Blocks,
        loads: FindLoads = planned_loads,
    ) -> None:
        self.step = step
        self._loads = loads
        self.taken = taken
        self._prompt_tables = tables
        self._blocks = blocks
        self._table_of = {n.name: table for table in tables.values() for n in table.nodes}
        self._waiting = {n.name: n for n in nodes if not n.traits.steps}
        self._trains = [n for n in nodes if n.traits.steps]
        self._rows: dict[str, StepRows] = {}
        self._parts: dict[str, list[StepRows]] = {}
        self._running: dict[str, int] = {}
        """Chunks under way, by node."""
        self._expected: dict[str, Keys] = {}

    def ready(self) -> list[NodeChunk]:
        """Nodes that can newly run; one without any row is done at once."""
        chunks: list[NodeChunk] = []
        moved = True
        while moved:
            moved = False
            for node in list(self._waiting.values()):
                if all(self._is_known(i.gate) for i in node.inputs):
                    moved |= self._start(node, chunks)
        return chunks

    def _start(self, node: PlannedNode, chunks: list[NodeChunk]) -> bool:
        """Start a node whose inputs are there: its chunks join `chunks`. Returns whether it is done
        already, having no row.

        Its rows are cut into as many chunks of whole prompts as the plan says, of about as many
        tokens; a node of batch scope sees them all at once.
        """
        del self._waiting[node.name]
        keys = self.keys(node.inputs)
        if not len(keys):
            self._rows[node.name] = StepRows.merge([])
            return True
        parts = self._split_rows(node, keys)
        self._running[node.name] = len(parts)
        self._parts[node.name] = []
        self._expected[node.name] = keys
        for replica, part in parts:
            inputs, holds = self.inputs(node.inputs, part)
            chunk = NodeChunk(node, part, inputs, holds)
            chunk.replica = replica
            chunks.append(chunk)
        return False

    def _split_rows(self, node: PlannedNode, keys: Keys) -> list[tuple[str, Keys]]:
        """The keys of each chunk, and the replica for which it is cut, if it is for one."""
        if node.scope == "batch" or node.chunks == 1:
            return [("", keys)]
        inputs, _ = self.inputs(node.inputs, keys)
        tokens = self._blocks.tokens(inputs, len(keys))
        if loads := self._loads(node):
            cut = enumerate(split_by_loads(keys.position, tokens, loads))
            return [
                (lead_of_chunk(node, number, len(loads)), keys.take(rows))
                for number, rows in cut
                if len(rows)
            ]
        parts = split_by_prompt(keys.position, tokens, node.chunks)
        return [("", keys.take(rows)) for rows in parts]

    def adopt(self, node: str, parts: Sequence[StepRun]) -> None:
        """Take over the rows that a node below the cut has made of the Step's parts."""
        self._rows[node] = StepRows.merge([part.rows(node) for part in parts])

    def next_train(self) -> PlannedNode | None:
        """The train node whose turn it is; None while others run, or when all are trained."""
        return self._trains[0] if self.is_settled and self._trains else None

    @property
    def is_settled(self) -> bool:
        """Whether every row of the Step is there, and only training is left."""
        return not self._waiting and not self._running

    def end_turn(self) -> None:
        """End the turn of the train node that is done."""
        self._trains.pop(0)

    @property
    def complete(self) -> bool:
        """Whether nothing of the Step is left to run."""
        return self.is_settled and not self._trains

    def add_rows(self, node: str, ref: Ref, fresh: np.ndarray | None) -> int:
        """Add rows of a step-region node; returns the block's number. fresh: which of them come for
        the first time (None: all).
        """
        # Of a chunk that runs again, the rows that came before count where they first lay: the
        # blocks move to where they are now (dispatch.py).
        rows = np.arange(len(ref.keys)) if fresh is None else np.flatnonzero(fresh)
        number = self._blocks.add(ref, len(rows))
        if len(rows):
            block = np.full(len(rows), number, dtype=np.int64)
            self._parts[node].append(StepRows(ref.keys.take(rows), block, rows.astype(np.int32)))
        return number

    def close_chunk(self, node: PlannedNode) -> Key | None:
        """Close a chunk; after the node's last one, returns a row that never came, if any."""
        self._running[node.name] -= 1
        if self._running[node.name]:
            return None
        del self._running[node.name]
        rows = self._rows[node.name] = StepRows.merge(self._parts.pop(node.name))
        expected = self._expected.pop(node.name)
        if node.relation == "subset" or len(rows.keys) == len(expected):
            return None
        arrived = set(rows.keys.rows())
        return next((key for key in expected.rows() if key not in arrived), None)

    def keys(self, inputs: Sequence[PlannedInput]) -> Keys:
        """The rows that every input has, sorted; of a parent input, the ancestor counts. Reduced
        inputs do not count. Of a concat: the rows that any input has.
        """
        if any(i.width for i in inputs):
            return keys_beside(inputs, {i.gate: self.rows(i.gate).keys for i in inputs})
        unreduced = [i for i in inputs if not i.fan_in]
        own_gate = next(i.gate for i in unreduced if i.ratio == 1)
        keys = self.rows(own_gate).keys
        for i in unreduced:
            keys = self.rows(i.gate).having(keys, i.ratio)
        return keys

    def complete_keys(self, recorded: PlannedInput) -> Keys:
        """The rows of an input of which every column has come: where a node lost rows alone, its
        input has some that the node's own column has not.
        """
        keys = self.keys((recorded,))
        for fetch in recorded.fetches:
            keys = self.rows(fetch.producer).having(keys, fetch.ratio)
        return keys

    def inputs(
        self, inputs: Sequence[PlannedInput], keys: Keys
    ) -> tuple[dict[str, tuple[Reading, ...]], frozenset[int]]:
        """What to gather for each input for these rows, and the numbers of the blocks read."""
        readings_of: dict[str, tuple[Reading, ...]] = {}
        holds: set[int] = set()
        for i in inputs:
            readings = []
            input_keys, owners = self._rows_for(i, keys)
            for fetch in i.fetches:
                block, row = self.rows(fetch.producer).find(input_keys, fetch.ratio)
                reading = self._blocks.reading(fetch.producer, fetch.columns, block, row, owners)
                readings.append(reading)
                holds.update(reading.numbers)
            readings_of[i.name] = tuple(readings)
        return readings_of, frozenset(holds)

    def _rows_for(self, i: PlannedInput, keys: Keys) -> tuple[Keys, Keys | None]:
        """The rows of an input for these keys; where it has rows of its own, the key that each is
        for.
        """
        if i.width:
            mine = keys.take(i.within(keys.sample))
            return shift_samples(mine, -i.offset), mine
        if i.fan_in:
            return self.rows(i.gate).below(keys, i.fan_in)
        return keys, None

    def rows(self, node: str) -> StepRows:
        """The rows of any node within this Step."""
        if node not in self._rows:
            table = self._table_of[node]
            self._rows[node] = table.rows(node, self.taken[table.source])
        return self._rows[node]

    def release(self) -> None:
        """Release the rows that the step-region nodes made."""
        for name, rows in self._rows.items():
            if name not in self._table_of:  # those of the stream are the prompts'
                self._blocks.drop(rows.block)
        for parts in self._parts.values():
            for rows in parts:
                self._blocks.drop(rows.block)

    def waiting(self) -> list[str]:
        """For the watchdog: what the Step still waits for, in words."""
        lines = [f"{name}: is running in step {self.step}" for name in sorted(self._running)]
        for node in self._waiting.values():
            missing = ", ".join(g for g in node.gates if not self._is_known(g))
            lines.append(f"{node.name}: waits in step {self.step} for {missing}")
        return lines + [
            f"{n.name}: its turn to train in step {self.step} has not come" for n in self._trains
        ]

    def _is_known(self, node: str) -> bool:
        return node in self._table_of or node in self._rows
