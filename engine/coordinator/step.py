"""One Step under way: the rows that the intake took, and the nodes below the cut.

Owns: which step-region node may run on them next, and the order of the train nodes. Does
not own: what comes before (lane.py) or after (core.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.lane import Lane, Ready
from engine.coordinator.messages import Gather, Ref
from engine.coordinator.tables import Blocks, StepRows, codes
from engine.plan.plan import PlannedInput, PlannedNode


class StepRun:
    """The rows of one Step and how far its nodes have come.

    All nodes but the train nodes run as soon as their inputs are there; the train nodes then run one after another in
    the order of the sinks, so that every reader at lag 0 has seen the version that the Step starts from.
    """

    def __init__(
        self,
        step: int,
        nodes: Sequence[PlannedNode],
        lanes: Mapping[str, Lane],
        taken: Mapping[str, np.ndarray],
        blocks: Blocks,
    ) -> None:
        self.step = step
        self.taken = taken
        self._lanes = lanes
        self._blocks = blocks
        self._lane_of = {n.name: lane for lane in lanes.values() for n in lane.nodes}
        self._waiting = {n.name: n for n in nodes if n.work != "train"}
        self._trains = [n for n in nodes if n.work == "train"]
        self._rows: dict[str, StepRows] = {}
        self._parts: dict[str, list[StepRows]] = {}
        self._running: set[str] = set()

    def ready(self) -> list[Ready]:
        """Nodes that can run now and were not returned before; a node without any row is done at once."""
        found: list[Ready] = []
        moved = True
        while moved:
            moved = False
            for node in list(self._waiting.values()):
                if all(self._known(i.gate) for i in node.inputs):
                    moved |= self._start(node, found)
        return found

    def _start(self, node: PlannedNode, found: list[Ready]) -> bool:
        """Take a node whose inputs are there up; returns whether it is done already, having no row."""
        del self._waiting[node.name]
        keys = self.keys(node.inputs)
        if not len(keys):
            self._rows[node.name] = StepRows.merge([])
            return True
        self._running.add(node.name)
        self._parts[node.name] = []
        found.append(Ready(node, keys, self.inputs(node.inputs, keys)))
        return False

    def next_train(self) -> PlannedNode | None:
        """The train node whose turn it is; None while others still run, or when all have been trained."""
        if self._waiting or self._running or not self._trains:
            return None
        return self._trains[0]

    def trained(self) -> None:
        """The train node whose turn it was is done."""
        self._trains.pop(0)

    @property
    def complete(self) -> bool:
        """Whether nothing of the Step is left to run."""
        return not (self._waiting or self._running or self._trains)

    def produced(self, node: str, ref: Ref) -> None:
        """Rows of a step-region node have come."""
        number = self._blocks.add(ref, len(ref.keys))
        rows = np.arange(len(ref.keys), dtype=np.int32)
        order = ref.keys.order()
        block = np.full(len(rows), number, dtype=np.int64)
        self._parts[node].append(StepRows(ref.keys.take(order), block, rows[order]))

    def closed(self, node: str) -> None:
        """A step-region node has produced all that it will."""
        self._running.discard(node)
        self._rows[node] = StepRows.merge(self._parts.pop(node))

    def keys(self, inputs: Sequence[PlannedInput]) -> Keys:
        """The rows on which all inputs of ratio 1 agree, sorted."""
        same = [self.rows(i.gate).keys for i in inputs if i.ratio == 1]
        keys = same[0]
        for other in same[1:]:
            shared = np.isin(codes(keys.position, keys.sample), codes(other.position, other.sample))
            keys = keys if shared.all() else keys.take(shared)
        return keys

    def inputs(self, inputs: Sequence[PlannedInput], keys: Keys) -> dict[str, tuple[Gather, ...]]:
        """Where the columns of each input lie for these rows."""
        found: dict[str, tuple[Gather, ...]] = {}
        for i in inputs:
            gathers = []
            for fetch in i.fetches:
                block, row = self.rows(fetch.producer).find(keys, fetch.ratio)
                gathers.append(self._blocks.gather(fetch.producer, fetch.columns, block, row))
            found[i.name] = tuple(gathers)
        return found

    def rows(self, node: str) -> StepRows:
        """The rows of any node within this Step."""
        if node not in self._rows:
            lane = self._lane_of[node]
            self._rows[node] = lane.rows(node, self.taken[lane.source])
        return self._rows[node]

    def release(self) -> None:
        """The rows that the step-region nodes made are wanted no longer."""
        for name, rows in self._rows.items():
            if name not in self._lane_of:
                self._blocks.drop(rows.block)

    def waiting(self) -> list[str]:
        """For the watchdog: what the Step still waits for, in words."""
        lines = [f"{name}: is running in step {self.step}" for name in sorted(self._running)]
        for node in self._waiting.values():
            missing = ", ".join(g for g in node.gates if not self._known(g))
            lines.append(f"{node.name}: waits in step {self.step} for {missing}")
        return lines + [f"{n.name}: its turn to train in step {self.step} has not come" for n in self._trains]

    def _known(self, node: str) -> bool:
        return node in self._lane_of or node in self._rows
