"""The parts of a Step: of a synchronous one that is trained while its other rows are generated, or
of one with a lag that was formed as a whole.

    a part    waits for                                          left by
    added     its nodes below the cut to have run on it          their last ChunkDone -> settled
    settled   the parts before it to be told                     TrainPart -> told
    told      the train node                                     PartTrained -> trained
                                                                 FetchFailed -> settled

Owns: what has become of each part below the cut. Does not own: which groups are a part
(streamed_groups.py), the nodes that need the whole Step, and the update (training.py).

Gradients are summed in the order of the parts, whatever has to be fetched twice: a train node
refuses a part that comes before its turn, and one that it has it only answers. No weight changes
before the Step's update: rows that are lost meanwhile are made again to the bit, and what is summed
stays right.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dataflow.batch import Keys
from dataflow.loss_terms import ROWS
from engine.coordinator.blocks import Blocks
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.dispatch import Dispatch
from engine.coordinator.sources import Sources
from engine.coordinator.step import StepRun
from engine.coordinator.task_ledger import Outstanding
from engine.plan.plan import Plan, PlannedNode
from engine.protocol.part_messages import TrainPart
from engine.protocol.progress import PartState


class StepParts:
    """Of one Step after another. Without a streamed source there is never a part."""

    def __init__(
        self,
        plan: Plan,
        blocks: Blocks,
        dispatch: Dispatch,
        outstanding: Outstanding,
        sources: Sources,
    ) -> None:
        self._blocks = blocks
        self._dispatch = dispatch
        self._outstanding = outstanding
        self._tables = sources.tables
        self._loads = sources.loads
        self._nodes = [n for n in plan.nodes if n.region == "step" and n.in_parts]
        self._trains = [n for n in self._nodes if n.work == "train"]
        self._makers = [n for n in self._nodes if n.work != "train"]
        self._runs: list[StepRun] = []
        self._run_of: dict[NodeChunk, StepRun] = {}
        self._told: dict[str, set[int]] = {n.name: set() for n in self._trains}
        """By train node, the parts that it was told of, or that have no row for it."""
        self._trained: dict[str, set[int]] = {n.name: set() for n in self._trains}
        """By train node, those of them of which it has no more to do."""
        self._numbers: dict[str, dict[int, int]] = {n.name: {} for n in self._trains}
        """By train node, the number of each part that has rows for it."""

    def add(self, step: int, source: str, slots: np.ndarray) -> None:
        """These prompts of a source are the Step's next part."""
        nodes = [node for node in self._nodes if node.source == source]
        taken = {source: slots}
        self._runs.append(
            StepRun(step, nodes, self._tables, taken, self._blocks, self._loads.of_chunks)
        )

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
        """What train nodes can be told now, each of its parts in their order."""
        tasks: list[TrainPart] = []
        for node in self._trains:
            told_parts, trained = self._told[node.name], self._trained[node.name]
            for part, run in enumerate(self._runs):
                if part in told_parts:
                    continue
                if node.source not in run.taken:
                    told_parts.add(part)
                    trained.add(part)
                    continue
                if not run.is_settled or not can_be_told(node.workers[0]):
                    break
                # Ranks that compute together prepare one part, and drop it when told the next.
                if node.layout.in_step and len(trained) < len(told_parts):
                    break
                keys = run.keys(node.inputs)
                task = self._tell(run, node, part, keys) if len(keys) else None
                if len(keys) and task is None:  # rows are being made again
                    break
                told_parts.add(part)
                if task is None:
                    trained.add(part)
                else:
                    tasks.append(task)
        return tasks

    def _tell(self, run: StepRun, node: PlannedNode, part: int, keys: Keys) -> TrainPart | None:
        readings, holds = run.inputs(node.row_sets[ROWS], keys)
        if not self._dispatch.there(holds):
            return None
        numbers = self._numbers[node.name]
        task = TrainPart(
            id=self._outstanding.new_id(),
            node=node.name,
            worker=node.workers[0],
            step=run.step,
            part=numbers.setdefault(part, len(numbers)),
            keys=keys,
            inputs=self._blocks.gathers(readings),
            limits=self._dispatch.limits.of(node.name),
        )
        self._outstanding.ask(task, self._blocks.places(holds))
        return task

    def end_part(self, task: TrainPart) -> None:
        """A train node has the gradients of a part."""
        self._trained[task.node].add(self._index(task))

    def tell_again(self, task: TrainPart) -> None:
        """A part came to nothing: it is told once more."""
        self._told[task.node].discard(self._index(task))

    def _index(self, task: TrainPart) -> int:
        numbers = self._numbers[task.node].items()
        return next(part for part, number in numbers if number == task.part)

    def states(self, source: str) -> list[PartState]:
        """How far each part of a source's Step is, in order; from any thread."""
        states: list[PartState] = []
        is_training = False
        for part, run in enumerate(list(self._runs)):
            if source not in run.taken:
                continue
            state = self._state(source, part, run)
            # The others that were told wait for this one.
            if state == "training" and is_training:
                state = "ready"
            is_training |= state == "training"
            states.append(state)
        return states

    def _state(self, source: str, part: int, run: StepRun) -> PartState:
        names = [node.name for node in self._trains if node.source == source]
        if all(part in self._trained[name] for name in names):
            return "summed"
        if any(part in self._told[name] for name in names):
            return "training"
        if run.is_settled:
            return "ready"
        return "made"

    # --- what the Step asks -----------------------------------------------------------------------

    def run_of(self, chunk: NodeChunk) -> StepRun | None:
        """The part that a chunk is of; None of one that is of the whole Step."""
        return self._run_of.get(chunk)

    @property
    def is_settled(self) -> bool:
        """Whether every part's rows are there."""
        return all(run.is_settled for run in self._runs)

    @property
    def is_begun(self) -> bool:
        """Whether a train node was told of a part."""
        return any(self._told.values())

    def hand_over(self, step: StepRun) -> None:
        """Let the Step have the rows that were made of its parts, in their order."""
        for node in self._makers:
            step.adopt(node.name, [run for run in self._runs if node.source in run.taken])

    @property
    def are_trained(self) -> bool:
        """Whether no train node has a part left."""
        return all(len(trained) == len(self._runs) for trained in self._trained.values())

    def summed(self, node: str) -> int:
        """Of how many parts a train node has the gradients."""
        return len(self._numbers[node])

    def forget(self) -> None:
        """The Step has taken over all rows."""
        self._runs = []
        self._run_of.clear()
        for of_node in (self._told, self._trained, self._numbers):
            for parts in of_node.values():
                parts.clear()

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
        for name, trained in self._trained.items():
            if len(trained) < len(self._runs):
                lines.append(f"{name}: has trained {len(trained)} of {len(self._runs)} parts")
        return lines
