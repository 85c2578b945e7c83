"""Recorded tasks, carried out once more by one Worker in this process.

Owns: the plan of that Worker, its instructions, versions in their order. Does not own: which tasks
(needed_tasks.py), the Worker and its kernels (engine/run/worker), what further ranks do
(rank_replay.py) and their processes (other_ranks.py), comparing what comes of it (rerun.py).

The Worker gets the run's own instructions again, with the rows where they lie now: no coordinator
decides anything a second time (0034). Who loads which version is said by the coordinator's
`Versions`. Of a node that several ranks trained this process is the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dataflow.batch import Batch, Keys
from dataflow.errors import RunError
from dataflow.kernel import Chunk, KernelNode
from dataflow.model import Model
from engine.channels.inproc import InprocChannel
from engine.coordinator.task_ledger import Outstanding
from engine.coordinator.versions import Versions
from engine.keep.metrics.step_metrics import StepMetrics
from engine.keep.record.stored_assignments import RecordedGather, RecordedTask
from engine.keep.record.stored_rows import recorded_batch
from engine.plan.plan import Plan, PlannedNode
from engine.protocol import messages as m
from engine.protocol.refs import Gather, Key
from engine.replay.needed_tasks import NeededRun, NeededTask
from engine.replay.rank_rows import send_rows
from engine.replay.recorded_run import RecordedRun
from engine.replay.train_instructions import finish_step, train_part, train_step
from engine.run.loop.checkpoint_files import restore_state
from engine.run.worker.in_process_worker import InprocWorkers
from engine.run.worker.kernel_loader import kernel_class
from engine.run.worker.kernel_session import NodeSession
from engine.run.worker.worker import Worker
from engine.weights.hashed_pieces import weights_digest

if TYPE_CHECKING:
    from engine.channels.tensors.row_broadcast import RowBroadcast

WORKER = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeat:
    """Where a process of a rerun is among the ranks. rows: the channel by which the first rank
    sends the others the rows that it makes.
    """

    rank: int = 0
    group: Any = None
    rows: RowBroadcast | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayedTask:
    """What came of a task. batches: a chunk's rows. digest, metrics: of a train node's Step.
    logprobs: of a replayed chunk, float32, of its recorded tokens; token_indices: of which of them.
    """

    task: RecordedTask
    batches: tuple[Batch, ...] = ()
    digest: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    logprobs: np.ndarray | None = None
    token_indices: np.ndarray | None = None


class Replay:
    """Runs what is needed, in order. checkpoint: of the Step that it begins from, if that is not
    the beginning. seat: this process among the ranks, where nodes of several are opened.
    """

    def __init__(
        self,
        run: RecordedRun,
        needed_run: NeededRun,
        checkpoint: Path | None,
        seat: RankSeat | None = None,
    ) -> None:
        self._run, self._needed_run, self._checkpoint = run, needed_run, checkpoint
        self._seat = seat or RankSeat()
        self.plan = _place_on_one_worker(run.plan, find_opened_nodes(run.plan, needed_run))
        self._rank_plan = self.plan
        if self._seat.rank > 0:
            self._rank_plan = _drop_single_ranks(self.plan)
        worker_plan = _place_as_rank(self._rank_plan, self._seat.rank)
        channel = InprocChannel()
        self._worker = Worker(
            WORKER,
            worker_plan,
            channel=channel,
            inproc=True,
            group=self._seat.group,
        )
        self._workers = InprocWorkers(self._worker)
        self._outstanding = Outstanding()
        self._versions = Versions(self.plan, self._outstanding)
        self._replayed_rows: dict[str, dict[tuple[Key, int], tuple[Batch, int]]] = {}
        """Node -> (key, Step) of a row that it made here -> its batch, and its place there."""
        self._teachers: dict[str, Any] = {}

    def run(self) -> Iterator[ReplayedTask]:
        """Run each task, and yield what comes of it. Raises what a kernel raises."""
        with closing(self._workers):
            for _ in self._workers.open():
                pass
            version = self._needed_run.checkpoint
            if self._checkpoint is not None:
                restore_state(self._rank_plan, self._workers, self._checkpoint, version)
            self._publish(version, moved=False)
            for needed_version, needed in self._needed_run.tasks:
                # One by one: followers move with each version.
                while version < needed_version:
                    version += 1
                    self._publish(version, moved=True)
                yield self._replay(needed, version)

    def _publish(self, version: int, *, moved: bool) -> None:
        """Have every reader load this version, and followers move."""
        for load in self._versions.publish(version, moved=moved):
            assert isinstance(load, m.Load)
            self._load(load)
            self._versions.note_answer(m.Loaded(id=load.id, worker=WORKER), load)

    def _load(self, load: m.Load) -> None:
        """Have a reader load."""
        for _ in self._carry_out(load):
            pass

    def _carry_out(self, instruction: m.ToWorker) -> Iterator[m.Event]:
        """Have the Worker carry it out as far as the caller iterates; each event that comes."""
        self._workers.tell(instruction)
        while (event := self._workers.next()) is not None:
            yield event

    def _replay(self, needed: NeededTask, version: int) -> ReplayedTask:
        task = needed.task
        node = self.plan.node(task.node)
        _set_threads(node)
        if needed.token_versions:
            return self._replay_tokens(node, task, version)
        if task.kind == "train":
            return self._train(self._select_rank(task))
        inputs = self._place_inputs(task)
        input_blocks = _list_blocks(inputs)
        try:
            if task.kind == "chunk":
                return self._run_chunk(task, inputs)
            return self._evaluate(task, inputs)
        finally:
            self._worker.release(input_blocks)

    def _run_chunk(self, task: RecordedTask, inputs: m.Inputs) -> ReplayedTask:
        chunk = m.RunChunk(
            id=task.id,
            node=task.node,
            worker=WORKER,
            step=task.step,
            keys=task.keys,
            inputs=inputs,
            spans=task.spans,
            weights=task.weights,
            limits=task.limits,
        )
        batches: list[Batch] = []
        for event in self._carry_out(chunk):
            if isinstance(event, m.Produced):
                batches.append(self._worker.rows.of(task.node, event.ref).on_host())
                # At once: the kernel goes on with the memory of its last rows free.
                self._worker.release([event.ref.block])
        for batch in batches:
            self._keep_rows(task, batch)
        if self._seat.rows is not None:
            send_rows(self._seat.rows, batches)
        return ReplayedTask(task=task, batches=tuple(batches))

    def _select_rank(self, task: RecordedTask) -> RecordedTask:
        """What this rank trains on. Of ranks with equal rows only the first was told where they
        are.
        """
        ranks = self._run.assignments.ranks_of(task)
        if len(ranks) == 1:
            return task
        rank = self._seat.rank
        alike_ranks = self.plan.node(task.node).layout.alike
        first_rank = rank // alike_ranks * alike_ranks
        mine, first = ranks[rank], ranks[first_rank]
        pairs = zip(mine.parts, first.parts, strict=True)
        parts = [replace(part, gathers=rows.gathers) for part, rows in pairs]
        return replace(mine, gathers=first.gathers, parts=tuple(parts))

    def _train(self, task: RecordedTask) -> ReplayedTask:
        metrics = self._measure(task.step, self._train_in_turn(task))
        digest = weights_digest(self._worker.kernels[task.node].pieces())
        return ReplayedTask(task=task, digest=digest, metrics=metrics)

    def _train_in_turn(self, task: RecordedTask) -> Iterator[m.ToWorker]:
        """What the Worker is told of a Step, in turn, with its rows in the outbox meanwhile."""
        node = self.plan.node(task.node)
        # In a run the coordinator lets several ranks go together; here they walk in step.
        go = m.Go(id=task.id, node=task.node, worker=WORKER)
        if not task.parts:
            inputs = self._place_inputs(task)
            yield train_step(task, inputs, WORKER)
            if node.ranks > 1:
                yield go
            self._worker.release(_list_blocks(inputs))
            return
        for number, part in enumerate(task.parts):
            inputs = self._place_inputs(part)
            yield train_part(part, number, inputs, WORKER)
            # Ranks with whole weights and tokens sum a part each by itself.
            if node.ranks > 1 and node.layout.in_step:
                yield replace(go, id=part.id)
            self._worker.release(_list_blocks(inputs))
        yield finish_step(task, WORKER)
        if node.ranks > 1:
            yield go

    def _evaluate(self, task: RecordedTask, inputs: m.Inputs) -> ReplayedTask:
        evaluation = m.Evaluate(
            id=task.id,
            node=task.node,
            worker=WORKER,
            version=task.step,
            keys=task.keys,
            inputs=inputs,
        )
        return ReplayedTask(task=task, metrics=self._measure(task.step, [evaluation]))

    def _measure(self, step: int, instructions: Iterable[m.ToWorker]) -> dict[str, float]:
        """Carry them out; the node's own metrics of it."""
        # What was reported before belongs to other tasks.
        self._worker.reports()
        for instruction in instructions:
            for _ in self._carry_out(instruction):
                pass
        step_metrics = StepMetrics()
        for name, number, count in self._worker.reports():
            if not name.startswith(("time/", "cpu/", "queue/", "weights/", "env/step/")):
                step_metrics.add(name, number, count)
        metrics = step_metrics.row(step)
        return {name: number for name, number in metrics.items() if name != "step"}

    # --- rows -------------------------------------------------------------------------------------

    def _keep_rows(self, task: RecordedTask, batch: Batch) -> None:
        """Keep rows that were made here for the nodes behind."""
        rows = self._replayed_rows.setdefault(task.node, {})
        for row, key in enumerate(batch.keys.rows()):
            rows[key, task.step] = batch, row

    def _place_inputs(self, task: RecordedTask) -> dict[str, tuple[Gather, ...]]:
        """Put the rows that a task takes into the outbox; where it gathers them."""
        inputs: dict[str, tuple[Gather, ...]] = {}
        for recorded in task.gathers:
            gather = self._place_rows(recorded, task.step)
            inputs[recorded.input] = (*inputs.get(recorded.input, ()), gather)
        return inputs

    def _place_rows(self, recorded: RecordedGather, step: int) -> Gather:
        """Put the rows of a gather into one block of the outbox, in its order."""
        count = len(recorded.keys)
        refs: tuple[tuple[str, int], ...] = ()
        if count:
            rows = self._find_rows(recorded.producer, recorded.keys, step)
            outbox = self._worker.rows
            restored = outbox.device.restore_batch(recorded.producer, rows)
            ref = outbox.keep(recorded.producer, restored)
            refs = ((WORKER, ref.block),)
        return Gather(
            producer=recorded.producer,
            columns=recorded.columns,
            refs=refs,
            block=np.zeros(count, dtype=np.int32),
            row=np.arange(count),
            keys=recorded.owners,
        )

    def _find_rows(self, producer: str, keys: Keys, step: int) -> Batch:
        """The rows of these keys: those that were made here, else the recorded ones."""
        # Above the cut a chunk is of no Step: its rows were kept under 0.
        if self.plan.node(producer).region == "stream":
            step = 0
        replayed = self._find_replayed(producer, keys, step)
        if replayed is not None:
            return Batch.concat(replayed)
        table, missing = self._run.rows.find(producer, keys, step)
        if table is None:
            raise RunError(f"{self._run.folder}: {producer} has no rows {missing[:3]}")
        return recorded_batch(table)

    def _find_replayed(self, producer: str, keys: Keys, step: int) -> list[Batch] | None:
        """A batch of each row; None if one of them was not made here."""
        replayed = self._replayed_rows.get(producer, {})
        batches: list[Batch] = []
        for key in keys.rows():
            batch_and_row = replayed.get((key, step)) or replayed.get((key, 0))
            if batch_and_row is None:
                return None
            batch, row = batch_and_row
            batches.append(batch.take(np.array([row])))
        return batches

    # --- recorded tokens --------------------------------------------------------------------------

    def _replay_tokens(self, node: PlannedNode, task: RecordedTask, version: int) -> ReplayedTask:
        """Compute the log-probs of recorded tokens of this version."""
        table = self._run.rows.of_task(node.name, task)
        assert table is not None
        rows = recorded_batch(table).sort()
        teacher = self._load_teacher(node, version)
        chunk = Chunk(id=task.id, step=task.step, keys=rows.keys, inputs={"rows": rows})
        scored = Batch.concat(list(teacher.run(chunk)))
        logprobs = scored.ragged("logprobs").values
        is_wanted = rows.ragged("version").values == version
        if "completion_mask" in rows.names:
            # What a row was answered has no log-prob of its own.
            is_wanted &= rows.ragged("completion_mask").values != 0
        token_indices = np.flatnonzero(is_wanted)
        return ReplayedTask(
            task=task,
            batches=(rows,),
            logprobs=logprobs[token_indices],
            token_indices=token_indices,
        )

    def _load_teacher(self, node: PlannedNode, version: int) -> Any:
        """A kernel that computes log-probs of the tokens that it gets, with this version of a
        node's Model.
        """
        if node.name not in self._teachers:
            self._teachers[node.name] = self._open_teacher(node)
        kernel = self._teachers[node.name]
        writer = self._find_writer(node)
        if writer:
            kernel.load(self._worker.kernels[writer].pieces(), version)
        return kernel

    def _open_teacher(self, node: PlannedNode) -> Any:
        program = self.plan.program
        assert program is not None
        graph_node, use = program.node(node.name), node.models[0]
        states = {state.name: state for state in program.states if isinstance(state, Model)}
        kernel = kernel_class(replace(node, kernel=graph_node.operator.replayed))()
        kernel_node = KernelNode(
            name=node.name,
            operator=node.operator,
            models={"model": states[use.model]},
            params={"temperature": graph_node.params.get("temperature")},
            returns=("logprobs",),
        )
        # Under another name: the module of the node itself keeps its own version.
        module_names = {use.model: f"{use.model} replayed"}
        session = NodeSession(node.name, self.plan.seed, {}, module_names)
        kernel.open(kernel_node, node.layout, session)
        return kernel

    def _find_writer(self, node: PlannedNode) -> str:
        """Who trains the Model whose tokens are replayed; empty for nobody."""
        name = node.models[0].model
        return next((model.writer for model in self.plan.models if model.name == name), "")


def _list_blocks(inputs: m.Inputs) -> list[int]:
    """The blocks that these gathers read, each once."""
    blocks: dict[int, None] = {}
    for gathers in inputs.values():
        for gather in gathers:
            blocks |= dict.fromkeys(block for _, block in gather.refs)
    return list(blocks)


# --- the plan of one Worker -----------------------------------------------------------------------


def find_opened_nodes(plan: Plan, needed_run: NeededRun) -> set[str]:
    """Find the nodes whose kernels are needed: those that run, and the writers of their weights."""
    names: set[str] = set()
    models: set[str] = set()
    for _, needed in needed_run.tasks:
        node = plan.node(needed.task.node)
        # Recorded tokens are replayed by a teacher instead of the node's own kernel.
        if not needed.token_versions:
            names.add(node.name)
        models.update(use.model for use in node.states if use.param != "tokenizer")
    models |= {m.follows for m in plan.models if m.name in models and m.follows}
    return names | {m.writer for m in plan.states if m.name in models and m.writer}


def _place_on_one_worker(plan: Plan, opened_nodes: set[str]) -> Plan:
    """The same plan with these nodes in one Worker, and the others nowhere."""
    nodes: list[PlannedNode] = []
    for node in plan.nodes:
        workers = (WORKER,) if node.name in opened_nodes else ()
        layout = replace(node.layout, replicas=1)
        nodes.append(replace(node, workers=workers, layout=layout))
    return replace(
        plan,
        nodes=tuple(nodes),
        recorded=(),
        recorder=WORKER,
        turns=(),
        spare=(),
        hosts={},
        devices={},
        environments={},
    )


def _drop_single_ranks(plan: Plan) -> Plan:
    """The same plan without nodes that have one rank: the first rank's process has them."""
    nodes: list[PlannedNode] = []
    for node in plan.nodes:
        if node.ranks <= 1:
            node = replace(node, workers=())
        nodes.append(node)
    return replace(plan, nodes=tuple(nodes))


def _place_as_rank(plan: Plan, rank: int) -> Plan:
    """The same plan, in which the Worker is this rank of each node that has several."""
    nodes: list[PlannedNode] = []
    for node in plan.nodes:
        if node.workers and node.ranks > 1:
            workers = [f"rank {i}" for i in range(node.ranks)]
            workers[rank] = WORKER
            node = replace(node, workers=tuple(workers))
        nodes.append(node)
    return replace(plan, nodes=tuple(nodes))


def _set_threads(node: PlannedNode) -> None:
    """Use as many threads as the kernel had in the run: the last bits depend on it."""
    if node.traits.computes:
        import torch

        torch.set_num_threads(node.layout.threads)
