"""Recorded tasks, carried out once more by one Worker in this process.

Owns: the plan of that Worker, instructions from what was told, versions in their order. Does not
own: which tasks (needed_tasks.py), the Worker and its kernels (engine/run/worker), what further
ranks do (rank_replay.py) and their processes (other_ranks.py), comparing what comes of it
(rerun.py).

The run's own instructions are told again, with the rows where they lie now: no coordinator decides
anything a second time. Who loads which version is said by the coordinator's `Versions`. Of a node
that several ranks trained this process is the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dataflow.batch import Batch, Keys
from dataflow.errors import RunError
from dataflow.kernel import Chunk, KernelNode
from dataflow.loss_terms import ROWS
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
from engine.replay.rank_rows import give
from engine.replay.recorded_run import RecordedRun
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
    """Where a process of a rerun is among the ranks. rows: by which the first rank gives the others
    the rows that it makes.
    """

    rank: int = 0
    group: Any = None
    rows: RowBroadcast | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayedTask:
    """What came of a task. made: a chunk's rows. digest, metrics: of a train node's Step. logprobs:
    of a replayed chunk, float32, of its recorded tokens; at: of which of them.
    """

    task: RecordedTask
    made: tuple[Batch, ...] = ()
    digest: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    logprobs: np.ndarray | None = None
    at: np.ndarray | None = None


class Replay:
    """Runs what is needed, in order. checkpoint: of the Step that it begins from, if that is not
    the beginning. seat: this process among the ranks, where nodes of several are opened.
    """

    def __init__(
        self,
        run: RecordedRun,
        what: NeededRun,
        checkpoint: Path | None,
        seat: RankSeat | None = None,
    ) -> None:
        self._run, self._what, self._checkpoint = run, what, checkpoint
        self._seat = seat = seat or RankSeat()
        self.plan = _alone(run.plan, opened(run.plan, what))
        self._own_plan = self.plan if seat.rank == 0 else _without_others(self.plan)
        self._worker = Worker(
            WORKER,
            _as_rank(self._own_plan, seat.rank),
            channel=InprocChannel(),
            inproc=True,
            group=seat.group,
        )
        self._workers = InprocWorkers(self._worker)
        self._outstanding = Outstanding()
        self._versions = Versions(self.plan, self._outstanding)
        self._made: dict[str, dict[tuple[Key, int], tuple[Batch, int]]] = {}
        self._teachers: dict[str, Any] = {}

    def run(self) -> Iterator[ReplayedTask]:
        """What comes of each task. Raises what a kernel raises."""
        with closing(self._workers):
            for _ in self._workers.open():
                pass
            version = self._what.checkpoint
            if self._checkpoint is not None:
                restore_state(self._own_plan, self._workers, self._checkpoint, version)
            self._publish(version, moved=False)
            for at, needed in self._what.tasks:
                while version < at:
                    version += 1
                    self._publish(version, moved=True)
                yield self._replayed(needed, version)

    def _publish(self, version: int, *, moved: bool) -> None:
        """Every reader loads this version, and followers move."""
        for load in self._versions.publish(version, moved=moved):
            assert isinstance(load, m.Load)
            self._load(load)
            self._versions.heard(m.Loaded(id=load.id, worker=WORKER), load)

    def _load(self, load: m.Load) -> None:
        """A reader loads."""
        for _ in self._told(load):
            pass

    def _told(self, instruction: m.ToWorker) -> Iterator[m.Event]:
        self._workers.tell(instruction)
        while (event := self._workers.next()) is not None:
            yield event

    def _replayed(self, needed: NeededTask, version: int) -> ReplayedTask:
        task = needed.task
        node = self.plan.node(task.node)
        _set_threads(node)
        if needed.forced:
            return self._looked_at(node, task, version)
        if task.kind == "train":
            task = self._own(task)
        inputs = self._inputs(task)
        blocks = tuple(ref[1] for gathers in inputs.values() for g in gathers for ref in g.refs)
        try:
            match task.kind:
                case "chunk":
                    return self._chunk(task, inputs)
                case "train":
                    return self._train(task, inputs)
                case _:
                    return self._evaluation(task, inputs)
        finally:
            self._worker.release(dict.fromkeys(blocks))

    def _chunk(self, task: RecordedTask, inputs: m.Inputs) -> ReplayedTask:
        told = m.RunChunk(
            id=task.id,
            node=task.node,
            worker=WORKER,
            step=task.step,
            keys=task.keys,
            inputs=inputs,
        )
        found: list[Batch] = []
        for event in self._told(told):
            if isinstance(event, m.Produced):
                found.append(self._worker.rows.of(task.node, event.ref).on_host())
                self._worker.release([event.ref.block])
        for batch in found:
            self._keep(task, batch)
        if self._seat.rows is not None:
            give(self._seat.rows, found)
        return ReplayedTask(task=task, made=tuple(found))

    def _own(self, task: RecordedTask) -> RecordedTask:
        """What this rank trains on. Of ranks with equal rows only the first was told where they
        are.
        """
        ranks = self._run.told.ranks_of(task)
        if len(ranks) == 1:
            return task
        rank, tensor = self._seat.rank, self.plan.node(task.node).layout.tensor
        return replace(ranks[rank], gathers=ranks[rank // tensor * tensor].gathers)

    def _train(self, task: RecordedTask, inputs: m.Inputs) -> ReplayedTask:
        own = {
            name: m.OwnRows(keys=rows.keys, mine=rows.mine, total=rows.total)
            for name, rows in task.rows.items()
        }
        told = m.TrainStep(
            id=task.id,
            node=task.node,
            worker=WORKER,
            step=task.step,
            keys=own[ROWS].keys,
            mine=own[ROWS].mine,
            total=own[ROWS].total,
            inputs=inputs,
            others={name: rows for name, rows in own.items() if name != ROWS},
        )
        go = m.Go(id=task.id, node=task.node, worker=WORKER)
        several = self.plan.node(task.node).ranks > 1
        metrics = self._measured(task.step, told, *([go] if several else []))
        digest = weights_digest(self._worker.kernels[task.node].pieces())
        return ReplayedTask(task=task, digest=digest, metrics=metrics)

    def _evaluation(self, task: RecordedTask, inputs: m.Inputs) -> ReplayedTask:
        told = m.Evaluate(
            id=task.id,
            node=task.node,
            worker=WORKER,
            version=task.step,
            keys=task.keys,
            inputs=inputs,
        )
        return ReplayedTask(task=task, metrics=self._measured(task.step, told))

    def _measured(self, step: int, *told: m.ToWorker) -> dict[str, float]:
        """The node's own metrics of it."""
        self._worker.reports()
        for instruction in told:
            for _ in self._told(instruction):
                pass
        found = StepMetrics()
        for name, value, count in self._worker.reports():
            if not name.startswith(("time/", "cpu/", "queue/")):
                found.add(name, value, count)
        return {name: value for name, value in found.row(step).items() if name != "step"}

    # --- rows -------------------------------------------------------------------------------------

    def _keep(self, task: RecordedTask, batch: Batch) -> None:
        """Rows that were made here, for the nodes behind."""
        made = self._made.setdefault(task.node, {})
        for row, key in enumerate(batch.keys.rows()):
            made[key, task.step] = batch, row

    def _inputs(self, task: RecordedTask) -> dict[str, tuple[Gather, ...]]:
        """What the task is told to gather: its rows are put into the outbox for it."""
        found: dict[str, tuple[Gather, ...]] = {}
        for gather in task.gathers:
            found[gather.input] = (*found.get(gather.input, ()), self._gathered(gather, task.step))
        return found

    def _gathered(self, gather: RecordedGather, step: int) -> Gather:
        count = len(gather.keys)
        at = np.arange(count), np.zeros(count, dtype=np.int32)
        if not count:
            return Gather(
                producer=gather.producer,
                columns=gather.columns,
                refs=(),
                block=at[1],
                row=at[0],
                keys=gather.owners,
            )
        rows = self._rows(gather.producer, gather.keys, step)
        device = self._worker.rows.device
        ref = self._worker.rows.keep(gather.producer, device.restored(gather.producer, rows))
        return Gather(
            producer=gather.producer,
            columns=gather.columns,
            refs=((WORKER, ref.block),),
            block=at[1],
            row=at[0],
            keys=gather.owners,
        )

    def _rows(self, producer: str, keys: Keys, step: int) -> Batch:
        """The rows of these keys: those that were made here, else the recorded ones."""
        made = self._made.get(producer, {})
        step = step if self.plan.node(producer).region != "stream" else 0
        here = [self._made_row(made, key, step) for key in keys.rows()]
        if all(here):
            return Batch.concat([batch.take(np.array([row])) for batch, row in filter(None, here)])
        table, missing = self._run.rows.find(producer, keys, step)
        if table is None:
            raise RunError(f"{self._run.folder}: {producer} has no rows {missing[:3]}")
        return recorded_batch(table)

    @staticmethod
    def _made_row(
        made: Mapping[tuple[Key, int], tuple[Batch, int]], key: Key, step: int
    ) -> tuple[Batch, int] | None:
        return made.get((key, step)) or made.get((key, 0))

    # --- recorded tokens --------------------------------------------------------------------------

    def _looked_at(self, node: PlannedNode, task: RecordedTask, version: int) -> ReplayedTask:
        """The log-probs of recorded tokens of this version."""
        table = self._run.rows.of_task(node.name, task)
        assert table is not None
        rows = recorded_batch(table).sorted()
        kernel = self._teacher(node, version)
        chunk = Chunk(id=task.id, step=task.step, keys=rows.keys, inputs={"rows": rows})
        computed = Batch.concat(list(kernel.run(chunk))).ragged("logprobs").values
        at = np.flatnonzero(rows.ragged("version").values == version)
        return ReplayedTask(task=task, made=(rows,), logprobs=computed[at], at=at)

    def _teacher(self, node: PlannedNode, version: int) -> Any:
        """A kernel that computes log-probs of given tokens with this version of a node's Model."""
        program = self.plan.program
        assert program is not None
        written, use = program.node(node.name), node.models[0]
        if node.name not in self._teachers:
            states = {s.name: s for s in program.states if isinstance(s, Model)}
            kernel = kernel_class(replace(node, kernel=written.operator.replayed))()
            told = KernelNode(
                name=node.name,
                operator=node.operator,
                models={"model": states[use.model]},
                params={"temperature": written.params.get("temperature")},
                returns=("logprobs",),
            )
            names = {use.model: f"{use.model} replayed"}
            kernel.open(told, node.layout, NodeSession(node.name, self.plan.seed, {}, names))
            self._teachers[node.name] = kernel
        kernel = self._teachers[node.name]
        writer = self._writer_of(node)
        if writer:
            kernel.load(self._worker.kernels[writer].pieces(), version)
        return kernel

    def _writer_of(self, node: PlannedNode) -> str:
        """Who trains the Model whose tokens are replayed; empty for nobody."""
        used = node.models[0].model
        return next((model.writer for model in self.plan.models if model.name == used), "")


def opened(plan: Plan, what: NeededRun) -> set[str]:
    """The nodes whose kernels are needed: those that run, and the writers of their weights."""
    found = {each.task.node for _, each in what.tasks if not each.forced}
    used = {
        u.model
        for _, each in what.tasks
        for u in plan.node(each.task.node).models
        if u.param != "tokenizer"
    }
    used |= {model.follows for model in plan.models if model.name in used and model.follows}
    return found | {model.writer for model in plan.models if model.name in used and model.writer}


def _alone(plan: Plan, there: set[str]) -> Plan:
    """The same plan with these nodes in one Worker, and the others nowhere."""
    nodes = tuple(
        replace(
            node,
            workers=(WORKER,) if node.name in there else (),
            layout=replace(node.layout, replicas=1),
        )
        for node in plan.nodes
    )
    alone = replace(plan, nodes=nodes, recorded=(), recorder=WORKER, turns=(), spare=(), hosts={})
    return replace(alone, devices={}, environments={})


def _without_others(plan: Plan) -> Plan:
    """The same plan without nodes that have one rank: the first rank's process has them."""
    nodes = (n if n.ranks > 1 else replace(n, workers=()) for n in plan.nodes)
    return replace(plan, nodes=tuple(nodes))


def _as_rank(plan: Plan, rank: int) -> Plan:
    """The same plan, in which the Worker is this rank of each node that has several."""
    nodes = tuple(
        replace(
            node,
            workers=tuple(WORKER if i == rank else f"rank {i}" for i in range(node.ranks)),
        )
        if node.workers and node.ranks > 1
        else node
        for node in plan.nodes
    )
    return replace(plan, nodes=nodes)


def _set_threads(node: PlannedNode) -> None:
    """As many as the kernel had in the run: the last bits depend on it."""
    if node.traits.computes:
        import torch

        torch.set_num_threads(node.layout.threads)
