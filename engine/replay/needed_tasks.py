"""What has to run, in which order, to run some nodes of a Step again.

Owns: the choice of tasks and of the checkpoint to begin from, and which rows may be made again
where they were not recorded. Does not own: running them (task_replay.py).

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
from engine.keep.record.stored_assignments import RecordedGather, RecordedTask, TaskId
from engine.keep.record.stored_rows import recorded_batch, was_joined
from engine.plan.kernel_needs import needs_of
from engine.plan.plan import PlannedNode
from engine.protocol.refs import Key
from engine.replay.recorded_run import RecordedRun

NO_WEIGHTS = -1
"""The version of what computes with no trained weights."""
Order = tuple[int, int, int]
"""(version, 1 for training, place among what was told): what runs first has the least."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NeededTask:
    """A task to run. version: of the trained weights that it begins with, or NO_WEIGHTS. is_target:
    it was asked for. token_versions: at which its recorded tokens are replayed, instead of sampling
    new ones; empty for a task that runs as it did.
    """

    task: RecordedTask
    version: int
    is_target: bool = False
    token_versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededRun:
    """All that runs, in order: tasks with the version of the weights at which they do. checkpoint:
    the Step whose weights are restored; 0 is the Models' bases. remade: nodes that run though
    nobody asked, since their rows were not recorded.
    """

    tasks: tuple[tuple[int, NeededTask], ...]
    checkpoint: int
    remade: tuple[str, ...]


def find_needed_tasks(
    run: RecordedRun, nodes: Iterable[str], step: int, checkpoints: Iterable[int]
) -> NeededRun:
    """Find all that has to run so that these nodes of a Step run again. checkpoints: the Steps that
    have one. Raises RunError for a Step that is not there, and for rows that have to be recorded
    and are not.
    """
    return _Needs(run, tuple(nodes), step).resolve([0, *checkpoints])


class _Needs:
    """The tasks that are needed so far, from the targets up to what the record has."""

    def __init__(self, run: RecordedRun, nodes: tuple[str, ...], step: int) -> None:
        self._run, self._nodes, self._step = run, nodes, step
        self._place = {task.name: place for place, task in enumerate(run.assignments.tasks)}
        self._needed: dict[TaskId, NeededTask] = {}
        self._makers: dict[TaskId, list[TaskId]] = {}
        """Task -> the tasks that make its rows."""
        self._orders: dict[TaskId, Order] = {}
        self._missing_nodes: dict[str, None] = {}
        """Nodes whose rows are needed, not recorded, and must not be made again."""

    def resolve(self, checkpoints: list[int]) -> NeededRun:
        for node in self._nodes:
            for task in self._find_targets(node):
                self._add(task, is_target=True)
        checkpoint = self._choose_checkpoint(checkpoints)
        if checkpoint is not None:
            self._add_training_since(checkpoint)
        # All that is missing is said at once, with the one --record that helps.
        if self._missing_nodes:
            what = f"rerun of {', '.join(self._nodes)} at step {self._step}"
            raise self._run.missing_rows_error(what, list(self._missing_nodes))
        return NeededRun(
            tasks=tuple(self._sort_tasks()),
            checkpoint=checkpoint or 0,
            remade=tuple(self._find_remade_nodes()),
        )

    def _sort_tasks(self) -> list[tuple[int, NeededTask]]:
        """Each task with the version at which it runs; one that replays tokens, once for each
        version of theirs.
        """
        tasks: list[tuple[int, NeededTask]] = []
        for needed in self._needed.values():
            versions = needed.token_versions or (self._order(needed)[0],)
            tasks.extend((version, needed) for version in versions)
        tasks.sort(key=lambda pair: (pair[0], *self._order(pair[1])[1:]))
        return tasks

    def _find_remade_nodes(self) -> dict[str, None]:
        """Nodes whose chunks run again though nobody asked for them."""
        remade: dict[str, None] = {}
        for needed in self._needed.values():
            node = needed.task.node
            if needed.task.kind == "chunk" and not needed.is_target and node not in self._nodes:
                remade[node] = None
        return remade

    # --- training on the way ----------------------------------------------------------------------

    def _choose_checkpoint(self, checkpoints: list[int]) -> int | None:
        """The checkpoint to begin from; None where nothing computes with trained weights."""
        versions: set[int] = set()
        for needed in self._needed.values():
            versions.update((needed.version, *needed.token_versions))
        versions.discard(NO_WEIGHTS)
        if not versions:
            return None
        first = min(versions)
        return max(step for step in checkpoints if step <= first)

    def _add_training_since(self, checkpoint: int) -> None:
        """Add the training that lies between the checkpoint and each version that is needed."""
        added: set[tuple[str, int]] = set()
        # Training needs rows, whose chunks may compute with weights of another Model: look again
        # until nothing is new.
        while True:
            missing = [each for each in self._list_training(checkpoint) if each not in added]
            if not missing:
                return
            added.update(missing)
            for writer, step in missing:
                for task in self._find_training(writer, step):
                    self._add(task)

    def _list_training(self, checkpoint: int) -> dict[tuple[str, int], None]:
        """(train node, Step) of all training from the checkpoint up to the needed versions."""
        training: dict[tuple[str, int], None] = {}
        for needed in self._needed.values():
            last = max((needed.version, *needed.token_versions))
            for writer in self._find_writers(needed.task.node):
                for step in range(checkpoint + 1, last + 1):
                    training[writer, step] = None
        return training

    def _find_writers(self, node: str) -> set[str]:
        """The train nodes of the weights that a node computes with."""
        plan = self._run.plan
        uses = plan.node(node).states
        models = {use.model for use in uses if use.trained or use.access == "write"}
        # A follower's weights are made from its leader's.
        models |= {m.follows for m in plan.models if m.name in models and m.follows}
        return {m.writer for m in plan.states if m.name in models and m.writer}

    def _find_training(self, node: str, step: int) -> list[RecordedTask]:
        """How a node was trained in a Step."""
        assignments = self._run.assignments
        trained = [t for t in assignments.of(node) if t.kind == "train" and t.done]
        whole: list[RecordedTask] = []
        for task in trained:
            # A Step in which some rank was lost is not whole.
            if task.step == step and all(rank.done for rank in assignments.ranks_of(task)):
                whole.append(task)
        if not whole:
            raise self._unrecorded_error(node, {task.step for task in trained}, step)
        # A Step that a resume trained again counts as it was trained last.
        return assignments.ranks_of(whole[-1])[:1]

    # --- tasks and the rows that they take --------------------------------------------------------

    def _find_targets(self, name: str) -> list[RecordedTask]:
        """The tasks of a node in the Step. Raises RunError if there are none."""
        if self._run.node(name).traits.steps:
            return self._find_training(name, self._step)
        tasks = self._run.assignments.of(name)
        targets = [task for task in tasks if self._is_of_step(task)]
        if not targets:
            steps = {self._step_of(task) for task in tasks}
            raise self._unrecorded_error(name, steps - {0}, self._step)
        return targets

    def _is_of_step(self, task: RecordedTask) -> bool:
        """Whether a task made rows of the Step, and made them first."""
        has_rows = bool(task.made) or task.kind == "evaluate"
        return has_rows and not task.again and self._step_of(task) == self._step

    def _step_of(self, task: RecordedTask) -> int:
        """The Step of a chunk: the first that one of its rows belongs to."""
        if task.kind != "chunk":
            return task.step
        assignments = self._run.assignments
        steps = (assignments.step_of(task.node, key, task) for key in task.made_rows())
        return min((step for step in steps if step), default=0)

    def _unrecorded_error(self, node: str, steps: set[int], step: int) -> RunError:
        recorded = f"{min(steps)} to {max(steps)}" if steps else "none"
        problem = f"nothing that {node} did in step {step} is recorded; of it there are: {recorded}"
        fix = f"--step {max(steps)}" if steps else "a run with --record all"
        return RunError(f"rerun of {self._run.folder}: {problem}. Fix: {fix}.")

    def _add(self, task: RecordedTask, *, is_target: bool = False) -> None:
        """Add this task, and those that make its rows where no record has them."""
        known = self._needed.get(task.name)
        if known is not None and (known.is_target or not is_target):
            return
        token_versions = self._find_token_versions(task) if is_target else ()
        self._needed[task.name] = NeededTask(
            task=task,
            version=self._find_version(task),
            is_target=is_target,
            token_versions=token_versions,
        )
        self._makers[task.name] = makers = []
        # Replayed tokens are read from the record, prompts too.
        if token_versions:
            return
        for gather in self._list_gathers(task):
            for maker in self._find_makers(gather.producer, gather.keys.rows(), task.step):
                makers.append(maker.name)
                self._add(maker)

    def _list_gathers(self, task: RecordedTask) -> list[RecordedGather]:
        """What a task, and each of its ranks, took."""
        ranks = self._run.assignments.ranks_of(task) if task.kind == "train" else [task]
        return [gather for rank in ranks for gather in rank.gathers]

    def _find_makers(self, producer: str, keys: list[Key], step: int) -> list[RecordedTask]:
        """The chunks that have to run for these rows; none where the record has them."""
        if not keys:  # a rank may have no row of a part
            return []
        run = self._run
        makers: dict[TaskId, RecordedTask] = {}
        for key in keys:
            # The first maker: later ones made the same row again after a loss.
            for task in run.assignments.makers(producer, key, step)[:1]:
                makers[task.name] = task
        # Behind a node that is run comes what it makes now, if all of that is of the Step.
        runs_now = producer in self._nodes and all(map(self._is_of_step, makers.values()))
        if runs_now:
            return list(makers.values())
        if producer in run.rows.nodes and not run.rows.absent(producer, keys, step):
            return []
        if not makers or not self._may_run_again(run.plan.node(producer)):
            self._missing_nodes[producer] = None
            return []
        return list(makers.values())

    def _may_run_again(self, node: PlannedNode) -> bool:
        """Whether a node that was not recorded makes the same rows again."""
        assert self._run.plan.program is not None
        operator = self._run.plan.program.node(node.name).operator
        calls_reward = bool(operator.parts)
        read_at_lag = node.lag and _reads_trained_weights(node)
        return not (operator.traits.generates or calls_reward or read_at_lag)

    # --- versions of the weights ------------------------------------------------------------------

    def _find_version(self, task: RecordedTask) -> int:
        """The version of the weights that a task began with, or NO_WEIGHTS."""
        node = self._run.plan.node(task.node)
        if task.kind == "train":
            return task.step - 1
        if task.kind == "evaluate" or not _reads_trained_weights(node):
            return NO_WEIGHTS
        if node.region == "evaluation":
            return task.step
        if node.lag:
            return self._read_version(task)
        return self._step_of(task) - 1

    def _read_version(self, task: RecordedTask) -> int:
        """What the record says of a chunk that ran at a lag."""
        table = self._run.rows.of_task(task.node, task)
        if table is None or table.column("made.version").null_count:
            self._missing_nodes[task.node] = None
            return NO_WEIGHTS
        return int(table.column("made.version")[0].as_py())

    def _find_token_versions(self, task: RecordedTask) -> tuple[int, ...]:
        """The versions of a chunk's tokens, if they can only be replayed (0034): it took new
        weights within rows, or was written with rows of other chunks, or its kernel needs a process
        of its own.
        """
        plan = self._run.plan
        node = plan.node(task.node)
        if not node.traits.generates:
            return ()
        assert plan.program is not None
        has_own_process = needs_of(plan.program, node).own_worker
        if not (has_own_process or node.lag):
            return ()
        table = self._run.rows.of_task(task.node, task)
        if table is None:
            self._missing_nodes[task.node] = None
            return ()
        rows = recorded_batch(table)
        if not {"version", "sampler_logprobs"} <= set(rows.names):
            problem = f"{node.name} ran with a lag or in its own process, and has no log-probs"
            fix = "a node that does neither, or whose log-probs are read"
            raise RunError(f"rerun of {self._run.folder}: {problem} to look at. Fix: {fix}.")
        versions = np.unique(rows.ragged("version").values).tolist()
        kept_one_version = versions in ([], [self._find_version(task)])
        was_alone = not was_joined(table)
        if has_own_process or not (kept_one_version and was_alone):
            return tuple(versions)
        return ()

    def _order(self, needed: NeededTask) -> Order:
        """Where a task comes: at its version, or at the latest one of what makes its rows, right
        behind that. What needs no weights has only the latter.
        """
        name = needed.task.name
        if name not in self._orders:
            version = needed.version
            for maker in self._makers[name]:
                maker_version, _, _ = self._order(self._needed[maker])
                version = max(version, maker_version)
            trains = int(needed.task.kind == "train")
            self._orders[name] = (version, trains, self._place[name])
        return self._orders[name]


def _reads_trained_weights(node: PlannedNode) -> bool:
    """Whether a node computes with weights that change, or with a Table."""
    return any(u.trained and u.access == "read" and u.param != "tokenizer" for u in node.states)
