"""A Worker: one process with one or more kernels, which it runs one after another.

    executes       waits for                         unblocked by
    RunChunk       its rows                          the channels of the Workers that keep them
    TrainStep      its rows; with ranks, Go          the same; the coordinator, when every rank is prepared
    Go             the ranks with the same rows      these, of which the first gives the rows to the others
    Evaluate       its rows                          as RunChunk
    Record         its rows                          as RunChunk
    Offer, Load    delivery.py

Owns: kernels, their sessions, what it was told. Does not own: any decision (coordinator), its
channel (whoever made it), nor messages between processes (process.py).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dataflow.batch import Batch, Keys
from dataflow.errors import RunError
from dataflow.kernel import Assignment, Chunk
from engine.channels.contract import Channel, PeerLost
from engine.channels.tensors.pairs import TensorPairs
from engine.checkpoint.cut import read_rows, write_rows
from engine.coordinator.ages import ages
from engine.coordinator.messages import (
    ChunkDone,
    Evaluate,
    Evaluated,
    Event,
    FetchFailed,
    Go,
    Load,
    Offer,
    Prepared,
    Produced,
    Record,
    Recorded,
    Release,
    Reported,
    RunChunk,
    Sleep,
    Slept,
    SourceOpened,
    Stepped,
    Task,
    Tombstoned,
    ToWorker,
    TrainStep,
    Wake,
    Woken,
)
from engine.coordinator.refs import NO_VERSION, Gather, Ref
from engine.observe.record import step_metrics
from engine.observe.reports import Doing, Report
from engine.observe.samples import SamplesBehind, SampleWriter, sample_table
from engine.plan.plan import Plan, PlannedNode
from engine.run.workers import Ask, KeepRows, Restore, Save, SaveWeights
from engine.worker.alignment import Alignment
from engine.worker.assemble import assemble, collect
from engine.worker.delivery import Delivery
from engine.worker.device_columns import DeviceColumns
from engine.worker.digest import row_digests
from engine.worker.kernel_loader import kernel_class, kernel_node, metric_labels
from engine.worker.session import Modules, NodeSession, SessionRanks
from engine.worker.timing import During, Span, Timing

if TYPE_CHECKING:
    from engine.channels.tensors.row_broadcast import RowBroadcast

Inputs = Mapping[str, tuple[Gather, ...]]


class Worker:
    """The kernels of one Worker. `execute` runs one instruction and yields what comes of it."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        *,
        channel: Channel,
        inproc: bool = False,
        samples: SampleWriter | SamplesBehind | None = None,
        group: Any = None,
        cast: RowBroadcast | None = None,
        pairs: TensorPairs | None = None,
    ) -> None:
        """channel: where what it makes is kept, and others' rows come from. samples: where the
        recorder writes them. group: the process group of the ranks that this Worker is one of;
        cast: its end of the broadcasts of rows to those that have the same. pairs: its worlds with
        others, if there are.
        """
        assert plan.program is not None
        self.name = name
        self.channel = channel
        self._plan = plan
        self._samples = samples
        self._group = group
        self._cast = cast
        self._nodes = {n.name: n for n in plan.nodes if name in n.workers}
        self._aligned = {name: Alignment(plan.program.node(name)) for name in self._nodes}
        self._inproc = inproc
        self._digests = (
            len(plan.workers) > 1 and name not in plan.stateful
        )  # whose rows are not made again
        self._labels = metric_labels(plan)
        self._modules = Modules()
        self._sessions: dict[str, NodeSession] = {}
        self._kernels: dict[str, Any] = {}
        self._timing = Timing(name, plan.origin)
        self._delivery = Delivery(plan, self._kernels, channel, self._timing, pairs)
        self._device = DeviceColumns(name, plan, pairs)
        self._prepared: dict[str, tuple[TrainStep, Assignment]] = {}
        self._reports: list[Report] = []

    # --- life -------------------------------------------------------------------------------------

    def open(self) -> Iterator[Event]:
        """Open every kernel, in running order; a source says how many rows it has. One that takes turns
        then sleeps.

        Raises what a kernel refuses its node with (DataError, KernelError, ...); anything else as
        KernelError.
        """
        assert self._plan.program is not None
        for node in self._nodes.values():
            names = {use.model: use.module for use in node.models}
            ranks = SessionRanks(
                rank=self._rank(node),
                world=node.ranks,
                group=self._group if node.ranks > 1 else None,
            )
            session = NodeSession(
                node.name, self._plan.seed, self._modules, names, ranks, self.channel.allocate
            )
            with self._timing.during(node.name, "imports", counted=False):
                kernel = kernel_class(node)()
            self._sessions[node.name] = session
            self._kernels[node.name] = kernel
            with self._during(node.name, "open"):
                kernel.open(
                    kernel_node(node, self._plan.program, inproc=self._inproc), node.layout, session
                )
            if node.work == "source":
                yield SourceOpened(node=node.name, rows=kernel.rows)
        if any(self.name in group for group in self._plan.turns):
            self._each("sleep")

    def close(self) -> None:
        """Close every kernel that was opened, the last first, whatever one of them raises."""
        kernels = list(self._kernels.values())
        self._kernels.clear()
        self._prepared.clear()
        _close_all(kernels)

    @property
    def doing(self) -> Doing:
        """What it is doing now; from any thread."""
        return self._timing.doing

    @property
    def span(self) -> Span | None:
        """Told of everything that was done: (node, what, start, end)."""
        return self._timing.span

    @span.setter
    def span(self, told: Span | None) -> None:
        self._timing.span = told

    def reports(self) -> list[Report]:
        """Metrics since the last call, but for those of chunks, which are Reported; of a node's
        ranks the first speaks for all.
        """
        found, self._reports = self._reports, []
        found += self._timing.reports()
        if self._cast is not None and (came := self._cast.moved()):
            found.append(("edge/broadcast/bytes", float(came), 1.0))
        for name in (n for n, node in self._nodes.items() if not node.traits.chunked):
            made = self._sessions[name].reports() if name in self._sessions else []
            found += made if self._rank(self._nodes[name]) == 0 else []
        return found

    def _rank(self, node: PlannedNode) -> int:
        return node.rank_of(self.name).index

    def _during(self, node: str, what: str) -> During:
        counted = node not in self._nodes or self._rank(self._nodes[node]) == 0
        return self._timing.during(node, what, counted=counted)

    # --- instructions -----------------------------------------------------------------------------

    def execute(self, instruction: ToWorker) -> Generator[Event, None, None]:
        """Carry out one instruction, yielding events as they come about.

        Where the Worker that keeps some of its rows is gone, that is FetchFailed, and nothing was
        begun.
        """
        try:
            yield from self._carry_out(instruction)
        except PeerLost as lost:
            assert isinstance(instruction, Task)
            yield FetchFailed(id=instruction.id, worker=self.name, peer=lost.peer)

    def _carry_out(self, instruction: ToWorker) -> Iterator[Event]:
        if not isinstance(instruction, RunChunk):
            yield from self._delivery.settle()
        match instruction:
            case RunChunk():
                yield from self._run_chunk(instruction)
            case TrainStep():
                yield self._train(instruction)
            case Go():
                prepared, assignment = self._prepared.pop(instruction.node)
                yield self._stepped(prepared, self._shared(prepared, assignment))
            case Evaluate():
                yield self._evaluate(instruction)
            case Record():
                self._record(instruction)
                yield Recorded(id=instruction.id, step=instruction.step)
            case Offer():
                yield from self._delivery.offer(
                    instruction, first=self._rank(self._nodes[instruction.writer]) == 0
                )
            case Load():
                yield from self._delivery.bring(instruction)
            case Release():
                self.release(instruction.blocks)
            case Sleep():
                self._prepared.clear()
                self._each("sleep")
                yield Slept(worker=self.name)
            case Wake():
                self._each("wake")
                yield Woken(worker=self.name)

    def settle(self) -> Iterator[Event]:
        """What nobody waits for, once an instruction has been carried out and told of: probes."""
        return self._delivery.settle()

    def interrupt_with(self, message: Load) -> bool:
        """From any thread, while `execute` runs a chunk: let it go on under this version.

        True: the running `execute` brings the weights in and yields what comes of it. False: no
        chunk runs that can take them; execute the message after what is running, before anything
        else.
        """
        return self._delivery.interrupt_with(message)

    def release(self, blocks: Iterable[int]) -> None:
        """Forget blocks."""
        for block in blocks:
            self.channel.release(block)
            self._delivery.release(block)
            self._device.release(block)

    def keep(self, node: str, batch: Batch) -> Ref:
        """Put rows that a node made into the outbox; returns them by reference. What is on a device
        stays there.
        """
        self._device.require(node, batch)
        tokens = self._nodes[node].tokens
        lengths = (
            batch.ragged(tokens).lengths
            if tokens in batch.names
            else np.zeros(len(batch), np.int64)
        )
        digest = row_digests(batch) if self._digests else np.zeros(0, dtype=np.uint64)
        block = self.channel.keep(batch)
        self._device.keep(block, batch)
        version = ages(self._plan, node, _oldest(batch))
        return Ref(
            worker=self.name,
            block=block,
            keys=batch.keys,
            lengths=lengths,
            version=version,
            digest=digest,
        )

    def rows(self, node: str, ref: Ref) -> Batch:
        """Rows that it keeps of a node, all of their columns."""
        row = np.arange(len(ref.keys))
        here = Gather(
            producer=node,
            columns=(),
            refs=((ref.worker, ref.block),),
            block=np.zeros_like(row),
            row=row,
        )
        return assemble(ref.keys, {"rows": (here,)}, self.channel, self._device)["rows"]

    def _each(self, what: str) -> None:
        """`sleep` or `wake` of every kernel that can."""
        for name, kernel in self._kernels.items():
            if hasattr(kernel, what):
                with self._during(name, what):
                    getattr(kernel, what)()

    def _run_chunk(self, chunk: RunChunk) -> Iterator[Event]:
        inputs, aligned = self._assembled(chunk.keys, chunk.inputs), self._aligned[chunk.node]
        aligned.require_inputs(chunk.keys, inputs)
        self._delivery.begins(self._nodes[chunk.node])
        rows = self._kernels[chunk.node].run(
            Chunk(id=chunk.id, step=chunk.step, keys=chunk.keys, inputs=inputs)
        )
        what = f"chunk {chunk.id}, {len(chunk.keys)} rows"
        while True:
            with self._during(chunk.node, what):
                batch = next(rows, None)
            if batch is None:
                break
            if len(batch):  # one without rows only lets new weights in
                aligned.require_made(chunk.keys, batch, inputs)
                yield from self._reported(chunk)
                yield Produced(id=chunk.id, node=chunk.node, ref=self.keep(chunk.node, batch))
            yield from self._delivery.meanwhile()
        yield from self._reported(chunk)
        for key, error, failed in self._sessions[chunk.node].tombstones():
            yield Tombstoned(id=chunk.id, node=chunk.node, key=key, error=error, failed=failed)
        yield ChunkDone(id=chunk.id, node=chunk.node)
        yield from self._delivery.ends()

    def _reported(self, chunk: RunChunk) -> Iterator[Reported]:
        """What was measured of the chunk since the last time."""
        made = self._sessions[chunk.node].reports()
        if made and not chunk.again:
            yield Reported(id=chunk.id, worker=self.name, metrics=tuple(made))

    def _train(self, message: TrainStep) -> Stepped | Prepared:
        """Train, or with several ranks fetch everything (what another rank gives excepted) and wait
        for Go; what waited before is wanted no longer.
        """
        self._prepared.pop(message.node, None)
        keys = message.keys if message.mine is None else message.keys.take(message.mine)
        split = message.mine is not None
        assignment = Assignment(
            sequence=message.id,
            step=message.step,
            keys=keys,
            inputs=(
                self._assembled(keys, message.inputs) if message.giver in ("", self.name) else {}
            ),
            whole=message.keys if split else None,
            mine=message.mine,
        )
        self._aligned[message.node].require_inputs(keys, assignment.inputs)
        if self._nodes[message.node].ranks == 1:
            return self._stepped(message, assignment)
        self._prepared[message.node] = message, assignment
        return Prepared(id=message.id, node=message.node, worker=self.name)

    def _shared(self, message: TrainStep, assignment: Assignment) -> Assignment:
        """With its rows, which the first of the ranks that have the same gives to the others."""
        if not message.giver:
            return assignment
        assert self._cast is not None
        try:
            with self._during(
                message.node, f"rows of step {message.step}, {len(assignment.keys)} rows"
            ):
                if message.giver == self.name:
                    self._cast.give(assignment.inputs)
                    return assignment
                found = self._cast.take(list(message.inputs))
        except PeerLost as lost:
            raise RunError(
                f"{self._plan.place(message.node)}: rows of step {message.step}: {lost}"
            ) from lost
        inputs = {
            name: Batch(assignment.keys, records, self._device.placed(values))
            for name, (records, values) in found.items()
        }
        return replace(assignment, inputs=inputs)

    def _stepped(self, message: TrainStep, assignment: Assignment) -> Stepped:
        node = message.node
        with self._during(node, f"step {assignment.step}, {len(assignment.keys)} rows"):
            metrics: Mapping[str, float] = self._kernels[node].step(assignment)
        if self._rank(self._nodes[node]) == 0:
            self._reports += [
                (self._labels[node].on(name), value, 1.0) for name, value in metrics.items()
            ]
        return Stepped(id=message.id, node=node, step=assignment.step, worker=self.name)

    def _evaluate(self, message: Evaluate) -> Evaluated:
        inputs = self._assembled(message.keys, message.inputs)
        assignment = Assignment(
            sequence=message.id, step=message.version, keys=message.keys, inputs=inputs
        )
        with self._during(message.node, f"version {message.version}, {len(message.keys)} rows"):
            metrics: Mapping[str, float] = self._kernels[message.node].step(assignment)
        self._reports += [(name, value, 1.0) for name, value in metrics.items()]
        score = next((value for name, value in metrics.items() if name.endswith("/reward")), None)
        return Evaluated(id=message.id, node=message.node, version=message.version, score=score)

    def _record(self, message: Record) -> None:
        rows = {
            node: self._assembled(keys, {node: message.inputs[node]})[node]
            for node, keys in message.keys.items()
        }
        self._reports += step_metrics(self._plan.recorded, rows)
        if (
            self._samples is not None
            and self._samples.due(message.step)
            and any(map(len, rows.values()))
        ):
            with self._during("record", f"samples of step {message.step}"):
                self._samples.write(message.step, sample_table(message.step, rows))

    def _assembled(self, keys: Keys, inputs: Inputs) -> dict[str, Batch]:
        return assemble(keys, inputs, self.channel, self._device)

    # --- files ------------------------------------------------------------------------------------

    def answer(self, request: Ask) -> Any:
        """Do what the loop asks: None for Save, Restore and SaveWeights, the Ref of KeepRows.

        Raises PeerLost where rows to be saved are gone with their Worker.
        """
        match request:
            case Save():
                self._save(request)
            case Restore():
                self._restore(request)
            case SaveWeights():
                with self._timing.during(
                    request.node, f"save weights to {request.directory.name}", counted=False
                ):
                    self._kernels[request.node].save_weights(request.directory)
            case KeepRows():
                node = request.file.stem
                return self.keep(node, self._device.restored(node, read_rows(request.file)))
        return None

    def _save(self, request: Save) -> None:
        if self._samples is not None:
            self._samples.flush()
        for node, path in request.nodes.items():
            with self._timing.during(node, "save", counted=False):
                self._kernels[node].save(request.directory / path)
        for name, (keys, gather) in request.rows.items():
            rows = collect([gather], self.channel, self._device)[0]
            write_rows(
                request.directory / "rows" / f"{name}.arrow",
                Batch(keys, rows.records, rows.device).on_host(),
            )

    def _restore(self, request: Restore) -> None:
        """Read weights back; every node that reads a follower is told how old it is."""
        for node, path in request.nodes.items():
            with self._timing.during(node, "restore", counted=False):
                self._kernels[node].restore(request.directory / path)
        for model in self._plan.models:
            for reader in model.readers if model.follows else ():
                if reader in self._kernels:
                    self._kernels[reader].load((), request.step - request.step % model.every)


def _close_all(kernels: list[Any]) -> None:
    """Close the last; whatever it raises, close the others too."""
    if kernels:
        try:
            kernels.pop().close()
        finally:
            _close_all(kernels)


def _oldest(batch: Batch) -> np.ndarray:
    """int32 [rows]: the oldest version among each row's tokens; NO_VERSION without tokens or
    without the column.
    """
    oldest = np.full(len(batch), NO_VERSION, dtype=np.int32)
    if "version" in batch.names:
        tokens_ = batch.ragged("version")
        full = tokens_.lengths > 0
        if full.any():
            oldest[full] = np.minimum.reduceat(tokens_.values, tokens_.offsets[:-1][full])
    return oldest
