"""One simulated Worker process, from its start to its end.

    simulated                   takes             answers
    RunChunk                    the rows' times   Produced..., Tombstoned..., ChunkDone
    TrainStep                   a time            Stepped; a rank: Prepared, and after Go, Stepped
    Wake, Sleep                 a time            Woken, Slept
    Offer, Load                 a time            Offered, Loaded
    Evaluate, Record            a time            Evaluated, Recorded
    Release                     nothing           -
    FetchAhead                  a time beside     -
    FileRequest (of the loop)   a time            an answer to the loop; also while asleep

Owns: carrying out one instruction after another, and checks that it can be carried out. Does not
own: when it dies and which messages arrive (workers.py), times (kernel_times.py), outcomes
(behaviour.py), files (file_requests.py).
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import chain

from dataflow.errors import RunError
from engine.protocol import messages as m
from engine.run.simulated_workers.chunks import ChunkRuns, RowsOfChunk
from engine.run.simulated_workers.decode_lane import DecodeLane
from engine.run.simulated_workers.fetched_ahead import FetchedAhead
from engine.run.simulated_workers.file_requests import FileRequest, FileRequests
from engine.run.simulated_workers.groups import Together, Work
from engine.run.simulated_workers.kernel_times import Rows
from engine.run.simulated_workers.lagged_ranks import HeldVersion
from engine.run.simulated_workers.replica_chunks import ReplicaChunks
from engine.run.simulated_workers.row_checks import require_rows
from engine.run.simulated_workers.spans import NOBODY, describe_message
from engine.run.simulated_workers.task_queue import Done, Task, TaskQueue, Waiting, end_both
from engine.run.simulated_workers.train_runs import TrainRuns
from engine.run.simulated_workers.world import SharedWorld


class SimulatedWorker:
    """A Worker of this epoch. under_way: what was sent to it and has not arrived, in order.
    events_sent: by it.
    """

    def __init__(self, world: SharedWorld, name: str, epoch: int) -> None:
        self.name = name
        self.epoch = epoch
        self.under_way: deque[m.ToWorker | FileRequest] = deque()
        self.events_sent = 0
        self.opened = self.gone = False
        self._world = world
        self._times = world.kernels
        self._chunks = ChunkRuns(self, world)
        self._files = FileRequests(self, world)
        self._ahead = FetchedAhead(world)
        self._training = TrainRuns(self, world, self._check)
        self._replica = ReplicaChunks(self, world, self._chunks, self._make_rows, self._next)
        self._stopped_until = 0.0
        self._put_off: deque[Done] = deque()
        """What was due while it was stopped, in order."""
        self._queue = TaskQueue()
        self._busy = False
        self._lanes: dict[str, DecodeLane] = {}
        """Node -> what it decodes; other chunks and requests are carried out meanwhile."""
        self._loaded_at = 0.0
        self._span = NOBODY
        """What it does now."""

    def die(self) -> None:
        """It loses what it was doing and what it kept."""
        self.gone = True
        self._world.outbox.lose(self.name)
        self._world.groups.forget(self.name)
        self._world.devices.sleep(self.name)
        self._world.cores.lose(self.name)

    def stop(self, seconds: float) -> None:
        """Do nothing for a time, then go on as if nothing had happened; the longest time counts."""
        self._stopped_until = max(self._stopped_until, self._world.clock.now + seconds)

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped now."""
        return self._stopped_until > self._world.clock.now

    def after(self, seconds: float, action: Done) -> None:
        """Schedule an action of this process, if it is still there by then."""
        self._world.clock.after(seconds, partial(self._act, action))

    def _act(self, action: Done) -> None:
        """Act now; if stopped, as soon as it goes on, after what was due before."""
        if self.gone:
            return
        if not self._put_off and not self.is_stopped:
            action()
            return
        if not self._put_off:
            self._world.clock.after(self._stopped_until - self._world.clock.now, self._go_on)
        self._put_off.append(action)

    def _go_on(self) -> None:
        if self.is_stopped:
            self._world.clock.after(self._stopped_until - self._world.clock.now, self._go_on)
            return
        while self._put_off and not self.gone:
            self._put_off.popleft()()

    def say(self, event: m.Event, span: int | None = None) -> None:
        """Send an event to the coordinator. span: which it comes from; None: what it does now."""
        self._world.say(self, event, self._span if span is None else span)

    def obey(self, message: m.ToWorker | FileRequest) -> None:
        """Take up an instruction or a request."""
        match message:
            case FileRequest():
                self._queue.add_request(partial(self._files.do, message))
                self._next()
            case m.Offer():
                self._enqueue(Waiting(partial(self._offer, message)))
            case m.Load():
                self._load(message)
            case m.Wake():
                self._wake(message)
            case m.Sleep():
                self._sleep(message)
            case m.Release():
                self._world.outbox.release(self.name, message.blocks)
            case m.FetchAhead():
                self._ahead.begin(message)
            case m.Go():
                prepared = self._world.groups.begin(message)
                self._world.devices.check(self.name)
                self._queue.add_go(partial(self._go, message, prepared))
                self._next()
            case m.FinishStep():
                self._enqueue(Waiting(self._begin_training(message)))
            case _:
                self._take_rows(message)

    def _take_rows(self, message: Rows) -> None:
        """Take up an instruction that reads rows of other Workers."""
        match message:
            case m.RunChunk():
                task: Task = partial(self._run_chunk, message)
            case m.TrainPart():
                self._enqueue(Waiting(partial(self._take_part, message)))
                return
            case m.TrainStep():
                task = self._begin_training(message)
            case m.Evaluate(id=number, node=node, version=version):
                answer = m.Evaluated(id=number, node=node, version=version)
                task = partial(self._read_and_answer, message, answer)
            case m.Record(id=number):
                answer = m.Recorded(id=number)
                task = partial(self._read_and_answer, message, answer)
        task = partial(self._fetch, message, task)
        if not isinstance(message, m.RunChunk):
            self._enqueue(Waiting(task))
            return
        self._enqueue(Waiting(task, chunk=True, together=bool(message.giver)))

    def _enqueue(self, waiting: Waiting) -> None:
        self._world.devices.check(self.name)
        self._queue.add(waiting)
        self._next()

    def _enqueue_first(self, task: Task) -> None:
        self._world.devices.check(self.name)
        self._queue.add_first(task)
        self._next()

    def _next(self) -> None:
        """Begin the next task, when idle."""
        if self._busy:
            return
        task = self._queue.take(decoding=bool(self._lanes or self._replica.followed))
        if task is not None:
            self._busy = True
            self.after(0.0, partial(task, self._idle))

    def _idle(self) -> None:
        self._busy = False
        self._end_span(self._span)
        self._next()

    def _begin_span(self, what: str, node: str, step: int, message: object) -> int:
        """Begin a span, if they are wanted."""
        log = self._world.log
        return NOBODY if log is None else log.begin(self.name, what, node, step, message)

    def _end_span(self, span: int) -> None:
        if self._world.log is not None and span != NOBODY:
            self._world.log.end(span)
        if span == self._span:
            self._span = NOBODY

    def note_compute(self, seconds: float, rows: int = 0, tokens: int = 0) -> None:
        """Note that what it does now keeps its device busy for so long."""
        if self._world.log is not None and self._span != NOBODY:
            self._world.log.note_compute(self._span, seconds, rows, tokens)

    def _check(self, message: Rows) -> None:
        if self._world.proving:
            require_rows(self._world, self.name, message)

    def _fetch(self, message: Rows, then: Task, done: Done) -> None:
        """Fetch what a message names and go on; FetchFailed if a Worker that kept it died."""

        def end() -> None:
            if self._world.log is not None:
                self._world.log.note_fetch(self._span)
            if peer := self._world.outbox.absent(chain.from_iterable(message.inputs.values())):
                if isinstance(message, m.TrainPart):
                    self._training.parts.note_lost(message, peer)
                failed = m.FetchFailed(id=message.id, worker=self.name, peer=peer)
                if isinstance(message, m.RunChunk) and message.giver:
                    self._replica.give_nothing(message, failed, done)
                    return
                self.say(failed)
                done()
            else:
                then(done)

        self._check(message)
        self._span = self._begin_span(*describe_message(message), message)
        here, seconds = self._ahead.take(message)
        self.after(max(seconds, self._world.fetching(message, here)), end)

    def _run_chunk(self, chunk: m.RunChunk, done: Done) -> None:
        short = self._world.shorts.find(chunk)
        if self._world.nodes[chunk.node].binds_late:
            if chunk.giver:
                self._replica.join(chunk, self._join, done)
                return
            if short is None:
                self._join(chunk)
            else:
                self.say(self._world.shorts.say(chunk, short))
            self._span = NOBODY  # that goes on in the lane
            done()
            return
        if chunk.giver:
            self._replica.run(chunk, done)
            return

        begun = self._world.clock.now

        def end() -> None:
            seconds = self._world.clock.now - begun
            over = m.ChunkDone(id=chunk.id, node=chunk.node, seconds=seconds)
            self.say(self._world.shorts.say(chunk, short) if short else over)
            done()

        self._make_rows(chunk, end, share=short.share if short else 1.0)

    def _make_rows(self, chunk: m.RunChunk, done: Done, share: float = 1.0) -> None:
        """Make a chunk's rows, or this share of its batches, as the only Worker that does."""
        begun, cores = self._world.clock.now, self._world.cores
        lost = cores.find_lost(self.name)

        def end() -> None:
            self._check(chunk)
            computed = self._world.clock.now - begun
            if self._times.threads(self._world.nodes[chunk.node]):
                computed = cores.count_computed(self.name, begun, lost)
            self.note_compute(computed, rows, tokens)
            self._chunks.note_read(chunk, begun)
            done()

        seconds, rows, tokens = self._chunks.run(chunk, end, share)
        self.note_compute(seconds, rows, tokens)

    def _join(self, chunk: m.RunChunk) -> None:
        """Take the rows of a chunk into what is decoded of its node, if anything is."""
        rows = RowsOfChunk(self, self._world, chunk)
        lane = self._lanes.get(chunk.node)
        if lane is None:
            over = partial(self._end_lane, chunk.node)
            lane = DecodeLane(self, self._world, self._chunks, rows.node, over)
        self._lanes[chunk.node], span = lane, self._span

        def end(seconds: float) -> None:
            self._check(chunk)
            if self._world.log is not None:
                self._world.log.note_compute(span, seconds, len(rows.keys), rows.tokens)
            self.say(m.ChunkDone(id=chunk.id, node=chunk.node), span)
            self._end_span(span)
            if chunk.giver:
                self._world.groups.lagged.end_chunk(chunk.node, self.name, chunk.id)

        lane.join(rows, span, end)
        self._span = NOBODY  # that goes on in the lane

    def _end_lane(self, node: str) -> None:
        del self._lanes[node]
        self._world.groups.lagged.end_run(node, self.name)
        self._next()

    def _begin_training(self, message: Together) -> Task:
        """What a train node does first of what it is told, once it has its rows."""
        if not self._training.is_prepared_first(message):
            return partial(self._training.train, message)
        self._world.devices.check(self.name)
        self._world.groups.note_assignment(message)
        return partial(self._training.prepare, message)

    def _take_part(self, message: m.TrainPart, done: Done) -> None:
        """A part comes after those before it, and is summed once."""
        place = self._training.parts.place(message)
        if place:
            self._training.answer_part(message, place, done)
        else:
            self._fetch(message, self._begin_training(message), done)

    def _go(self, go: m.Go, prepared: Together, done: Done) -> None:
        """A rank begins what it is prepared for."""
        self._span = self._begin_span("train", prepared.node, prepared.step, go)
        self._training.train(prepared, done)

    def _read_and_answer(
        self, message: m.Evaluate | m.Record, answer: m.Evaluated | m.Recorded, done: Done
    ) -> None:
        def end() -> None:
            self._check(message)
            if isinstance(message, m.Record):
                self._world.history.note_samples(message.step, message.keys)
            self.say(answer)
            done()

        self.after(self._times.answer(message), end)

    def _offer(self, message: m.Offer, done: Done) -> None:
        def end() -> None:
            block = -1
            if message.keeps or self.name == self._world.nodes[message.writer].workers[0]:
                block = self._world.outbox.offer(self.name, message.model, message.version)
            self.say(m.Offered(id=message.id, worker=self.name, block=block, digest=""))
            done()

        self._span = self._begin_span("offer", message.writer, message.version, message)
        self.with_all(("offer", message.writer, message.id), self._times.offer(message), end)

    def with_all(self, what: Work, seconds: float, end: Done) -> None:
        """Take a time, then call `end`; a node with ranks starts when all have come to this."""
        self.meet(what, partial(self.after, seconds, end))

    def meet(self, what: Work, begin: Done) -> None:
        """Begin; a node with ranks when all have come to this."""
        if self._world.nodes[what[1]].ranks > 1:
            self._world.groups.meet(what, self.name, begin)
        else:
            begin()

    def _load(self, message: m.Load) -> None:
        """Load weights before queued chunks, and at once in a reader that may be interrupted. Those
        of another Worker are fetched beside what it does.
        """
        self._world.devices.check(self.name)
        seconds, now = self._times.load(message), self._world.clock.now
        has_lag = self._world.nodes[message.reader].lag > 0
        interrupts = has_lag and self._times.interrupts(message.reader)
        if not interrupts and message.source in ("", self.name):
            self._enqueue_first(partial(self._load_here, message, seconds))
            return
        self._loaded_at = max(now + seconds, self._loaded_at)  # one after another
        span = self._begin_span("load", message.reader, message.version, message)
        finish = partial(self._finish_load, message, span)
        ended = partial(self._end_span, span)

        def come() -> None:
            self._keep_version(message)
            if self._world.log is not None and message.source:
                self._world.log.note_fetch(span)
            if interrupts:
                finish(ended)
            else:
                self._enqueue_first(partial(end_both, finish, ended))

        self.after(self._loaded_at - now, come)

    def _load_here(self, message: m.Load, seconds: float, done: Done) -> None:
        """Load what is in this Worker already, and do nothing else meanwhile."""
        self._span = self._begin_span("load", message.reader, message.version, message)
        self.after(seconds, partial(self._finish_load, message, self._span, done))

    def _keep_version(self, message: m.Load) -> None:
        """Keep what has come for other readers, if that was asked for."""
        if not message.keeps or self._world.outbox.is_lost(message.source, message.block):
            return
        model = message.leader or message.model
        block = self._world.outbox.offer(self.name, model, message.version)
        self.say(m.Fetched(id=message.id, worker=self.name, block=block))

    def _finish_load(self, message: m.Load, span: int, done: Done) -> None:
        if self._world.outbox.is_lost(message.source, message.block):
            self.say(m.FetchFailed(id=message.id, worker=self.name, peer=message.source), span)
            done()
            return
        if message.source:
            model = message.leader or message.model
            self._world.outbox.check_offer(message.source, message.block, model, message.version)

        def drop() -> None:
            self.say(m.Loaded(id=message.id, worker=self.name), span)
            done()

        def use() -> None:
            if not message.leader or self._world.nodes[message.reader].traits.generates:
                self._chunks.note_load(message.reader, message.version)
            drop()

        held = HeldVersion(message.version, use, drop)
        self._world.groups.lagged.hold(message.reader, self.name, held)

    def _wake(self, message: m.Wake) -> None:
        self._world.devices.wake(self.name)
        span = self._begin_span("wake", "", 0, message)

        def end() -> None:
            self.say(m.Woken(worker=self.name), span)
            self._end_span(span)

        self.after(self._times.turn(self.name), end)

    def _sleep(self, message: m.Sleep) -> None:
        """Give the devices back. Raises RunError if it has work that it cannot drop."""

        def sleep(done: Done) -> None:
            self._span = self._begin_span("sleep", "", 0, message)
            self.after(self._times.turn(self.name), partial(end, done))

        def end(done: Done) -> None:
            span = self._span
            self._world.devices.sleep(self.name)
            done()
            self.say(m.Slept(worker=self.name), span)

        self._world.groups.give_up(self.name)
        if self._queue.has_work:
            raise RunError(f"worker {self.name} was sent to sleep with work to do")
        self._enqueue(Waiting(sleep))
