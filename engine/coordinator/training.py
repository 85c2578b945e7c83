"""The Step under way, from its rows to its last update.

    told          waits for                                              ends with
    Record        every row of the Step to be there, its worker          Recorded
    TrainStep     the same, Record to be told, the one before to end     Stepped

Owns: what the recorder and the train nodes are told, once more where somebody's rows were gone.
Does not own: the nodes between the cut and them (step.py), nor what follows (core.py).

Until the first TrainStep the Step can be undone: then the weights move on, and the samples are on
their way. Where neither could be begun it can be undone as before, also where the recorder has
died: what that may have written is written anew with the Step, and deleted at the run's end
(engine/attempts.py) where there is no such Step any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import numpy as np

from engine.coordinator import doubtful
from engine.coordinator.blocks import Blocks
from engine.coordinator.dispatch import Dispatch
from engine.coordinator.messages import FetchFailed, Record, Stepped, TrainStep, Warn
from engine.coordinator.prompt_table import PromptTable, Ready
from engine.coordinator.step import StepRun
from engine.plan.plan import Plan, PlannedNode

There = Callable[[str], bool]
"""Whether a worker can be told something."""


class Training:
    """See the module. `run` is the Step's rows; the Step counts as under way until `retire`."""

    def __init__(
        self,
        plan: Plan,
        blocks: Blocks,
        dispatch: Dispatch,
        lanes: Mapping[str, PromptTable],
        ids: Iterator[int],
    ) -> None:
        self._plan = plan
        self._ids = ids
        self._blocks = blocks
        self._dispatch = dispatch
        self._lanes = lanes
        self._nodes = [n for n in plan.nodes if n.region == "step"]
        self._told = {"train": -1, "record": -1}
        """The id of what the train node and the recorder were told last."""
        self.run: StepRun | None = None
        self._turn = ""
        """The train node that was told and has not ended."""
        self._record: Literal["none", "due", "told", "done"] = "none"
        self._moved = False
        """Whether some train node of the Step has done its updates."""
        self._reads: dict[str, frozenset[int]] = {}
        """The blocks that the train node ("train") and the recorder ("record") were told to read.
        """

    # --- begin and end ----------------------------------------------------------------------------

    def form(self, step: int, taken: Mapping[str, np.ndarray]) -> None:
        """These prompts form a Step."""
        for name, slots in taken.items():
            self._lanes[name].take(slots)
        self.run = StepRun(step, self._nodes, self._lanes, taken, self._blocks)
        self._record = "due" if self._plan.recorded else "none"
        self._moved = False

    def lacks(self, sources: Iterable[str], blocks: frozenset[int]) -> bool:
        """Whether rows of the Step that these sources gave lie in these blocks."""
        taken = self.run.taken if self.run is not None else {}
        return any(
            self._lanes[name].reads(taken[name], blocks) for name in sources if name in taken
        )

    def undo(self) -> bool:
        """Give its prompts back, as rows of it are gone; False where it is too late for that."""
        if self.run is None or self._dispatch.moved_on or self._record in ("told", "done"):
            return False
        for name, slots in self.run.taken.items():
            self._lanes[name].give_back(slots)
        self._dispatch.abandon(lambda node: node.region == "step")
        self._leave()
        return True

    def retire(self) -> None:
        """It is over: its rows are wanted no longer."""
        assert self.run is not None
        for name, slots in self.run.taken.items():
            self._lanes[name].retire(slots)
        self._leave()

    def _leave(self) -> None:
        assert self.run is not None
        self.run.release()
        self.run = None

    # --- telling ----------------------------------------------------------------------------------

    def ready(self) -> list[Ready]:
        """Chunks below the cut that can run."""
        assert self.run is not None
        return self.run.ready()

    def tell(self, there: There) -> list[Record | TrainStep | Warn]:
        """What the recorder and the train node whose turn it is can be told now."""
        assert self.run is not None
        found: list[Record | TrainStep | Warn] = []
        if not self.run.settled:
            return found
        if self._record == "due":
            found += self._tell_recorder(self.run, there)
        while (
            self._record != "due" and not self._turn and (node := self.run.next_train()) is not None
        ):
            keys = self.run.keys(node.inputs)
            if not len(keys):
                prompts = sum(len(slots) for slots in self.run.taken.values())
                found.append(doubtful.empty(self._plan, node, self.run.step, prompts))
                self.run.trained()
                continue
            message = self._tell(self.run, node)
            if message is None:
                break
            found.append(message)
        return found

    def _tell_recorder(self, run: StepRun, there: There) -> list[Record]:
        keys, inputs, holds = {}, {}, frozenset[int]()
        for recorded in self._plan.recorded:
            keys[recorded.name] = run.keys((recorded,))
            readings, blocks = run.inputs((recorded,), keys[recorded.name])
            inputs |= readings
            holds |= blocks
        if not there(self._plan.recorder) or not self._dispatch.there(holds):
            return []
        self._record = "told"
        self._reads["record"] = self._blocks.places(holds)
        self._told["record"] = next(self._ids)
        return [
            Record(
                id=self._told["record"],
                step=run.step,
                keys=keys,
                inputs=self._blocks.gathers(inputs),
                worker=self._plan.recorder,
            )
        ]

    def _tell(self, run: StepRun, node: PlannedNode) -> TrainStep | None:
        keys = run.keys(node.inputs)
        inputs, holds = run.inputs(node.inputs, keys)
        if not self._dispatch.there(holds):
            return None
        self._turn = node.name
        self._told["train"] = next(self._ids)
        self._dispatch.moved_on = True
        self._reads["train"] = self._blocks.places(holds)
        return TrainStep(
            id=self._told["train"],
            node=node.name,
            worker=node.workers[0],
            step=run.step,
            keys=keys,
            inputs=self._blocks.gathers(inputs),
        )

    # --- what comes of it -------------------------------------------------------------------------

    def stepped(self, event: Stepped) -> None:
        """The train node whose turn it was is done."""
        assert self.run is not None
        assert event.node == self._turn
        self.run.trained()
        self._turn = ""
        self._moved = True

    def recorded(self) -> None:
        """The samples are written."""
        self._record = "done"

    def unfetched(self, event: FetchFailed) -> None:
        """The train node, or the recorder, did not begin, as `peer` was gone."""
        if event.id == self._told["record"]:
            self._dispatch.suspect(event.peer, self._reads.get("record", frozenset()))
            self._record = "due" if self._record == "told" else self._record
        elif event.id == self._told["train"] and self._turn:
            self._dispatch.suspect(event.peer, self._reads["train"])
            self._dispatch.moved_on = self._moved
            self._turn = ""

    def lost(self, worker: str) -> None:
        """A worker is gone: if it was to write the samples, it has to be told once more."""
        if worker == self._plan.recorder and self._record == "told":
            self._record = "due"

    @property
    def complete(self) -> bool:
        """Whether everything of the Step is done."""
        assert self.run is not None
        return self.run.complete and self._record in ("none", "done")

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        if self.run is None:
            return []
        lines = self.run.waiting()
        return lines + (
            [f"step {self.run.step}: its samples are not written yet"]
            if self._record == "told"
            else []
        )
