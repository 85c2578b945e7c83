"""One round of evaluation: all rows of finite sources, at one version, outside of admission.

Owns: the evaluation region's rows for the evaluate nodes that are due. Does not own: when
a round begins (core.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from engine.coordinator.blocks import Blocks
from engine.coordinator.dispatch import Chunk, Dispatch
from engine.coordinator.messages import Evaluate, FetchFailed, Tombstoned
from engine.coordinator.prompt_table import DROPPED, FINISHED, REJECTED, RUNNING, PromptTable, Ready
from engine.coordinator.refs import Key, Ref
from engine.coordinator.step import StepRun
from engine.plan.plan import Plan, PlannedNode


class EvaluationRound:
    """The nodes that stand above some due evaluate nodes, each run once over its source."""

    def __init__(
        self,
        plan: Plan,
        due: Sequence[PlannedNode],
        rows_of: Mapping[str, int],
        version: int,
        blocks: Blocks,
        dispatch: Dispatch,
        ids: Iterator[int],
    ) -> None:
        self._ids = ids
        self._rows_of = rows_of
        self._version = version
        self._blocks = blocks
        self._dispatch = dispatch
        self._waiting = list(due)
        self._given_up: dict[str, str] = {}
        self._running: dict[str, PlannedNode] = {}
        self._reads: dict[str, frozenset[int]] = {}
        self._told: dict[int, PlannedNode] = {}
        self._needed = _above(plan, due)
        nodes = [n for n in plan.nodes if n.name in self._needed and n.work != "evaluate"]
        cut: dict[str, list[str]] = {}
        for node in due:
            cut.setdefault(node.source, []).extend(node.gates)
        self._lanes = {
            source: PromptTable(source, [n for n in nodes if n.source == source], gates, blocks)
            for source, gates in cut.items()
        }

    def begin(self) -> list[Ready]:
        """The first chunks: every prompt of every source, as one cohort, which each node cuts as
        the plan says.
        """
        found = []
        for source, lane in self._lanes.items():
            rows = self._rows_of[source]
            if rows:
                found.append(lane.admit(range(rows), [0] * rows, self._version))
        return found

    def produced(self, node: PlannedNode, ref: Ref) -> int:
        """Rows have come; returns the block's number."""
        return self._lanes[node.source].produced(node.name, ref)

    def closed(self, chunk: Chunk) -> Key | None:
        """A chunk is done; returns a row that never came, if any."""
        return self._lanes[chunk.node.source].closed(chunk.node, chunk.keys)

    def drop(self, node: PlannedNode, event: Tombstoned) -> None:
        """A node's own policy gave a row up: its group is left out of the evaluation."""
        self._lanes[node.source].drop(node.name, event.key[0], event.key[2])
        self._given_up.setdefault(node.source, f"{event.node} row {event.key}: {event.error}")

    @property
    def fruitless(self) -> str:
        """Why an evaluate node has no row to evaluate; empty where each has, or may get one."""
        for node in self._waiting:
            lane = self._lanes[node.source]
            if node.source in self._given_up and not lane.running and not lane.count[FINISHED]:
                return (
                    f"{node.name}: every prompt of {node.source} was given up; the first: "
                    + (self._given_up[node.source])
                )
        return ""

    def pump(self) -> list[Ready]:
        """What can run now."""
        return [ready for lane in self._lanes.values() for ready in lane.pump()]

    def tell(self, there: Callable[[str], bool]) -> list[Evaluate]:
        """The evaluate nodes of which every row has come, and whose worker can be told."""
        found = []
        for node in [
            n for n in self._waiting if there(n.workers[0]) and not self._lanes[n.source].running
        ]:
            lane = self._lanes[node.source]
            slots: Mapping[str, np.ndarray] = {node.source: lane.slots(FINISHED)}
            rows = StepRun(self._version, [], {node.source: lane}, slots, self._blocks)
            keys = rows.keys(node.inputs)
            inputs, holds = rows.inputs(node.inputs, keys)
            if self._dispatch.there(holds):
                self._waiting.remove(node)
                self._running[node.name] = node
                self._reads[node.name] = self._blocks.places(holds)
                gathers = self._blocks.gathers(inputs)
                message = Evaluate(
                    id=next(self._ids),
                    node=node.name,
                    worker=node.workers[0],
                    version=self._version,
                    keys=keys,
                    inputs=gathers,
                )
                self._told[message.id] = node
                found.append(message)
        return found

    def evaluated(self, node: str) -> None:
        """An evaluate node has its numbers."""
        del self._running[node]

    def lost(self, worker: str) -> None:
        """A worker is gone: what it was to evaluate has to be told once more."""
        for node in [n for n in self._running.values() if n.workers[0] == worker]:
            self._waiting.append(self._running.pop(node.name))

    def unfetched(self, event: FetchFailed) -> None:
        """An evaluate node did not begin, as `peer` was gone."""
        node = self._told[event.id]
        self._dispatch.suspect(event.peer, self._reads[node.name])
        self._waiting.append(self._running.pop(node.name))

    def told(self, task: int) -> bool:
        """Whether this is of the round."""
        return task in self._told

    @property
    def under_way(self) -> bool:
        """Whether an evaluate node was told and has not ended."""
        return bool(self._running)

    @property
    def done(self) -> bool:
        """Whether every due node has its numbers, and every chunk of the round has ended."""
        return (
            not self._waiting and not self._running and not self._dispatch.unmeasured(self._needed)
        )

    def release(self) -> None:
        """The rows are wanted no longer."""
        for lane in self._lanes.values():
            lane.retire(lane.slots(RUNNING, FINISHED, REJECTED, DROPPED))

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines = [
            line
            for lane in self._lanes.values()
            if len(lane.slots(RUNNING))
            for line in lane.waiting()
        ]
        return lines + [
            f"{name}: evaluates version {self._version}" for name in sorted(self._running)
        ]


def _above(plan: Plan, due: Sequence[PlannedNode]) -> set[str]:
    found = {n.name for n in due}
    for node in reversed(plan.nodes):
        if node.name in found:
            found.update(node.gates)
            found.update(f.producer for i in node.inputs for f in i.fetches)
    return found
