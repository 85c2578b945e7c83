"""Chunks in the kernels of one Worker: from their rows to the rows that they make.

    executes                  waits for                   unblocked by
    RunChunk                  its rows                    the channels of their Workers; of a rank,
                                                          the lead of its replica
    one that joins another    a batch of the other one    `interrupt` of the kernel

Where a node has a lag and its kernel takes further chunks into a run (Joinable), a run goes on for
as long as chunks come. What the Worker is told meanwhile is carried out between two batches, in the
order in which it was told: a chunk of the node joins, chunks of other nodes run, rows are recorded,
weights of others are loaded. What has to wait for the end of the run, such as a train Step, lets
nothing pass that was told later, so the run ends.

Owns: running chunks, and what is told of them. Does not own: which of their rows have come
(chunk_rows.py), rows that are fetched ahead (joined_inputs.py), new weights for a running chunk
(weight_delivery.py), other instructions (worker.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dataflow.batch import Batch
from dataflow.errors import ProcessLost
from dataflow.kernel import Chunk
from dataflow.kernel_abilities import Interruptible, Joinable
from engine.channels.contract import PeerLost
from engine.keep.record.recorder import RowRecorder
from engine.plan.plan import PlannedNode
from engine.protocol import messages as m
from engine.run.worker.chunk_reports import ChunkReports
from engine.run.worker.chunk_rows import ChunksUnderWay, ChunkUnderWay
from engine.run.worker.joined_inputs import JoinedInputs
from engine.run.worker.kernel_loader import OpenKernels
from engine.run.worker.newest_rows import NewestRows
from engine.run.worker.rank_agreement import RankAgreement
from engine.run.worker.replica_rows import ReplicaRows
from engine.run.worker.rows import WorkerRows
from engine.run.worker.short_memory import RanShort, ShortMemory
from engine.run.worker.timing import During
from engine.run.worker.weight_delivery import Delivery

if TYPE_CHECKING:
    from engine.channels.tensors.row_broadcast import RowBroadcast

TakeNext = Callable[[Callable[[m.ToWorker], bool]], m.ToWorker | None]
"""Takes the next thing that was told, if it passes."""


class KernelRuns:
    """Of one Worker. carry_out: executes another instruction. take_next: set by whoever keeps what
    was told and is not begun; nothing is taken without it.
    """

    def __init__(
        self,
        worker: str,
        kernels: OpenKernels,
        rows: WorkerRows,
        delivery: Delivery,
        carry_out: Callable[[m.ToWorker], Iterable[m.Event]],
        recorder: RowRecorder | None,
        newest: NewestRows | None,
        broadcast: RowBroadcast | None = None,
    ) -> None:
        self._worker, self._kernels, self._rows = worker, kernels, rows
        self._delivery, self._carry_out = delivery, carry_out
        self._recorder, self._newest = recorder, newest
        self.take_next: TakeNext = lambda passes: None
        self._joined_inputs = JoinedInputs(rows)
        self._replica_rows = ReplicaRows(worker, broadcast, rows.device)
        self._reports = ChunkReports(worker, kernels, rows, recorder, self._replica_rows)
        self.ranks = RankAgreement(worker, delivery, broadcast)
        self._memory = ShortMemory(worker, kernels)
        self._fetches_ahead = False
        self._is_running = False
        self._lock = threading.Lock()
        self._open_to = ""
        """The running node, if chunks may join."""
        self._in_parts: Interruptible | None = None
        """The running kernel, if its rows are worked on in parts."""

    # --- from any thread --------------------------------------------------------------------------

    def fetch_ahead(self, instruction: m.ToWorker) -> None:
        """Begin to fetch what a chunk takes that will join the running one. Before it is put where
        `take_next` looks.
        """
        self._fetches_ahead = True
        with self._lock:
            joins = isinstance(instruction, m.RunChunk) and instruction.node == self._open_to
        if joins:
            assert isinstance(instruction, m.RunChunk)
            self._joined_inputs.begin(instruction)

    def announce(self, instruction: m.ToWorker) -> None:
        """Interrupt a run to which this can come, once it is where `take_next` looks."""
        if isinstance(instruction, m.RunChunk):
            self._joined_inputs.call_when_ready(instruction, self.interrupt)
        else:
            self.interrupt()

    def interrupt(self) -> None:
        """Let a run to which chunks can join look at what was told."""
        with self._lock:
            if self._open_to:
                self._kernels[self._open_to].interrupt()

    def ask_for_watermark(self) -> None:
        """Let a run whose rows are worked on in parts hand over what is ready, and say how long
        the others are at least: no row may end for long.
        """
        with self._lock:
            if self._in_parts is not None:
                self._in_parts.interrupt()

    def forget(self) -> None:
        """Drop rows that were fetched ahead: their chunks will not begin."""
        self._joined_inputs.forget()

    def close(self) -> None:
        """End the thread that fetches."""
        self._joined_inputs.close()

    # --- the Worker's thread ----------------------------------------------------------------------

    def run(self, chunk: m.RunChunk) -> Iterator[m.Event]:
        """Run a chunk, and those that join it. Raises PeerLost where its rows are gone."""
        node = self._kernels.nodes[chunk.node]
        is_agreed = self.ranks.governs(node)
        if self._replica_rows.is_taken(chunk) and not is_agreed:
            yield from self._run_as_rank(chunk)
            return
        if self._is_running:
            yield from self._run_within(chunk)
            return
        first = self._begin(chunk, counted=self._lets_join(node))
        if first is None:
            yield self._reports.make_end(chunk)
            return
        if is_agreed:
            yield from self.ranks.begin(node)
        self._memory.limit(node.name, chunk.limits)
        self._delivery.begins(node)
        self._is_running = True
        chunks = ChunksUnderWay(first)
        error = ""
        try:
            if self._lets_join(node):
                self._open(node)
            self._set_in_parts(node)
            for batch_events in self._write(chunks, node):
                yield from batch_events
                yield from self._delivery.meanwhile()
                yield from self._carry_out_others(chunks, node)
            # The kernel has ended: a chunk that comes from now on begins a run of its own.
            self._let_nothing_join()
            yield from self._reports.end_all(chunks, node)
        except RanShort as short:
            error = str(short)
        finally:
            self._is_running = False
            self._let_nothing_join()
        if error:
            yield from self._give_back(chunks, node, error)
        yield from self._delivery.ends()

    def _let_nothing_join(self) -> None:
        with self._lock:
            self._open_to, self._in_parts = "", None

    def _run_within(self, chunk: m.RunChunk) -> Iterator[m.Event]:
        """Run a chunk of another node between two batches of the running one."""
        node = self._kernels.nodes[chunk.node]
        begun = self._begin(chunk, counted=False)
        assert begun is not None  # only the lead of ranks runs a chunk within another
        chunks = ChunksUnderWay(begun)
        self._memory.limit(node.name, chunk.limits)
        error = ""
        try:
            for batch_events in self._write(chunks, node):
                yield from batch_events
            yield from self._reports.end_all(chunks, node)
        except RanShort as short:
            error = str(short)
        if error:
            yield from self._give_back(chunks, node, error)

    def _give_back(
        self, chunks: ChunksUnderWay, node: PlannedNode, error: str
    ) -> Iterator[m.Event]:
        """Memory ran out: tell of each chunk that nothing more comes of it. Raises ProcessLost of a
        rank, for which others wait in a collective.
        """
        first = self._memory.give_back(node.name, chunks.oldest().message.id, error)
        for chunk in chunks:
            chunks.remove(chunk)
            # What has come of it may be kept, and not be made again.
            if self._recorder is not None:
                self._recorder.end(chunk.message, joined=chunk.joined)
            yield replace(first, id=chunk.message.id)
        if first.is_lost:
            raise ProcessLost(error)

    def _run_as_rank(self, chunk: m.RunChunk) -> Iterator[m.Event]:
        """Do one's part of a chunk whose lead keeps its rows and tells of them."""
        error = ""
        inputs = self._replica_rows.take(chunk)
        if inputs is not None:
            self._kernels.aligned[chunk.node].require_inputs(chunk.keys, inputs)
            what = f"chunk {chunk.id}, {len(chunk.keys)} rows"
            self._memory.limit(chunk.node, chunk.limits)
            try:
                with (
                    self._memory.computing(chunk.node),
                    self._kernels.during(chunk.node, chunk.node, what, task=chunk.id),
                ):
                    deque(self._kernels[chunk.node].run(_describe(chunk, inputs)), maxlen=0)
            except RanShort as short:
                error = str(short)
            if error:
                yield self._memory.give_back(chunk.node, chunk.id, error)
                raise ProcessLost(error)
            # The lead tells of these, for all ranks.
            session = self._kernels.sessions[chunk.node]
            session.reports()
            session.tombstones()
        yield self._reports.make_end(chunk)

    def _lets_join(self, node: PlannedNode) -> bool:
        kernel = self._kernels[node.name]
        return node.lag >= 1 and isinstance(kernel, Joinable) and kernel.joinable

    def _open(self, node: PlannedNode) -> None:
        """Let chunks join, also those that were told before."""
        with self._lock:
            self._open_to = node.name
        self.interrupt()

    def _set_in_parts(self, node: PlannedNode) -> None:
        kernel = self._kernels[node.name]
        if node.layout.part_tokens and isinstance(kernel, Interruptible):
            with self._lock:
                self._in_parts = kernel

    def _begin(self, chunk: m.RunChunk, *, counted: bool) -> ChunkUnderWay | None:
        """A chunk with its rows; None where this is another rank than the lead, which has none.
        Raises PeerLost, KernelError.
        """
        if self._replica_rows.is_taken(chunk):
            inputs = self._replica_rows.take(chunk)
            if inputs is None:
                return None
        else:
            inputs = self._replica_rows.give(chunk, self._joined_inputs.take)
        self._kernels.aligned[chunk.node].require_inputs(chunk.keys, inputs)
        node = self._kernels.nodes[chunk.node]
        described = _describe(chunk, inputs)
        expand = max(1, node.rows // node.inner) if counted else 0
        return ChunkUnderWay(chunk, described, self._delivery.version_of(node), expand)

    def _write(self, chunks: ChunksUnderWay, node: PlannedNode) -> Iterator[Iterator[m.Event]]:
        """Run the kernel. Yields the events of one batch after another."""
        rows = self._kernels[node.name].run(chunks.oldest().described)
        while True:
            oldest = chunks.oldest().message
            what = chunks.describe()
            during = self._kernels.during(node.name, node.name, what, task=oldest.id)
            with self._memory.computing(node.name), during.making():
                batch = next(rows, None)
            chunks.note_seconds(during.seconds)
            if batch is None:
                during.note_rows(None)
                break
            yield self._take_batch(chunks, batch, during)

    def _take_batch(
        self, chunks: ChunksUnderWay, batch: Batch, during: During
    ) -> Iterator[m.Event]:
        """Keep a batch and tell of it. One without rows lets something else happen, and may say how
        long all rows are at least.
        """
        if not len(batch):
            during.note_rows(None)
            yield from self._reports.tell_watermark(chunks.oldest().message, batch)
            yield from self._reports.report_tombstones(chunks)
            yield from self._reports.end_over(chunks)
            return
        chunk = chunks.find(batch.keys)
        message, inputs = chunk.message, chunk.described.inputs
        self._kernels.aligned[message.node].require_made(message.keys, batch, inputs)
        chunk.note_rows(batch.keys)
        if self._replica_rows.is_taken(message):  # the lead keeps the rows, and tells of them
            during.note_rows(None)
            yield from self._reports.report_metrics(message)
            yield from self._reports.report_tombstones(chunks)
            yield from self._reports.end_over(chunks)
            return
        ref = self._rows.keep(message.node, batch)
        during.note_rows(ref, task=message.id)
        if self._recorder is not None:
            self._recorder.add(message, batch, chunk.version)
        if self._newest is not None:
            self._newest.offer(message.node, batch)
        yield from self._reports.report_metrics(message)
        watermark = self._kernels.sessions[message.node].take_least_tokens()
        yield m.Produced(id=message.id, node=message.node, ref=ref, watermark=watermark)
        # At once: the other rows of a group need not wait for the end of the chunk.
        yield from self._reports.report_tombstones(chunks)
        yield from self._reports.end_over(chunks)

    # --- what comes meanwhile ---------------------------------------------------------------------

    def _carry_out_others(self, chunks: ChunksUnderWay, node: PlannedNode) -> Iterator[m.Event]:
        """Carry out what was told meanwhile, up to what has to wait for the end of the run."""
        if not self._open_to:
            return
        while True:
            while (instruction := self.take_next(self._passes)) is not None:
                yield from self._carry_out_other(chunks, instruction, node)
            if not self.ranks.governs(node):
                return
            agreed = self.ranks.agree(node, self._find_next(node))
            if agreed.taken is None:
                break
            yield from self._carry_out_other(chunks, agreed.taken, node)
        if agreed.dropped is not None:
            yield self._delivery.drop(agreed.dropped)
        if agreed.waits:
            self.interrupt()

    def _find_next(self, node: PlannedNode) -> m.ToWorker | None:
        """What was told next, if ranks take it up together and it can be here."""
        waiting: list[m.ToWorker] = []

        def look(instruction: m.ToWorker) -> bool:
            waiting.append(instruction)
            return False

        self.take_next(look)
        match waiting:
            case [m.RunChunk() as chunk] if chunk.node == node.name:
                return chunk if self._replica_rows.is_taken(chunk) or self._is_here(chunk) else None
            case [m.Load() as load] if load.reader == node.name:
                kernel: Any = self._kernels[node.name]
                return load if kernel.interruptible else None
        return None

    def _carry_out_other(
        self, chunks: ChunksUnderWay, instruction: m.ToWorker, node: PlannedNode
    ) -> Iterator[m.Event]:
        try:
            if isinstance(instruction, m.RunChunk) and instruction.node == node.name:
                yield from self._join(chunks, instruction)
            else:
                yield from self._carry_out(instruction)
        except PeerLost as lost:
            assert isinstance(instruction, m.Task)
            yield m.FetchFailed(id=instruction.id, worker=self._worker, peer=lost.peer)

    def _passes(self, instruction: m.ToWorker) -> bool:
        """Whether the running node does not have to end before this is carried out."""
        running = self._kernels.nodes[self._open_to]
        match instruction:
            case m.RunChunk() if self.ranks.governs(running) and instruction.giver:
                return False  # only once all ranks are there
            case m.RunChunk() if instruction.node == running.name:
                return self._is_here(instruction)
            case m.RunChunk() | m.Evaluate():
                return not self._shares_module(self._kernels.nodes[instruction.node], running)
            case m.Load() if instruction.reader == running.name:
                return self._delivery.takes_weights(running.name)
            case m.Load():
                return not self._shares_module(self._kernels.nodes[instruction.reader], running)
            case m.Record() | m.Release():
                return True
            case _:
                return False

    def _is_here(self, chunk: m.RunChunk) -> bool:
        """Whether a chunk that is to join can begin at once. Where rows are fetched ahead, those of
        a chunk that was told before the run began are asked for now.
        """
        if self._fetches_ahead and not self._joined_inputs.has_begun(chunk):
            self._joined_inputs.begin(chunk)
            if not self._joined_inputs.is_ready(chunk):
                self._joined_inputs.call_when_ready(chunk, self.interrupt)
        return self._joined_inputs.is_ready(chunk)

    def _shares_module(self, node: PlannedNode, other: PlannedNode) -> bool:
        """Whether both nodes compute by the same module, or engine."""
        modules = {use.module for use in other.models}
        return any(use.module in modules for use in node.models)

    def _join(self, chunks: ChunksUnderWay, message: m.RunChunk) -> Iterator[m.Event]:
        """Let a chunk join the run."""
        chunk = self._begin(message, counted=True)
        if chunk is None:
            yield self._reports.make_end(message)
            return
        kernel: Any = self._kernels[message.node]
        what = f"chunk {message.id}, {len(message.keys)} rows, joins"
        chunks.add(chunk)  # first, as it comes to nothing where memory runs out now
        with (
            self._memory.computing(message.node),
            self._kernels.during(message.node, message.node, what, task=message.id),
        ):
            kernel.join(chunk.described)
        yield from self._reports.report_metrics(message)
        yield from self._reports.report_tombstones(chunks)
        yield from self._reports.end_over(chunks)


def _describe(chunk: m.RunChunk, inputs: Mapping[str, Batch]) -> Chunk:
    """A chunk as its kernel sees it."""
    return Chunk(
        id=chunk.id,
        step=chunk.step,
        keys=chunk.keys,
        inputs=inputs,
        spans=chunk.spans,
        weights=chunk.weights,
    )
