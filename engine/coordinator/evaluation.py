"""One round of evaluation: all rows of finite sources, at one version, outside of admission.

Owns: the evaluation region's rows for the evaluate nodes that are due. Does not own: when
a round begins (core.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dataflow.batch import Keys
from engine.coordinator.lane import DROPPED, FINISHED, REJECTED, RUNNING, Lane, Ready
from engine.coordinator.messages import Gather, Key, Ref
from engine.coordinator.step import StepRun
from engine.coordinator.tables import Blocks
from engine.plan.plan import Plan, PlannedNode


class EvaluationRound:
    """The nodes that stand above some due evaluate nodes, each run once over its source."""

    def __init__(
        self, plan: Plan, due: Sequence[PlannedNode], rows_of: Mapping[str, int], version: int, blocks: Blocks
    ) -> None:
        self._due = list(due)
        self._rows_of = rows_of
        self._version = version
        self._blocks = blocks
        self._waiting = list(due)
        self._running: set[str] = set()
        needed = _above(plan, due)
        nodes = [n for n in plan.nodes if n.name in needed and n.work != "evaluate"]
        cut: dict[str, list[str]] = {}
        for node in due:
            cut.setdefault(node.source, []).extend(node.gates)
        self._lanes = {
            source: Lane(source, [n for n in nodes if n.source == source], gates, blocks)
            for source, gates in cut.items()
        }

    def begin(self) -> list[Ready]:
        """The first chunks: every prompt of every source, as one cohort, which each node cuts as the plan says."""
        found = []
        for source, lane in self._lanes.items():
            rows = self._rows_of[source]
            if rows:
                found.append(lane.admit(range(rows), [0] * rows, self._version))
        return found

    def produced(self, node: PlannedNode, ref: Ref) -> None:
        """Rows have come."""
        self._lanes[node.source].produced(node.name, ref)

    def closed(self, node: PlannedNode, keys: Keys) -> Key | None:
        """A chunk is done; returns a row that never came, if any."""
        return self._lanes[node.source].closed(node, keys)

    def pump(self) -> list[Ready]:
        """What can run now."""
        return [ready for lane in self._lanes.values() for ready in lane.pump()]

    def complete(self) -> Iterator[tuple[PlannedNode, Keys, dict[str, tuple[Gather, ...]]]]:
        """Evaluate nodes of which every row has come, each once."""
        for node in list(self._waiting):
            lane = self._lanes[node.source]
            if not lane.running:
                self._waiting.remove(node)
                self._running.add(node.name)
                rows = StepRun(
                    self._version, [], {node.source: lane}, {node.source: lane.slots(FINISHED)}, self._blocks
                )
                keys = rows.keys(node.inputs)
                yield node, keys, rows.inputs(node.inputs, keys)

    def evaluated(self, node: str) -> None:
        """An evaluate node has its numbers."""
        self._running.discard(node)

    @property
    def done(self) -> bool:
        """Whether every due node has its numbers."""
        return not self._waiting and not self._running

    def release(self) -> None:
        """The rows are wanted no longer."""
        for lane in self._lanes.values():
            lane.retire(lane.slots(RUNNING, FINISHED, REJECTED, DROPPED))

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines = [line for lane in self._lanes.values() if len(lane.slots(RUNNING)) for line in lane.waiting()]
        return lines + [f"{name}: evaluates version {self._version}" for name in sorted(self._running)]


def _above(plan: Plan, due: Sequence[PlannedNode]) -> set[str]:
    found = {n.name for n in due}
    for node in reversed(plan.nodes):
        if node.name in found:
            found.update(node.gates)
            found.update(f.producer for i in node.inputs for f in i.fetches)
    return found
