"""The step region: the Step under way, from its rows to its last update.

    told          waits for                                              ends with
    Record        every row of the Step to be there, its worker          Recorded
    TrainStep     the same, Record to be told, the one before to end     Stepped
    FinishStep    the same, and all parts to be trained (step_parts.py)  Stepped

Owns: what the recorder and the train nodes are told, again if rows were gone. Does not own: the
nodes between the cut and them (step.py), nor what follows (course.py).

The Step can be undone while neither it nor its samples are begun. If the recorder has died, what it
may have written is written again with the Step, or deleted at the run's end
(engine/session/attempts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from dataflow.batch import Keys
from dataflow.loss_terms import ROWS
from engine.coordinator.blocks import Blocks
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.dispatch import Dispatch
from engine.coordinator.formed_parts import cut_formed
from engine.coordinator.run_region import undroppable
from engine.coordinator.run_warnings import warn_of_empty_step
from engine.coordinator.sources import Sources
from engine.coordinator.step import StepRun
from engine.coordinator.step_parts import StepParts
from engine.coordinator.task_ledger import Outstanding
from engine.plan.plan import Plan, PlannedNode
from engine.protocol.messages import OwnRows, Record, Task, Tombstoned, TrainStep, Warn
from engine.protocol.part_messages import FinishStep, TrainPart
from engine.protocol.refs import Key, Ref

Update = TrainPart | TrainStep | FinishStep
"""What changes what a train node has."""

CanBeTold = Callable[[str], bool]
"""Whether a Worker can be told something."""


class Training:
    """`run` is the Step's rows; the Step counts as under way until `retire`."""

    def __init__(
        self,
        plan: Plan,
        blocks: Blocks,
        dispatch: Dispatch,
        outstanding: Outstanding,
        sources: Sources,
    ) -> None:
        self._plan = plan
        self._blocks = blocks
        self._dispatch = dispatch
        self._outstanding = outstanding
        self._prompts = sources.tables
        self._late = sources.late
        self._loads = sources.loads
        self._part_tokens = {source.name: source.part_tokens for source in plan.sources}
        self.parts = StepParts(plan, blocks, dispatch, outstanding, sources)
        of_step = [n for n in plan.nodes if n.region == "step"]
        self._nodes = [n for n in of_step if n.work == "train" or not n.in_parts]
        self.run: StepRun | None = None
        self._unrecorded = False
        """Whether the recorder is still to be told."""
        self._has_parts_rows = False
        """Whether the Step has taken over what was made of its parts."""
        self._moved = False
        """Whether some train node of the Step has done its updates."""

    # --- begin and end ----------------------------------------------------------------------------

    def form(self, step: int, taken: Mapping[str, np.ndarray]) -> None:
        """These prompts form a Step; one of a source with a lag is cut into parts now, if any node
        works on parts.
        """
        for name, slots in taken.items():
            self._prompts[name].take(slots)
            for part in self._cut(name, slots):
                self.parts.add(step, name, part)
        self.run = StepRun(
            step, self._nodes, self._prompts, taken, self._blocks, self._loads.of_chunks
        )
        self._unrecorded = bool(self._plan.recorded)
        self._moved = False
        self._has_parts_rows = False

    def _cut(self, source: str, slots: np.ndarray) -> list[np.ndarray]:
        tokens = self._part_tokens[source]
        if source not in self._late or not tokens or not len(slots):
            return []
        return cut_formed(self._prompts[source], slots, tokens)

    def retire(self) -> None:
        """It is over: release its rows."""
        assert self.run is not None
        for name, slots in self.run.taken.items():
            self._prompts[name].retire(slots)
        self._leave()

    def _leave(self) -> None:
        assert self.run is not None
        self.run.release()
        self.run = None
        if self._has_parts_rows:
            self.parts.forget()
        else:
            self.parts.release()

    # --- telling ----------------------------------------------------------------------------------

    def ready(self) -> list[NodeChunk]:
        """Chunks below the cut that can run."""
        assert self.run is not None
        chunks = self.parts.ready()
        if not self._has_parts_rows and self.parts.is_settled:
            self.parts.hand_over(self.run)
            self._has_parts_rows = True
        if self._has_parts_rows:
            chunks += self.run.ready()
        return chunks

    def tell(self, can_be_told: CanBeTold) -> list[Record | Update | Warn]:
        """What the recorder and the train node whose turn it is can be told now."""
        assert self.run is not None
        instructions: list[Record | Update | Warn] = []
        instructions += self.parts.tell(can_be_told)
        if not (self._has_parts_rows and self.run.is_settled):
            return instructions
        if self._unrecorded:
            instructions += self._tell_recorder(self.run, can_be_told)
        # No update before all gradients are there: until the weights move, lost rows can be made
        # again.
        while self._may_update:
            node = self.run.next_train()
            if node is None:
                break
            keys_of = {name: self.run.keys(inputs) for name, inputs in node.row_sets.items()}
            full_sets = {name: keys for name, keys in keys_of.items() if len(keys)}
            empty_sets = [name for name in keys_of if name not in full_sets]
            warnings = [self._empty(self.run, node, name) for name in empty_sets]
            if not full_sets:
                self.run.end_turn()
                instructions += warnings
                continue
            message: Update | None
            if node.in_parts:
                message = self._tell_finish(self.run, node)
            else:
                message = self._tell(self.run, node, full_sets)
            if message is None:  # rows are being made again: this is asked once more
                break
            instructions += [*warnings, message]
        return instructions

    def _tell_recorder(self, run: StepRun, can_be_told: CanBeTold) -> list[Record]:
        keys, inputs, holds = {}, {}, frozenset[int]()
        for recorded in self._plan.recorded:
            keys[recorded.name] = run.complete_keys(recorded)
            readings, blocks = run.inputs((recorded,), keys[recorded.name])
            inputs |= readings
            holds |= blocks
        if not can_be_told(self._plan.recorder) or not self._dispatch.there(holds):
            return []
        self._unrecorded = False
        task = Record(
            id=self._outstanding.new_id(),
            step=run.step,
            keys=keys,
            inputs=self._blocks.gathers(inputs),
            worker=self._plan.recorder,
        )
        self._outstanding.ask(task, self._blocks.places(holds))
        return [task]

    def _empty(self, run: StepRun, node: PlannedNode, row_set: str) -> Warn:
        """The Step has no row of this set."""
        taken = run.taken[self._plan.sources_of(node)[row_set]]
        return warn_of_empty_step(self._plan, node, run.step, len(taken), row_set)

    def _tell(self, run: StepRun, node: PlannedNode, sets: Mapping[str, Keys]) -> TrainStep | None:
        """sets: the keys of each row set that has rows."""
        inputs, holds = {}, frozenset[int]()
        for name, keys in sets.items():
            readings, blocks = run.inputs(node.row_sets[name], keys)
            inputs |= readings
            holds |= blocks
        if not self._dispatch.there(holds):
            return None
        self._dispatch.moved_on = True
        task = TrainStep(
            id=self._outstanding.new_id(),
            node=node.name,
            worker=node.workers[0],
            step=run.step,
            keys=sets.get(ROWS, Keys.of([])),
            inputs=self._blocks.gathers(inputs),
            others={name: OwnRows(keys=keys) for name, keys in sets.items() if name != ROWS},
            limits=self._dispatch.limits.of(node.name),
        )
        self._outstanding.ask(task, self._blocks.places(holds))
        return task

    def _tell_finish(self, run: StepRun, node: PlannedNode) -> FinishStep:
        self._dispatch.moved_on = True
        task = FinishStep(
            id=self._outstanding.new_id(),
            node=node.name,
            worker=node.workers[0],
            step=run.step,
            parts=self.parts.summed(node.name),
        )
        self._outstanding.ask(task)
        return task

    @property
    def _may_update(self) -> bool:
        """Whether the next train node can be told of its updates."""
        is_training = self._outstanding.of(TrainStep) or self._outstanding.of(FinishStep)
        return not (self._unrecorded or is_training) and self.parts.are_trained

    # --- the verbs of a region --------------------------------------------------------------------

    def _run_of(self, chunk: NodeChunk) -> StepRun:
        run = self.parts.run_of(chunk) or self.run
        assert run is not None
        return run

    def take_rows(self, chunk: NodeChunk, ref: Ref) -> int:
        """As in RunRegion."""
        fresh = self._dispatch.find_fresh(chunk, ref.keys)
        return self._run_of(chunk).add_rows(chunk.node.name, ref, fresh)

    def close_chunk(self, chunk: NodeChunk) -> Key | None:
        """As in RunRegion."""
        return self._run_of(chunk).close_chunk(chunk.node)

    def drop_group(self, node: PlannedNode, event: Tombstoned) -> str:
        """A Step has the groups that it was formed of: any failure ends the run."""
        del node
        return undroppable(self._plan, event)

    def lose_row(self, node: PlannedNode, event: Tombstoned) -> str:
        """As of a group: a Step has the rows that it was formed of."""
        return self.drop_group(node, event)

    def tell_again(self, task: Task) -> None:
        """The train node did not begin, or the recorder did not end: it is told again."""
        if isinstance(task, Record):
            self._unrecorded = True
        elif isinstance(task, TrainPart):
            self.parts.tell_again(task)
        elif isinstance(task, TrainStep | FinishStep):
            self._dispatch.moved_on = self._moved

    def note_kept_updates(self, updates: int) -> None:
        """A train node was short of memory, and goes on behind so many updates of the Step: from
        now on rows cannot be made again with the weights that they had.
        """
        self._moved |= updates > 0

    def reissue(self, chunk: NodeChunk) -> list[NodeChunk]:
        """Never asked: a chunk below the cut is not given up while its Step is wanted, but runs
        again whole (dispatch.py, decision 0009).
        """
        raise AssertionError(f"a chunk of {chunk.node.name} below the cut was given up")

    def lose_blocks(self, blocks: frozenset[int]) -> list[NodeChunk]:
        """Undo the Step if it lacks rows that begin again with other weights, and it is not too
        late for that. `run` is None then; no chunk follows.
        """
        if self._lacks(blocks) and not self._is_begun:
            self._undo()
        return []

    def _lacks(self, blocks: frozenset[int]) -> bool:
        """Whether rows of the Step that a source with a lag gave lie in these blocks. All others
        are made again by the chunks that made them.
        """
        taken = self.run.taken if self.run is not None else {}
        late = [name for name in self._late if name in taken]
        return any(self._prompts[name].reads(taken[name], blocks) for name in late)

    @property
    def _is_begun(self) -> bool:
        """Whether the Step's updates or its samples are told, or done."""
        is_recorded = bool(self._plan.recorded) and not self._unrecorded
        is_trained = self._dispatch.moved_on or self.parts.is_begun
        return is_trained or is_recorded or self.complete

    def _undo(self) -> None:
        """Give the Step's prompts back."""
        assert self.run is not None
        for name, slots in self.run.taken.items():
            self._prompts[name].give_back(slots)
        self._dispatch.abandon(lambda node: node.region == "step")
        self._leave()

    def abandon(self) -> None:
        """As in RunRegion."""
        if self.run is not None:
            self.retire()
        self.parts.release()

    # --- what comes of it -------------------------------------------------------------------------

    def end_turn(self) -> None:
        """End the turn of the train node that is done."""
        assert self.run is not None
        self.run.end_turn()
        self._moved = True

    @property
    def complete(self) -> bool:
        """Whether everything of the Step is done."""
        assert self.run is not None
        return self.run.complete and not self._unrecorded and not self._outstanding.of(Record)

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines = self.parts.waiting()
        if self.run is None:
            return lines
        lines += self.run.waiting()
        if self._outstanding.of(Record):
            lines.append(f"step {self.run.step}: its samples are not written yet")
        return lines
