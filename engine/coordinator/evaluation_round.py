"""One round of evaluation: all rows of finite sources, at one version, outside of admission.

Owns: the rows of the evaluate nodes that are due. Does not own: which of them are (evaluation.py),
nor when a round begins (course.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from engine.coordinator.blocks import Blocks
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.dispatch import Dispatch
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.prompts import DROPPED, FINISHED, REJECTED, RUNNING
from engine.coordinator.step import StepRun
from engine.coordinator.task_ledger import Outstanding
from engine.plan.plan import Plan, PlannedNode
from engine.protocol.messages import Evaluate, Task, Tombstoned
from engine.protocol.refs import Key, Ref


class EvaluationRound:
    """The nodes above some due evaluate nodes, each run once over its source."""

    def __init__(
        self,
        plan: Plan,
        due: Sequence[PlannedNode],
        rows_of: Mapping[str, int],
        version: int,
        blocks: Blocks,
        dispatch: Dispatch,
        outstanding: Outstanding,
    ) -> None:
        self._outstanding = outstanding
        self._rows_of = rows_of
        self._version = version
        self._blocks = blocks
        self._dispatch = dispatch
        self._nodes = {n.name: n for n in due}
        self._waiting = list(due)
        self._given_up: dict[str, str] = {}
        """Source -> the first of its rows that was given up, and why."""
        self._lost = dict.fromkeys((n.source for n in due), 0)
        """Source -> its rows that were lost alone."""
        ancestors = plan.with_ancestors(n.name for n in due)
        nodes = [n for n in plan.nodes if n.name in ancestors and n.work != "evaluate"]
        cut: dict[str, list[str]] = {}
        for node in due:
            cut.setdefault(node.source, []).extend(node.gates)
        self._prompts: dict[str, PromptTable] = {}
        for source, gates in cut.items():
            of_source = [n for n in nodes if n.source == source]
            self._prompts[source] = PromptTable(source, of_source, gates, blocks)

    def begin(self) -> list[NodeChunk]:
        """The first chunks: all prompts of each source, as one cohort."""
        chunks = []
        for source, table in self._prompts.items():
            rows = self._rows_of[source]
            if rows:
                chunks.append(table.admit(range(rows), [0] * rows, self._version))
        return chunks

    def add_rows(self, node: PlannedNode, ref: Ref) -> int:
        """Add rows; returns the block's number."""
        return self._prompts[node.source].add_rows(node.name, ref)

    def close_chunk(self, chunk: NodeChunk) -> Key | None:
        """Close a chunk; returns a row that never came, if any."""
        return self._prompts[chunk.node.source].close_chunk(chunk)

    def drop(self, node: PlannedNode, event: Tombstoned) -> None:
        """A node's own policy gave a row up: leave its group out of the evaluation."""
        self._prompts[node.source].drop(node.name, event.key[0], event.key[2])
        self._given_up.setdefault(node.source, f"{event.node} row {event.key}: {event.error}")

    def lose_row(self, node: PlannedNode, event: Tombstoned) -> None:
        """A row was lost: leave it alone out of the evaluation. Those that failed are counted."""
        table = self._prompts[node.source]
        if table.lose_row(node.name, event.key, failed=event.failed) == "row":
            self._lost[node.source] += event.failed
            self._given_up.setdefault(node.source, f"{event.node} row {event.key}: {event.error}")

    def reissue(self, chunk: NodeChunk) -> list[NodeChunk]:
        """Have other chunks make the rows that a chunk which was given up did not."""
        return self._prompts[chunk.node.source].unissue(chunk)

    @property
    def fruitless(self) -> str:
        """Why an evaluate node has no row to evaluate; empty if each has, or may get one."""
        for node in self._waiting:
            prompts = self._prompts[node.source].prompts
            has_rows = prompts.running or prompts.count[FINISHED]
            if node.source in self._given_up and not has_rows:
                first = self._given_up[node.source]
                return (
                    f"{node.name}: every prompt of {node.source} was given up; the first: {first}"
                )
        return ""

    def pump(self) -> list[NodeChunk]:
        """What can run now."""
        chunks: list[NodeChunk] = []
        for table in self._prompts.values():
            chunks += table.pump()
        return chunks

    def tell(self, can_be_told: Callable[[str], bool]) -> list[Evaluate]:
        """The evaluate nodes of which every row has come, and whose Worker can be told."""
        tasks: list[Evaluate] = []
        for node in [n for n in self._waiting if can_be_told(n.workers[0])]:
            table = self._prompts[node.source]
            if table.prompts.running:
                continue
            task = self._tell(node, table)
            if task is not None:
                self._waiting.remove(node)
                tasks.append(task)
        return tasks

    def _tell(self, node: PlannedNode, table: PromptTable) -> Evaluate | None:
        """None where rows that it reads have to be made again first."""
        slots: Mapping[str, np.ndarray] = {node.source: table.prompts.slots(FINISHED)}
        rows = StepRun(self._version, [], {node.source: table}, slots, self._blocks)
        keys = rows.keys(node.inputs)
        inputs, holds = rows.inputs(node.inputs, keys)
        if not self._dispatch.there(holds):
            return None
        task = Evaluate(
            id=self._outstanding.new_id(),
            node=node.name,
            worker=node.workers[0],
            version=self._version,
            keys=keys,
            inputs=self._blocks.gathers(inputs),
            lost_rows=self._lost[node.source],
        )
        self._outstanding.ask(task, self._blocks.places(holds))
        return task

    def undone(self, task: Task) -> None:
        """An evaluate node did not end: tell it again."""
        if isinstance(task, Evaluate):
            self._waiting.append(self._nodes[task.node])

    @property
    def under_way(self) -> bool:
        """Whether an evaluate node was told and has not ended."""
        return bool(self._outstanding.of(Evaluate))

    @property
    def is_complete(self) -> bool:
        """Whether every due node has its numbers, and every chunk of the round has ended."""
        # What a chunk measured comes after its last rows, and counts (decision 0024).
        return not (self._waiting or self.under_way or self._dispatch.has_unended("evaluation"))

    def release(self) -> None:
        """Release the rows."""
        for table in self._prompts.values():
            table.retire(table.prompts.slots(RUNNING, FINISHED, REJECTED, DROPPED))

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines: list[str] = []
        for table in self._prompts.values():
            if table.prompts.running:
                lines += table.waiting()
        running = sorted(task.node for task in self._outstanding.tasks(Evaluate))
        return lines + [f"{name}: evaluates version {self._version}" for name in running]
