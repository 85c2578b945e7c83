"""The parts of a synchronous Step that are trained while its other rows are generated.

    a part    waits for                                          left by
    added     its nodes below the cut to have run on it          their last ChunkDone -> settled
    settled   the part before it, for each train node            TrainPart, PartTrained -> trained

Owns: what has become of each part below the cut. Does not own: which groups are a part
(streamed_groups.py), the nodes that need the whole Step, and the update (training.py).

No weight changes before the Step's update: rows that are lost meanwhile are made again to the bit,
and gradients that are summed already stay right (decision 0024's successor).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from dataflow.batch import Keys
from dataflow.loss_terms import ROWS
from engine.coordinator.blocks import Blocks
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.dispatch import Dispatch
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.step import StepRun
from engine.coordinator.task_ledger import Outstanding
from engine.plan.plan import Plan, PlannedNode
from engine.protocol.part_messages import TrainPart


class StepParts:
    """Of one Step after another. Without a streamed source there is never a part."""

    def __init__(
        self,
        plan: Plan,
        blocks: Blocks,
        dispatch: Dispatch,
        outstanding: Outstanding,
        tables: Mapping[str, PromptTable],
    ) -> None:
        self._blocks = blocks
        self._dispatch = dispatch
        self._outstanding = outstanding
        self._tables = tables
        self._nodes = [n for n in plan.nodes if n.region == "step" and n.in_parts]
        self._trains = [n for n in self._nodes if n.work == "train"]
        self._runs: list[StepRun] = []
        self._run_of: dict[NodeChunk, StepRun] = {}
        self._trained: Counter[str] = Counter()
        """By train node, of how many parts it has no more to do."""
        self._summed: Counter[str] = Counter()
        """By train node, of how many parts it has the gradients."""

    def add(self, step: int, source: str, slots: np.ndarray) -> None:
        """These prompts of a source are the Step's next part."""
        taken = {source: slots}
        self._runs.append(StepRun(step, self._nodes, self._tables, taken, self._blocks))

    def ready(self) -> list[NodeChunk]:
        """Chunks below the cut that can run."""
        chunks: list[NodeChunk] = []
        for run in self._runs:
            if run.is_settled:
                continue
            fresh_chunks = run.ready()
            self._run_of.update(dict.fromkeys(fresh_chunks, run))
            chunks += fresh_chunks
        return chunks

    def tell(self, can_be_told: Callable[[str], bool]) -> list[TrainPart]:
        """What train nodes can be told now: one part at a time, so that gradients are summed in the
        order of the parts whatever has to be fetched twice.
        """
        tasks: list[TrainPart] = []
        busy_nodes = {task.node for task in self._outstanding.tasks(TrainPart)}
        for node in self._trains:
            while node.name not in busy_nodes and self._trained[node.name] < len(self._runs):
                run = self._runs[self._trained[node.name]]
                if not run.is_settled or not can_be_told(node.workers[0]):
                    break
                keys = run.keys(node.inputs)
                if not len(keys):
                    self._trained[node.name] += 1
                    continue
                task = self._tell(run, node, keys)
                if task is not None:
                    tasks.append(task)
                break
        return tasks

    def _tell(self, run: StepRun, node: PlannedNode, keys: Keys) -> TrainPart | None:
        readings, holds = run.inputs(node.row_sets[ROWS], keys)
        if not self._dispatch.there(holds):
            return None
        task = TrainPart(
            id=self._outstanding.new_id(),
            node=node.name,
            worker=node.workers[0],
            step=run.step,
            part=self._summed[node.name],
            keys=keys,
            inputs=self._blocks.gathers(readings),
        )
        self._outstanding.ask(task, self._blocks.places(holds))
        return task

    def end_part(self, node: str) -> None:
        """A train node has the gradients of the part that it was told of."""
        self._trained[node] += 1
        self._summed[node] += 1

    # --- what the Step asks -----------------------------------------------------------------------

    def run_of(self, chunk: NodeChunk) -> StepRun | None:
        """The part that a chunk is of; None of one that is of the whole Step."""
        return self._run_of.get(chunk)

    @property
    def is_settled(self) -> bool:
        """Whether every part's rows are there."""
        return all(run.is_settled for run in self._runs)

    @property
    def runs(self) -> list[StepRun]:
        """The parts, in order."""
        return self._runs

    @property
    def are_trained(self) -> bool:
        """Whether no train node has a part left."""
        return all(self._trained[node.name] == len(self._runs) for node in self._trains)

    def summed(self, node: str) -> int:
        """Of how many parts a train node has the gradients."""
        return self._summed[node]

    def forget(self) -> None:
        """The Step has taken over all rows."""
        self._runs = []
        self._run_of.clear()
        self._trained.clear()
        self._summed.clear()

    def release(self) -> None:
        """The run is over: release the rows that no Step has taken over."""
        for run in self._runs:
            run.release()
        self.forget()

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines: list[str] = []
        for number, run in enumerate(self._runs):
            if not run.is_settled:
                lines += [f"part {number}: {line}" for line in run.waiting()]
        for node in self._trains:
            if self._trained[node.name] < len(self._runs):
                parts = f"{self._trained[node.name]} of {len(self._runs)} parts so far"
                lines.append(f"{node.name}: has trained {parts}")
        return lines
