"""The coordinator: the one that decides. Pure: events in, instructions out.

    handle(event, now) -> instructions            no sockets, no clock, no tensors, no rows
    handle_together(events, now) -> instructions  the same for what has come meanwhile

Owns: what an event means, and to which part it is told. Does not own: when the run moves on
(course.py), what is lost with a Worker (losses.py), what the rows of a region are for
(run_region.py), the loop that carries messages (engine/run), nor any Worker.

Workers die at any moment (recovery.py). One without state is restarted, its rows are made again:
by the same chunks where that gives the same rows (dispatch.py), by other chunks or a further
attempt where the weights have changed (prompt_table.py). Otherwise the run goes back to a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dataflow.memory_limits import MemoryLimits
from engine.coordinator.course import Course, Moment
from engine.coordinator.device_turns import DeviceTurns
from engine.coordinator.livelock import Livelock
from engine.coordinator.losses import Losses
from engine.coordinator.parts import make_parts
from engine.coordinator.ranks import RankGroups
from engine.coordinator.run_progress import find_progress
from engine.coordinator.run_settings import Restored, Settings
from engine.coordinator.run_warnings import warn_of_small_data
from engine.coordinator.task_ledger import Pending
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.progress import RunProgress

_WITHIN = (m.Wish, m.Checkpointed)
"""What the loop may hear while it still carries out instructions: a Worker that ended meanwhile
would be told the rest of them.
"""

GROUPABLE = (
    *(m.Produced, m.ChunkDone, m.RankDone, m.Reported),
    *(m.Loaded, m.Prepared, m.Woken, m.Slept),
)
"""Events that only say what has become of something that was asked: the run may move on after
several of them as well as after each. All others are handled alone, as what they mean depends on
how far the run is.
"""

Heard = tuple[str, m.Event]
"""An event, and before it its sender, where messages are numbered; else ""."""


class Coordinator:
    """Call `start` first, then `handle` for each event; both return instructions, in order."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self.plan = plan
        parts = make_parts(plan, settings)
        self.sources, self.checkpoints = parts.sources, parts.checkpoints
        self._outstanding = parts.outstanding
        self._blocks = parts.blocks
        self._dispatch = parts.dispatch
        self._training = parts.training
        self._evaluation = parts.evaluation
        self._versions = parts.versions
        self._recovery = parts.recovery
        self._replicas = parts.replicas
        self._relayouts = parts.relayouts
        self._next_wave = parts.next_wave
        self._regions = parts.regions
        self._course = Course(plan, settings, parts)
        self._ranks = RankGroups(plan, parts.outstanding)
        self._turns = DeviceTurns(plan, parts.outstanding)
        self._losses = Losses(plan, parts, self._course, self._ranks)
        self._livelock = Livelock(plan, self.sources.admissions, settings.patience)
        self._now = 0.0
        self._first_instructions: list[m.Instruction] = []
        """What rank groups and device turns have to say: it comes before what the core says."""

    @property
    def version(self) -> int:
        """The Steps that are done."""
        return self._course.version

    @property
    def at(self) -> Moment:
        """Where the run is."""
        return self._course.at

    @property
    def lowered_limits(self) -> dict[str, MemoryLimits]:
        """Of each node whose memory ran out: what it takes at once since."""
        return dict(self._dispatch.limits.lowered)

    def cuts(self) -> dict[str, tuple[int, int, int, int]]:
        """By source the prompts that are finished and untrained, that a Step takes, that are
        outstanding, and that may be. From any thread: these are numbers alone.
        """
        return {name: each.prompt_counts for name, each in self.sources.admissions.items()}

    def progress(self) -> RunProgress:
        """How far streamed Steps and generations that bind rows late are; from any thread."""
        return find_progress(self.sources, self._training.parts, self._dispatch.late)

    # --- the two entries --------------------------------------------------------------------------

    def start(self, restored: Restored | None = None) -> list[m.Instruction]:
        """Begin, or resume from a checkpoint. Every reader is told which version to load."""
        if restored is not None:
            for rows in restored.rows.values():
                self._ranks.note_lengths(rows.values())
        self._course.begin(restored)
        return self._flush()

    def in_order(self, message: m.Event | m.From) -> Iterator[m.Event]:
        """The events that this message lets through; handle each before the next is taken."""
        return self._recovery.in_order(message)

    def groups(self, messages: Sequence[m.Event | m.From], most: int) -> Iterator[list[Heard]]:
        """The events that these messages let through, in order, in groups of at most so many that
        may be handled together. Handle each group before the next is taken.
        """
        group: list[Heard] = []
        recovery = self._recovery
        for message in messages:
            sender, sent_event = _sender_and_event(message)
            # Handed out before the message is put in order: handling the group may end the
            # incarnation that this message is of.
            if group and not isinstance(sent_event, GROUPABLE):
                yield group
                group = []
            is_numbered = isinstance(message, m.From)
            for event in recovery.in_order(message) if is_numbered else (message,):
                if isinstance(event, GROUPABLE):
                    group.append((sender, event))
                    if len(group) == most:
                        yield group
                        group = []
                    continue
                if group:  # one that was early, and whose turn has come
                    yield group
                    group = []
                # Asked only now, as handling the group may have ended the sender (decision 0036).
                if recovery.counts(message):
                    yield [(sender, event)]
        if group:
            yield group

    def handle(self, event: m.Event, now: float) -> list[m.Instruction]:
        """Process one event. now: seconds, by any clock that only goes forward."""
        # Time comes from outside: the same events at the same times give the same instructions, so
        # that a simulation has its own clock and any schedule can be repeated (decision 0026).
        return self.handle_together((event,), now)

    def handle_together(self, events: Sequence[m.Event], now: float) -> list[m.Instruction]:
        """Process a group of `groups`: take note of each, then move on once."""
        self._now = now
        self.checkpoints.passes(now)
        self._replicas.passes(now)
        is_heard = may_move = False
        for event in events:
            # The ledger first: what an answer means depends on what was asked (decision 0027).
            asked = self._outstanding.note_answer(event)
            if isinstance(event, m.WorkerLost):
                # Of an incarnation that is known to be gone, nothing follows. It is alone in its
                # group, so nothing else is lost with this return.
                if not self._recovery.note_lost(event):
                    return []
                self._losses.owed = self._outstanding.forget_worker(event.worker)
            core_events, rank_instructions = self._ranks.merge_answers(event, asked)
            self._first_instructions += self._turns.go_on_after(event)
            self._first_instructions += rank_instructions
            for core_event in core_events:
                is_heard |= self.at != "gone"
                may_move |= self._hear(core_event, asked)
            self._ranks.replicas.note_ended(event, asked)
        if is_heard:
            self._go_on(may_move=may_move)
        livelock = self._livelock.find_cause(now)
        if livelock and self.at == "gather":
            self._course.fail(livelock)
        if self._replicas.groups:
            self._replicas.training = self.at == "step"
        return self._flush()

    @property
    def moving(self) -> bool:
        """Whether TimePassed is to be told where nothing else comes: a replica joins or leaves."""
        return self._replicas.moving and not self._course.over

    def _hear(self, event: m.Event, asked: Pending | None) -> bool:
        """Take note of an event; returns whether replicas may end and begin after it."""
        if self.at == "gone":
            return False
        if self.at == "finished":
            self._note_the_end(event, asked)
            return False
        if not self._next_wave.put_off(event, asked):
            self._note(event, asked)
        return not isinstance(event, _WITHIN)

    def _go_on(self, *, may_move: bool) -> None:
        """Move on as far as is possible without a further event."""
        if may_move and not self._course.over:
            # Before anything else is said: a replica that ends is to be told nothing more.
            self._losses.move_replicas()
        self._course.advance()
        while due := self._next_wave.take_due():
            for event, asked in due:
                self._note(event, asked)
            self._course.advance()
        self._course.release()

    def _note_the_end(self, event: m.Event, asked: Pending | None) -> None:
        """The run is over: what was under way is released as it ends."""
        match event:
            case m.Produced():
                self._blocks.add(event.ref, 0)
            case m.ChunkDone() if asked is not None:
                self._dispatch.finish(asked)
            case m.FetchFailed() | m.Short() if asked is not None:
                self._dispatch.take_back(asked)
            case m.Loaded() | m.Offered() | m.Fetched() if asked is not None:
                self._take_weights(event, asked)
            case m.WorkerLost():
                self._losses.lose_at_the_end(event.worker)

    def waiting(self) -> list[str]:
        """Who waits for whom, in words; for the watchdog and for a run that has stopped moving."""
        lines = [f"source {name}: has not opened" for name in sorted(self._course.unopened)]
        lines += self._versions.waiting()
        lines += self.sources.waiting()
        lines += self._training.waiting()
        lines += self._dispatch.waiting()
        lines += self._recovery.waiting()
        lines += self._replicas.waiting()
        lines += self._relayouts.waiting()
        lines += self._evaluation.waiting()
        lines += self._ranks.waiting()
        lines += self._turns.waiting()
        if self.at == "checkpoint":
            lines.append(f"checkpoint of step {self.version}: is not on disk yet")
        return lines

    # --- events -----------------------------------------------------------------------------------

    def _note(self, event: m.Event, asked: Pending | None) -> None:
        match event:
            case m.Produced():
                self._take_rows(event, asked)
            case m.Tombstoned():
                self._drop_row(event, asked)
            case m.Fetched() if asked is not None:
                self._take_weights(event, asked)
            case _ if asked is not None and isinstance(event, m.TaskEnd):
                self._take_task_end(event, asked)
            case m.WorkerLost():
                for ended in self._next_wave.lose(event.worker):
                    self._dispatch.take_back(ended)
                self._losses.lose_worker(event)
            case m.WorkerOpened() if self._recovery.note_opened(event):
                self._versions.note_opened(event.worker)
                self._replicas.note_opened(event.worker)
            case m.Checkpointed():
                self.checkpoints.note_stored(event.step)
            case m.SourceOpened():
                self._take_source(event)
            case _:
                self._note_wish(event)

    def _note_wish(self, event: m.Event) -> None:
        """What someone outside asks for."""
        match event:
            case m.StopRequested():
                self._course.stop(event.reason, at_once=event.at_once)
            case m.CheckpointRequested():
                self.checkpoints.asked = True
            case m.ScaleRequested():
                self._replicas.scale(event.node, event.replicas)
            case m.LeaveRequested():
                self._losses.leave(event.workers, self._now)

    def _take_task_end(self, event: m.TaskEnd, asked: Pending) -> None:
        """Take the last answer to a task; of several ranks, the last one's."""
        match event:
            case m.ChunkDone():
                self._close_chunk(event, asked)
            case m.FetchFailed() if isinstance(asked.task, m.Load):
                self._take_weights(event, asked)
            case m.FetchFailed():
                self._losses.tell_unfetched_again(event, asked)
            case m.Short():
                self._losses.begin_again_with_less(event, asked)
            case m.Stepped():
                self._training.end_turn()
            case m.PartTrained():
                assert isinstance(asked.task, m.TrainPart)
                self._training.parts.end_part(asked.task)
            case m.Loaded() | m.Offered():
                self._take_weights(event, asked)
            case m.Recorded() | m.Evaluated():
                self._recovery.note_finished(asked.task.worker)
        if isinstance(event, m.Evaluated):
            self._evaluation.evaluated[event.node] = event.version

    def _take_weights(
        self, event: m.Loaded | m.Offered | m.Fetched | m.FetchFailed, asked: Pending
    ) -> None:
        assert isinstance(asked.task, m.Offer | m.Load)
        self._course.out += self._versions.note_answer(event, asked.task)

    def _take_source(self, event: m.SourceOpened) -> None:
        self._course.unopened.discard(event.node)
        self._evaluation.rows_of[event.node] = event.rows
        if event.node in self.sources.admissions:
            self.sources.admissions[event.node].rows = event.rows
            self._course.out += warn_of_small_data(self.plan, event.node, event.rows)

    def _take_rows(self, event: m.Produced, asked: Pending | None) -> None:
        if asked is not None:
            self._dispatch.late.note_rows(asked, len(event.ref.keys))
        if asked is None or not asked.wanted:  # it was given up: let its rows go
            self._blocks.add(event.ref, 0)
            return
        chunk = asked.chunk
        assert chunk is not None
        chunk.watermark = max(chunk.watermark, event.watermark)
        chunk.written += int(event.ref.lengths.sum()) + len(event.ref.keys)
        self._relayouts.note_rows(event.node, event.ref)
        number = self._regions[chunk.node.region].take_rows(chunk, event.ref)
        self._dispatch.note_rows(chunk, number, event.ref)

    def _close_chunk(self, event: m.ChunkDone, asked: Pending) -> None:
        for rank in self._ranks.replicas.ranks_of(asked.task):
            self._recovery.note_finished(rank)
        chunk = asked.chunk
        assert chunk is not None
        difference = self._dispatch.finish(asked)
        if difference and (chunk.loses_rows or chunk.was_short):
            # What failed, an environment, need not fail twice, and with other limits the last bits
            # differ: no other run gives the same rows.
            self._course.go_back(asked.task.worker, difference)
            return
        if difference:
            self._course.fail(difference)
            return
        # A chunk that runs again was closed by its first end: its rows are where they belong.
        if not asked.wanted or chunk.closed:
            return
        chunk.closed = True
        self.sources.loads.note_end(chunk, asked.task.worker, event.seconds)
        missing = self._regions[chunk.node.region].close_chunk(chunk)
        if missing is not None:
            problem = "its kernel ended a chunk without row (position, sample, attempt)"
            self._course.fail(f"{self.plan.place(event.node)}: {problem} {missing}")

    def _drop_row(self, event: m.Tombstoned, asked: Pending | None) -> None:
        if asked is not None:
            self._dispatch.late.note_rows(asked, 1)
        if event.row_only and asked is not None and asked.chunk is not None:
            asked.chunk.loses_rows = True
        node = self.plan.node(event.node)
        region = self._regions[node.region]
        if event.row_only:
            why = region.lose_row(node, event)
        else:
            why = region.drop_group(node, event)
        if why:
            self._course.fail(why)

    # --- what is said -----------------------------------------------------------------------------

    def _flush(self) -> list[m.Instruction]:
        """Hand out what is said: to every rank of a node, and only to Workers that have their
        devices.
        """
        to_ranks = self._ranks.split_by_rank(self._course.out)
        instructions = self._first_instructions + self._turns.let_through(to_ranks)
        self._first_instructions = []
        self._course.out = []
        return instructions


def _sender_and_event(message: m.Event | m.From) -> Heard:
    if isinstance(message, m.From):
        return message.worker, message.event
    return "", message
