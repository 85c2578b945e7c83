"""A Worker: one process with one or more kernels, which it runs one after another.

    executes          waits for                    unblocked by                      in
    RunChunk          its rows                     the channels of their Workers     chunk_runs.py
    Record            its rows                     the same                          worker.py
    Evaluate          its rows                     the same                          training.py
    TrainStep         its rows; with ranks, Go     the same; the coordinator         training.py
    TrainPart         the same                     the same                          training.py
    FinishStep        with ranks, Go               the coordinator                   training.py
    Go                the ranks with equal rows    the first of them, which gives    training.py
    Offer, Load       weights                      see weight_delivery.py
    Save, Restore     rows to be saved             the channels of their Workers     worker_files.py

Owns: carrying out instructions in order. Does not own: how chunks run (chunk_runs.py), any decision
(coordinator), its channel (the caller's), messages between processes (engine/run/launch).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from engine.channels.contract import Channel, PeerLost
from engine.channels.tensors.pairs import TensorPairs
from engine.channels.tensors.shared_memories import SharedMemories
from engine.keep.record.recorder import RowRecorder
from engine.keep.samples import SamplesBehind, SampleWriter, sample_table
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.reports import Report
from engine.run.worker.chunk_runs import KernelRuns
from engine.run.worker.counters import FlowCounts
from engine.run.worker.kernel_loader import OpenKernels
from engine.run.worker.newest_rows import NewestRows
from engine.run.worker.outside_waits import OutsideWaits
from engine.run.worker.row_metrics import step_metrics
from engine.run.worker.rows import WorkerRows
from engine.run.worker.timing import Timing
from engine.run.worker.training import WorkerTraining
from engine.run.worker.weight_delivery import Delivery
from engine.run.worker.worker_files import WorkerFiles

if TYPE_CHECKING:
    from engine.channels.tensors.row_broadcast import RowBroadcast


class Worker:
    """The kernels of one Worker. `execute` carries out one instruction and yields its events."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        *,
        channel: Channel,
        inproc: bool = False,
        samples: SampleWriter | SamplesBehind | None = None,
        recorder: RowRecorder | None = None,
        group: Any = None,
        replica_group: Any = None,
        cast: RowBroadcast | None = None,
        pairs: TensorPairs | None = None,
        memories: SharedMemories | None = None,
        newest: NewestRows | None = None,
    ) -> None:
        """group: a rank's process group. replica_group: of those with equal rows. cast: to these.
        pairs: worlds, by peer. memories: for weights. newest: where the newest rows can be looked
        at.
        """
        self.name = name
        self.channel = channel
        self.timing = Timing(name, plan.origin)
        self.counts = FlowCounts(name)
        self.timing.peak = self.counts.peak
        self.rows = WorkerRows(name, plan, channel, pairs, self.counts, self.timing)
        self.waits = OutsideWaits(self.timing)
        self.kernels = OpenKernels(
            plan,
            self.timing,
            channel,
            self.waits,
            group=group,
            replica_group=replica_group,
            inproc=inproc,
        )
        self.files = WorkerFiles(
            plan=plan, kernels=self.kernels, rows=self.rows, timing=self.timing, samples=samples
        )
        self._plan = plan
        self._samples = samples
        self.recorder = recorder
        self.delivery = Delivery(
            plan, self.kernels.by_node, channel, self.timing, pairs, memories, self.counts
        )
        self.runs = KernelRuns(
            name, self.kernels, self.rows, self.delivery, self._carry_out, recorder, newest, cast
        )
        self._training = WorkerTraining(
            name, plan, self.kernels, self.rows, cast, digests=recorder is not None
        )
        self._reports: list[Report] = []

    def open(self) -> Iterator[m.Event]:
        """Open every kernel. A Worker that takes turns on its devices then sleeps."""
        self.kernels.load()
        self.counts.opening()
        yield from self.kernels.open()
        if any(self.name in group for group in self._plan.turns):
            self.kernels.sleep()

    def close(self) -> None:
        """Close every kernel that was opened, the last first, whatever one of them raises."""
        self._training.forget_prepared()
        try:
            self.kernels.close()
        finally:
            self.runs.close()
            if self.recorder is not None:
                self.recorder.close()

    def reports(self) -> list[Report]:
        """Metrics since the last call, except those of chunks, which are Reported."""
        reports, self._reports = self._reports, []
        reports += self._training.reports()
        reports += self.timing.reports()
        reports += self.kernels.reports()
        reports += self.delivery.reports()
        reports += self.rows.ahead.reports()
        reports += self.counts.reports()
        reports += self.waits.reports()
        return reports

    def execute(self, instruction: m.ToWorker) -> Generator[m.Event, None, None]:
        """Carry out one instruction; FetchFailed if a Worker that keeps its rows is gone."""
        try:
            if not isinstance(instruction, m.RunChunk):
                yield from self.delivery.settle()
            yield from self._carry_out(instruction)
        except PeerLost as lost:
            assert isinstance(instruction, m.Task)
            yield m.FetchFailed(id=instruction.id, worker=self.name, peer=lost.peer)

    def _carry_out(self, instruction: m.ToWorker) -> Iterable[m.Event]:
        match instruction:
            case m.RunChunk():
                return self.runs.run(instruction)
            case m.TrainStep() | m.TrainPart():
                return (self._training.train(instruction),)
            case m.FinishStep():
                return (self._training.finish(instruction),)
            case m.Go():
                return (self._training.go(instruction),)
            case m.Evaluate():
                return (self._training.evaluate(instruction),)
            case m.Record():
                return (self._record(instruction),)
            case m.Offer():
                first = self.kernels.rank(instruction.writer) == 0
                return self.delivery.offer(instruction, first=first)
            case m.Load():
                return self.delivery.bring(instruction)
            case m.Release() | m.FetchAhead():
                self._carry_out_at_once(instruction)
                return ()
            case _:
                return (self._turn(instruction),)

    def _carry_out_at_once(self, instruction: m.Release | m.FetchAhead) -> None:
        if isinstance(instruction, m.Release):
            self.release(instruction.blocks)
        else:
            self.rows.ahead.begin(instruction)

    def release(self, blocks: Iterable[int]) -> None:
        """Forget blocks; from any thread."""
        self.rows.release(blocks)
        self.delivery.release(blocks)

    def _record(self, message: m.Record) -> m.Recorded:
        """Metrics of a Step's rows, and samples of them if they are due."""
        rows = {
            node: self.rows.assemble_inputs(keys, {node: message.inputs[node]})[node]
            for node, keys in message.keys.items()
        }
        slots: dict[str, int] = {}
        for node in self._plan.nodes:
            if node.traits.generates:
                slots[node.name] = node.layout.slots * node.layout.replicas
        self._reports += step_metrics(self._plan.recorded, rows, slots)
        samples, step = self._samples, message.step
        if samples is not None and samples.due(step) and any(map(len, rows.values())):
            what = f"samples of step {step}"
            task, name = message.id, "samples"
            with self.kernels.during("record", name, what, task=task, computes=False):
                samples.write(step, sample_table(step, rows))
        return m.Recorded(id=message.id)

    def _turn(self, message: m.Sleep | m.Wake) -> m.Slept | m.Woken:
        """Give the devices back, or take them again."""
        if isinstance(message, m.Wake):
            self.kernels.wake()
            return m.Woken(worker=self.name)
        self._training.forget_prepared()
        self.kernels.sleep()
        return m.Slept(worker=self.name)
