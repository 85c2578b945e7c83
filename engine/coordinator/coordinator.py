"""The coordinator: the one that decides. Pure: events in, instructions out.

    handle(event, now) -> instructions            no sockets, no clock, no tensors, no rows
    handle_together(events, now) -> instructions  the same for what has come meanwhile

Owns: what an event means, and what is lost with a Worker. Does not own: when the run moves on
(course.py), the loop that carries messages (engine/run), nor any Worker.

Workers die at any moment (recovery.py). One without state is restarted, its rows are made again:
by the same chunks where that gives the same rows (dispatch.py), by other chunks or a further
attempt where the weights have changed (prompt_table.py). Otherwise the run goes back to a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.coordinator import run_warnings as doubtful
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.course import Course, Moment
from engine.coordinator.device_turns import DeviceTurns
from engine.coordinator.livelock import Livelock
from engine.coordinator.ranks import RankGroups
from engine.coordinator.settings import Restored, Settings
from engine.coordinator.task_ledger import Pending
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.refs import Key

_WITHIN = (m.Wish, m.Checkpointed)
"""What the loop may hear while it still carries out instructions: a Worker that ended meanwhile
would be told the rest of them.
"""

_TOGETHER = (m.Produced, m.ChunkDone, m.Reported, m.Loaded, m.Prepared, m.Woken, m.Slept)
"""What says only what has become of something that was asked: the run may move on after several of
these as well as after each. All others are handled alone, as what they mean depends on how far the
run is.
"""

Heard = tuple[str, m.Event]
"""An event, and before it its sender, where messages are numbered; else ""."""


class Coordinator:
    """Call `start` first, then `handle` for each event; both return instructions, in order."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self.plan = plan
        self._run = Course(plan, settings)
        self.sources, self.checkpoints = self._run.sources, self._run.checkpoints
        self._livelock = Livelock(plan, self.sources.admissions, settings.patience)
        self._ranks = RankGroups(plan, self._run.outstanding)
        self._turns = DeviceTurns(plan, self._run.outstanding)
        self._now = 0.0
        self._owed: list[Pending] = []
        """What the Worker that was lost last had not answered."""
        self._told: list[m.Instruction] = []
        """What rank groups and device turns have to say; it comes first."""

    @property
    def version(self) -> int:
        """The Steps that are done."""
        return self._run.version

    @property
    def at(self) -> Moment:
        """Where the run is."""
        return self._run.at

    def cuts(self) -> dict[str, tuple[int, int, int, int]]:
        """By source the prompts that are finished and untrained, that a Step takes, that are
        outstanding, and that may be. From any thread: these are numbers alone.
        """
        return {name: each.filled for name, each in self.sources.admissions.items()}

    # --- the two entries --------------------------------------------------------------------------

    def start(self, restored: Restored | None = None) -> list[m.Instruction]:
        """Begin, or resume from a checkpoint. Every reader is told which version to load."""
        if restored is not None:
            self._ranks.kept(ref for rows in restored.rows.values() for ref in rows.values())
        self._run.begin(restored)
        return self._flush()

    def in_order(self, message: m.Event | m.From) -> Iterator[m.Event]:
        """The events that this message lets through; handle each before the next is taken."""
        return self._run.recovery.in_order(message)

    def groups(self, messages: Iterable[m.Event | m.From], most: int) -> Iterator[list[Heard]]:
        """The events that these messages let through, in order, in groups of at most so many that
        may be handled together; handle each before the next is taken. A message is taken when it
        is needed.
        """
        group: list[Heard] = []
        recovery = self._run.recovery
        for message in messages:
            sender, said = _said(message)
            if group and not isinstance(said, _TOGETHER):
                yield group
                group = []
            numbered = isinstance(message, m.From)
            for event in recovery.in_order(message) if numbered else (message,):
                if isinstance(event, _TOGETHER):
                    group.append((sender, event))
                    if len(group) == most:
                        yield group
                        group = []
                    continue
                if group:  # one that was early, and whose turn has come
                    yield group
                    group = []
                if recovery.counts(message):
                    yield [(sender, event)]
        if group:
            yield group

    def handle(self, event: m.Event, now: float) -> list[m.Instruction]:
        """Process one event. now: seconds, by any clock that only goes forward."""
        return self.handle_together((event,), now)

    def handle_together(self, events: Sequence[m.Event], now: float) -> list[m.Instruction]:
        """Process a group of `groups`: take note of each, then move on once."""
        self._now = now
        self.checkpoints.passes(now)
        self._run.replicas.passes(now)
        moves = heard = False
        for event in events:
            asked = self._run.outstanding.heard(event)
            if isinstance(event, m.WorkerLost):
                if not self._run.recovery.lost(event):
                    return []
                self._owed = self._run.outstanding.lost(event.worker)
            found, told = self._ranks.heard(event, asked)
            self._told += [*self._turns.heard(event), *told]
            for each in found:
                heard |= self.at != "gone"
                moves |= self._hear(each, asked)
        if heard:
            self._go_on(may_move=moves)
        if (vain := self._livelock.seen(now)) and self.at == "gather":
            self._run.fail(vain)
        if self._run.replicas.groups:
            self._run.replicas.training = self.at == "step"
        return self._flush()

    @property
    def moving(self) -> bool:
        """Whether TimePassed is to be told where nothing else comes: a replica joins or leaves."""
        return self._run.replicas.moving and not self._run.over

    def _hear(self, event: m.Event, asked: Pending | None) -> bool:
        """Take note of an event; whether replicas may end and begin after it."""
        if self.at == "gone":
            return False
        if self.at == "finished":
            self._note_the_end(event, asked)
            return False
        self._note(event, asked)
        return not isinstance(event, _WITHIN)

    def _go_on(self, *, may_move: bool) -> None:
        """Move on as far as is possible without a further event."""
        if may_move and not self._run.over:
            self._move()
        self._run.advance()
        self._run.release()

    def _note_the_end(self, event: m.Event, asked: Pending | None) -> None:
        """The run is over: what was under way is released as it ends."""
        match event:
            case m.Produced():
                self._run.blocks.add(event.ref, 0)
            case m.ChunkDone() if asked is not None:
                self._run.dispatch.done(asked)
            case m.FetchFailed() if asked is not None:
                self._run.dispatch.undone(asked)
            case m.Loaded() | m.Offered() if asked is not None:
                self._weights_moved(event, asked)
            case m.WorkerLost():
                gone = self._run.blocks.lose(event.worker)
                self._run.dispatch.lost(event.worker, self._owed, gone)
                self._run.versions.lost(event.worker)

    def waiting(self) -> list[str]:
        """Who waits for whom, in words; for the watchdog and for a run that has stopped moving."""
        lines = [f"source {name}: has not opened" for name in sorted(self._run.unopened)]
        run = self._run
        parts = (run.versions, self.sources, run.training, run.dispatch, run.recovery, run.replicas)
        for part in parts:
            lines += part.waiting()
        if run.round is not None:
            lines += run.round.waiting()
        lines += [*self._ranks.waiting(), *self._turns.waiting()]
        if self.at == "checkpoint":
            lines.append(f"checkpoint of step {self.version}: is not on disk yet")
        return lines

    # --- events -----------------------------------------------------------------------------------

    def _note(self, event: m.Event, asked: Pending | None) -> None:
        match event:
            case m.Produced():
                self._produced(event, asked)
            case m.Tombstoned():
                self._tombstoned(event)
            case _ if asked is not None and isinstance(event, m.TaskEnd):
                self._ended(event, asked)
            case m.WorkerLost():
                self._lost(event)
            case m.WorkerOpened() if self._run.recovery.opened(event):
                self._run.versions.opened(event.worker)
                self._run.replicas.opened(event.worker)
            case m.Checkpointed():
                self.checkpoints.stored(event.step)
            case m.SourceOpened():
                self._opened(event)
            case _:
                self._note_wish(event)

    def _note_wish(self, event: m.Event) -> None:
        """What someone outside asks for."""
        match event:
            case m.StopRequested():
                self._run.stop(event.reason, at_once=event.at_once)
            case m.CheckpointRequested():
                self.checkpoints.asked = True
            case m.ScaleRequested():
                self._run.replicas.scale(event.node, event.replicas)
            case m.LeaveRequested():
                self._leave(event.workers)

    def _ended(self, event: m.TaskEnd, asked: Pending) -> None:
        """The last answer to a task; of several ranks, the last one's."""
        match event:
            case m.ChunkDone():
                self._chunk_done(event, asked)
            case m.FetchFailed():
                self._unfetched(event, asked)
            case m.Stepped():
                self._run.training.stepped()
            case m.Loaded() | m.Offered():
                self._weights_moved(event, asked)
            case m.Recorded() | m.Evaluated():
                self._run.recovery.finished(asked.task.worker)
        if isinstance(event, m.Evaluated):
            self._run.evaluated[event.node] = event.version

    def _weights_moved(self, event: m.Loaded | m.Offered, asked: Pending) -> None:
        assert isinstance(asked.task, m.Offer | m.Load)
        self._run.out += self._run.versions.heard(event, asked.task)

    def _opened(self, event: m.SourceOpened) -> None:
        self._run.rows_of[event.node] = event.rows
        self._run.unopened.discard(event.node)
        if event.node in self.sources.admissions:
            self.sources.admissions[event.node].rows = event.rows
            self._run.out += doubtful.opened(self.plan, event.node, event.rows)

    def _produced(self, event: m.Produced, asked: Pending | None) -> None:
        if asked is None or not asked.wanted:  # it was given up: let its rows go
            self._run.blocks.add(event.ref, 0)
            return
        chunk = asked.chunk
        assert chunk is not None
        node = chunk.node
        if node.region == "evaluation":
            assert self._run.round is not None
            number = self._run.round.produced(node, event.ref)
        elif node.region == "step":
            assert self._run.training.run is not None
            fresh = self._run.dispatch.fresh(chunk, event.ref.keys)
            number = self._run.training.run.produced(node.name, event.ref, fresh)
        else:
            number = self.sources.tables[node.source].produced(node.name, event.ref)
        self._run.dispatch.made(chunk, number, event.ref)

    def _chunk_done(self, event: m.ChunkDone, asked: Pending) -> None:
        self._run.recovery.finished(asked.task.worker)
        wrong, chunk = self._run.dispatch.done(asked), asked.chunk
        assert chunk is not None
        if wrong:
            self._run.fail(wrong)
        elif asked.wanted and not chunk.closed:
            chunk.closed = True
            missing = self._missing(chunk)
            if missing is not None:
                what = "its kernel ended a chunk without row (position, sample, attempt)"
                self._run.fail(f"{self.plan.place(event.node)}: {what} {missing}")

    def _missing(self, chunk: NodeChunk) -> Key | None:
        """Close a chunk where its rows belong; returns a row that it lacks, if any."""
        if chunk.node.region == "evaluation":
            assert self._run.round is not None
            return self._run.round.closed(chunk)
        if chunk.node.region == "step":
            assert self._run.training.run is not None
            return self._run.training.run.closed(chunk.node)
        return self.sources.tables[chunk.node.source].closed(chunk.node, chunk.keys)

    def _tombstoned(self, event: m.Tombstoned) -> None:
        node = self.plan.node(event.node)
        if node.region != "stream":
            if event.failed or self._run.round is None:
                where = f"{self.plan.place(event.node)}: row {event.key}"
                self._run.fail(f"{where} failed where no group can be dropped: {event.error}")
            else:
                self._run.round.drop(node, event)
            return
        too_many = self.sources.drop(node.source, event)
        if too_many:
            self._run.fail(too_many)

    # --- losses -----------------------------------------------------------------------------------

    def _unfetched(self, event: m.FetchFailed, asked: Pending) -> None:
        self._run.dispatch.suspect(event.peer, asked.reads)
        self._unissue(self._run.dispatch.undone(asked))
        self._undone(asked)

    def _undone(self, asked: Pending) -> None:
        """A task came to nothing: its owner asks again."""
        self._run.training.undone(asked.task)
        if self._run.round is not None:
            self._run.round.undone(asked.task)

    def _lost(self, event: m.WorkerLost) -> None:
        """A Worker is gone, with all rows that it kept and all that it was doing."""
        worker, hopeless = event.worker, self._run.recovery.hopeless(event.worker)
        if worker in self.plan.stateful:
            self._run.go_back(worker, event.error)
            return
        if self._run.replicas.lost(worker):
            self._run.recovery.stay_away(worker)
            self._lose(worker, self._owed)
            return
        most = self._run.replicas.give_up(worker) if hopeless else None
        if most is not None:
            self._run.out.append(doubtful.given_up(self.plan, worker, hopeless, most))
            self._run.recovery.stay_away(worker)
            self._lose(worker, self._owed)
            return
        if hopeless:
            self._run.fail(hopeless)
            return
        self._run.out.append(m.Respawn(workers=(worker,)))
        self._lose(worker, self._owed)

    def _lose(self, worker: str, owed: list[Pending]) -> None:
        """What a Worker without state had and did: others need it, or it is done again."""
        gone = self._run.blocks.lose(worker)
        self._run.versions.lost(worker)
        for asked in owed:
            self._undone(asked)
        given_up = self._run.dispatch.lost(worker, owed, gone)
        self._run.undo_step(gone)
        self._run.assign(self.sources.lose(gone), 0)
        self._unissue(given_up)
        self.checkpoints.wanted = self.at == "checkpoint"

    # --- replicas that come and go ----------------------------------------------------------------

    def _leave(self, workers: Iterable[str]) -> None:
        """Machines are taken away. With a Worker that has state the run will go back: from as near
        as it can.
        """
        stay = self._run.replicas.leave(workers, self._now)
        self.checkpoints.asked |= not self.plan.stateful.isdisjoint(stay)

    def _move(self) -> None:
        """Have replicas end and begin as is wanted now, before anything else is said."""
        owes, keeps = self._run.outstanding.owes, self._run.blocks.any_at
        ended, begun = self._run.replicas.moves(owes, keeps)
        for worker in ended:
            owed = self._run.outstanding.lost(worker)
            self._ranks.lost(worker)
            self._run.recovery.retire(worker)
            self._run.out.append(m.Retire(workers=(worker,)))
            self._lose(worker, owed)
        for worker in begun:
            self._run.recovery.begin(worker)
        if begun:
            self._run.out.append(m.Respawn(workers=tuple(begun)))

    def _unissue(self, chunks: Iterable[NodeChunk]) -> None:
        """Chunks above the cut came to nothing: other chunks make their rows."""
        for chunk in chunks:
            table = self.sources.tables[chunk.node.source]
            self._run.assign(table.unissue(chunk.node, chunk.keys), 0)

    # --- what is said -----------------------------------------------------------------------------

    def _flush(self) -> list[m.Instruction]:
        """What is said: to every rank of a node, and only to Workers that have their devices."""
        out = self._told + self._turns.told(self._ranks.told(self._run.out))
        self._told, self._run.out = [], []
        return out


def _said(message: m.Event | m.From) -> Heard:
    return (message.worker, message.event) if isinstance(message, m.From) else ("", message)
