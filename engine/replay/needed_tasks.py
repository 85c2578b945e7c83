"""What has to run, in which order, to run some nodes of a Step again.

Owns: the choice of tasks, of the checkpoint to begin from, and what may be made again where it was
not recorded. Does not own: running it (task_replay.py).

    a row that is needed      comes from
    of a node that is run     what that has just made
    of a recorded node        the record
    of another node           its chunk, which runs again too, unless it samples, calls a user's
                              reward, or read weights at a lag: then it has to be recorded

Weights of a version come from the nearest checkpoint at or before it, and from training the Steps
between on their rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dataflow.errors import RunError
from engine.keep.record.stored_assignments import RecordedGather, RecordedTask
from engine.keep.record.stored_rows import recorded_batch
from engine.plan.kernel_needs import needs_of
from engine.plan.plan import PlannedNode
from engine.replay.recorded_run import RecordedRun

NO_WEIGHTS = -1
"""The version of what computes with no trained weights."""
Order = tuple[int, int, int]
"""(version, 1 for training, place among what was told): what runs first has the least."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NeededTask:
    """A task to run. version: of the trained weights that it begins with, or NO_WEIGHTS. target: it
    was asked for. forced: versions at which its recorded tokens are looked at instead.
    """

    task: RecordedTask
    version: int
    target: bool = False
    forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededRun:
    """All that runs, in order: tasks with the version of the weights at which they do. checkpoint:
    the Step whose weights are restored; 0 is the Models' bases. remade: nodes that run though
    nobody asked, since their rows were not recorded.
    """

    tasks: tuple[tuple[int, NeededTask], ...]
    checkpoint: int
    remade: tuple[str, ...]


def needed(
    run: RecordedRun, nodes: Iterable[str], step: int, checkpoints: Iterable[int]
) -> NeededRun:
    """To run these nodes of a Step again. checkpoints: the Steps that have one. Raises RunError for
    a Step that is not there, and for rows that have to be recorded and are not.
    """
    return _Needs(run, tuple(nodes), step).resolve([0, *checkpoints])


class _Needs:
    def __init__(self, run: RecordedRun, nodes: tuple[str, ...], step: int) -> None:
        self._run, self._nodes, self._step = run, nodes, step
        self._place = {task.name: at for at, task in enumerate(run.told.tasks)}
        self._found: dict[tuple[int, int], NeededTask] = {}
        self._behind: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """Task -> the tasks that make its rows."""
        self._orders: dict[tuple[int, int], Order] = {}
        self._absent: dict[str, None] = {}

    def resolve(self, checkpoints: list[int]) -> NeededRun:
        for node in self._nodes:
            for task in self._tasks_of(node):
                self._add(task, target=True)
        begins = self._begins(checkpoints)
        if begins is not None:
            self._train_from(begins)
        if self._absent:
            what = f"rerun of {', '.join(self._nodes)} at step {self._step}"
            raise self._run.missing(what, list(self._absent))
        runs = [(at, each) for each in self._found.values() for at in self._versions(each)]
        runs.sort(key=lambda pair: (pair[0], *self._order(pair[1])[1:]))
        remade = dict.fromkeys(
            each.task.node
            for each in self._found.values()
            if each.task.kind == "chunk" and not each.target and each.task.node not in self._nodes
        )
        return NeededRun(tasks=tuple(runs), checkpoint=begins or 0, remade=tuple(remade))

    def _begins(self, checkpoints: list[int]) -> int | None:
        """The checkpoint to begin from; None where nothing computes with trained weights."""
        versions = [v for each in self._found.values() for v in (each.version, *each.forced)]
        first = min((v for v in versions if v != NO_WEIGHTS), default=None)
        return None if first is None else max(at for at in checkpoints if at <= first)

    def _train_from(self, begins: int) -> None:
        """Add the training that lies between the checkpoint and each version that is needed."""
        done: set[tuple[str, int]] = set()
        while True:
            wanted = [
                (writer, step)
                for each in list(self._found.values())
                for writer in self._writers(each.task.node)
                for step in range(begins + 1, max((each.version, *each.forced)) + 1)
                if (writer, step) not in done
            ]
            if not wanted:
                return
            for writer, step in wanted:
                if (writer, step) not in done:
                    done.add((writer, step))
                    for task in self._trained(writer, step):
                        self._add(task)

    def _writers(self, node: str) -> set[str]:
        """The train nodes of the weights that a node computes with."""
        plan = self._run.plan
        used = {u.model for u in plan.node(node).models if u.trained or u.access == "write"}
        used |= {m.follows for m in plan.models if m.name in used and m.follows}
        return {m.writer for m in plan.models if m.name in used and m.writer}

    def _tasks_of(self, name: str) -> list[RecordedTask]:
        """Those of a target in the Step."""
        node, told = self._run.node(name), self._run.told
        if node.work == "train":
            return self._trained(name, self._step)
        found = [task for task in told.of(name) if self._belongs(task)]
        if not found:
            raise self._no_such(name, {self._step_of(task) for task in told.of(name)} - {0})
        return found

    def _belongs(self, task: RecordedTask) -> bool:
        came = bool(task.made) or task.kind == "evaluate"
        return came and not task.again and self._step_of(task) == self._step

    def _step_of(self, task: RecordedTask) -> int:
        """The Step of a chunk: the first that one of its rows belongs to."""
        if task.kind != "chunk":
            return task.step
        steps = (
            self._run.told.step_of(task.node, k, task) for made in task.made for k in made.rows()
        )
        return min((step for step in steps if step), default=0)

    def _trained(self, node: str, step: int) -> list[RecordedTask]:
        """How a node was trained in a Step."""
        told = self._run.told
        own = [t for t in told.of(node) if t.kind == "train" and t.done]
        found = [task for task in own if task.step == step]
        whole = [task for task in found if all(rank.done for rank in told.ranks_of(task))]
        if not whole:
            raise self._no_such(node, {task.step for task in own}, step)
        return told.ranks_of(whole[-1])[:1]  # of one that was trained again the last one stands

    def _no_such(self, node: str, steps: set[int], step: int | None = None) -> RunError:
        there = f"{min(steps)} to {max(steps)}" if steps else "none"
        at = self._step if step is None else step
        problem = f"nothing that {node} did in step {at} is recorded; of it there are: {there}"
        fix = f"--step {max(steps)}" if steps else "a run with --record all"
        return RunError(f"rerun of {self._run.folder}: {problem}. Fix: {fix}.")

    def _add(self, task: RecordedTask, *, target: bool = False) -> None:
        """This task, and those that make its rows where no record has them."""
        known = self._found.get(task.name)
        if known is not None and (known.target or not target):
            return
        forced = self._forced(task) if target else ()
        version = self._version(task)
        self._found[task.name] = NeededTask(
            task=task, version=version, target=target, forced=forced
        )
        self._behind[task.name] = behind = []
        for gather in self._gathers(task) if not forced else ():
            for maker in self._makers(gather.producer, gather.keys.rows(), task.step):
                behind.append(maker.name)
                self._add(maker)

    def _gathers(self, task: RecordedTask) -> list[RecordedGather]:
        """What a task, and each of its ranks, took."""
        ranks = self._run.told.ranks_of(task) if task.kind == "train" else [task]
        return [gather for rank in ranks for gather in rank.gathers]

    def _makers(
        self, producer: str, keys: list[tuple[int, int, int]], step: int
    ) -> list[RecordedTask]:
        """The chunks that have to run for these rows; none where the record has them."""
        run = self._run
        found = {
            task.name: task for key in keys for task in run.told.makers(producer, key, step)[:1]
        }
        if producer in self._nodes:
            own = [task for task in found.values() if self._belongs(task)]
            if len(own) == len(found):
                return own
        if producer in run.rows.nodes and not run.rows.absent(producer, keys, step):
            return []
        if not self._may_run_again(run.plan.node(producer)) or not found:
            self._absent[producer] = None
            return []
        return list(found.values())

    def _may_run_again(self, node: PlannedNode) -> bool:
        """Whether a node that was not recorded makes the same rows again."""
        assert self._run.plan.program is not None
        operator = self._run.plan.program.node(node.name).operator
        return not (operator.traits.generates or operator.parts or (node.lag and _reads(node)))

    def _version(self, task: RecordedTask) -> int:
        node = self._run.plan.node(task.node)
        if task.kind == "train":
            return task.step - 1
        if task.kind == "evaluate" or not _reads(node):
            return NO_WEIGHTS
        if node.region == "evaluation":
            return task.step
        if node.lag:
            return self._recorded_version(task)
        return self._step_of(task) - 1

    def _recorded_version(self, task: RecordedTask) -> int:
        """What the record says of a chunk that ran at a lag."""
        table = self._run.rows.of_task(task.node, task)
        if table is None or table.column("made.version").null_count:
            self._absent[task.node] = None
            return NO_WEIGHTS
        return int(table.column("made.version")[0].as_py())

    def _forced(self, task: RecordedTask) -> tuple[int, ...]:
        """The versions of a chunk's tokens, if they can only be replayed: it took new weights
        within rows, or its kernel needs a process of its own.
        """
        plan = self._run.plan
        node = plan.node(task.node)
        if not node.traits.generates:
            return ()
        assert plan.program is not None
        alone = needs_of(plan.program, node).own_worker
        if not (alone or node.lag):
            return ()
        table = self._run.rows.of_task(task.node, task)
        if table is None:
            self._absent[task.node] = None
            return ()
        rows = recorded_batch(table)
        if not {"version", "sampler_logprobs"} <= set(rows.names):
            problem = f"{node.name} ran with a lag or in its own process, and has no log-probs"
            fix = "a node that does neither, or whose log-probs are read"
            raise RunError(f"rerun of {self._run.folder}: {problem} to look at. Fix: {fix}.")
        versions, began = np.unique(rows.ragged("version").values).tolist(), self._version(task)
        return tuple(versions) if alone or versions not in ([], [began]) else ()

    def _versions(self, each: NeededTask) -> tuple[int, ...]:
        """At which versions of the weights a task runs."""
        return each.forced or (self._order(each)[0],)

    def _order(self, each: NeededTask) -> Order:
        """What needs no weights runs right behind what makes its rows."""
        name = each.task.name
        if name not in self._orders:
            place = self._place[name]
            behind = [self._order(self._found[maker])[0] for maker in self._behind[name]]
            at = max([each.version, *behind])
            self._orders[name] = (at, int(each.task.kind == "train"), place)
        return self._orders[name]


def _reads(node: PlannedNode) -> bool:
    """Whether a node computes with weights that change."""
    return any(u.trained and u.access == "read" and u.param != "tokenizer" for u in node.models)
