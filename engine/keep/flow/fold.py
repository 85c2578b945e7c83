"""A run's events, folded into a Flow about each second and one for each Step.

Owns: when a stretch ends, and a Flow made of what the parts have counted. Does not own: the
counting (activity.py, queues.py), the rules of waiting (reasons.py), the files (writer.py).

Events are kept as they come and folded about once a second, all together: between two kernels an
event costs an entry in a list, and folding many in a row takes half as long as one at a time. Where
no event comes for a second or two, another thread (background_records.py) has the stretch ended.

Workers tell what only they know (bytes, memory) as reports named `flow/...`, which are no metrics.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from engine.keep.flow.activity import Activity, ReplicaSeconds, Running
from engine.keep.flow.coordinator_looks import (
    CoordinatorLooks,
    CoordinatorState,
    Cuts,
    cut_flows,
)
from engine.keep.flow.counts import StretchCounts
from engine.keep.flow.flow_sums import sum_flows
from engine.keep.flow.outside import OutsideSeconds
from engine.keep.flow.queues import EdgeQueues, EdgeRows, WeightQueues
from engine.keep.flow.reasons import Reasons
from engine.keep.flow.records import (
    Began,
    EdgeFlow,
    Flow,
    Lost,
    ReplicaFlow,
    Tombstones,
    WeightFlow,
    WorkerFlow,
)
from engine.keep.flow.stretch_flows import replica_flow, round_seconds, worker_flow
from engine.keep.flow.writer import FlowWriter
from engine.plan.plan import Plan
from engine.protocol import events as e
from engine.protocol import messages as m
from engine.protocol.progress import RunProgress, no_progress
from engine.protocol.reports import FLOW, Doing, Report

_SECOND = 0.95
"""Seconds after which a stretch ends: the loop measures about once a second."""
_IDLE = Doing(worker="")
_MANY = 32
"""Stretches of a long Step that are kept one by one."""
_KEYS = 64
"""Keys of tombstones that a record has at most."""


_KeptEvent = tuple[e.RunEvent, float, CoordinatorState | None]
"""One that is not folded yet; when it came; the coordinator then, where a Step closed or has all
its parts. It is a plain tuple because one is made at each event.
"""
_LOOKED_AT = (m.StepClosed, m.FinishStep)


class FlowFold:
    """A subscriber, of one attempt. first: Steps of the run before this plan's own. begun: the
    Step after which the attempt begins.
    """

    takes = (
        *(e.Opened, e.WorkersMeasured, e.WritingBegan, e.WritingEnded, e.WritingFailed),
        *(m.RunChunk, m.TrainStep, m.TrainPart, m.FinishStep, m.PartTrained),
        *(m.Evaluate, m.Record, m.Offer, m.Load, m.Release),
        *(m.Produced, m.Tombstoned, m.ChunkDone, m.Stepped, m.Evaluated, m.Recorded, m.Offered),
        *(m.Loaded, m.FetchFailed, m.WorkerLost, m.WorkerOpened, m.Retire, m.StepClosed),
    )

    def __init__(
        self,
        plan: Plan,
        writer: FlowWriter,
        cuts: Cuts,
        progress: Callable[[], RunProgress] = no_progress,
        *,
        begun: int = 0,
        phase: int = 0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._plan, self._writer, self._wall = plan, writer, wall
        self._coordinator = CoordinatorLooks(cuts, progress)
        self._step, self._phase = begun, phase
        self._reasons = Reasons(plan)
        self._away = set(plan.spare)
        """Replicas that are not there, and so do not wait for anything."""
        self._edges, self._weights = EdgeQueues(plan), WeightQueues()
        self._activity: Activity | None = None
        self._start = 0.0
        self._made = StretchCounts()
        self._outside = OutsideSeconds()
        self._of_step: list[Flow] = []
        self._of_second: list[Flow] = []
        self._memory: dict[str, dict[str, int]] = defaultdict(dict)
        self._doing: Sequence[Doing] = ()
        self._lock = threading.RLock()
        """Of all below `take`, `fold` and `meanwhile`."""
        self._quiet = False
        """Whether nothing has come since the last call of `meanwhile`."""
        self._kept: list[_KeptEvent] = []
        self._folded_wall = 0.0
        self._folded_state: CoordinatorState | None = None
        """Of the event that is folded now."""
        self._finishing: RunProgress | None = None
        """Of the Step that makes its update from its parts: once it is over nobody knows them."""
        self._writing = False
        """Whether the loop waits for files; nothing says so where there were none to write."""
        self._versions: dict[tuple[str, str], int] = {}
        self._bytes_a_row = {
            f"{edge.producer}->{edge.consumer}": _row_bytes(plan, edge.producer, edge.bytes)
            for edge in plan.edges
        }

    def take(self, event: e.RunEvent) -> None:
        """Keep it; see `engine.protocol.events`.

        All is folded once a second has passed, or before files are written that these records
        belong before.
        """
        state = None
        if isinstance(event, e.InstructionTold) and isinstance(event.instruction, _LOOKED_AT):
            state = self._coordinator.look()
        with self._lock:
            self._quiet = False
            self._kept.append((event, self._wall(), state))
            if isinstance(event, e.WorkersMeasured):
                if event.at - self._start >= _SECOND:
                    self.fold()
            elif isinstance(event, (e.Opened, e.WritingBegan)):
                self.fold()

    def fold(self) -> None:
        """Fold all that was kept."""
        with self._lock:
            events, self._kept = self._kept, []
            for event, wall, state in events:
                self._folded_wall, self._folded_state = wall, state
                self._fold(event)

    def meanwhile(
        self,
        now: float,
        doing: Sequence[Doing],
        reports: Callable[[], Sequence[Report]] = tuple,
    ) -> None:
        """From another thread: where nothing has come since the last call, tell what goes on, as if
        the loop had measured now. reports: called for figures that the loop has not taken.
        """
        with self._lock:
            quiet, self._quiet = self._quiet, True
            if quiet and self._activity is not None:
                self.fold()
                self._folded_wall, self._folded_state = self._wall(), None
                measured = e.WorkersMeasured(at=now, reports=reports(), spans=(), doing=doing)
                self._take_measurement(measured)

    def _fold(self, event: e.RunEvent) -> None:
        match event:
            case e.InstructionTold(at=at, instruction=instruction):
                self._aside(False, at)
                self._take_instruction(instruction, at)
            case e.EventHeard(at=at, event=heard):
                self._aside(False, at)
                self._take_heard(heard, at)
            case e.WorkersMeasured():
                self._take_measurement(event)
            case e.Opened(at=at):
                self._begin(at)
                self._writer.step(Began(step=self._step, wall=self._folded_wall, phase=self._phase))
            case e.WritingBegan(at=at):
                self._aside(True, at)
            case e.WritingEnded(end=at) | e.WritingFailed(at=at):
                self._aside(False, at)

    # --- what it takes ----------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """What came before, while Workers opened, belongs to no stretch."""
        active = self._active(now)
        active.close(now)
        self._start = now

    def _active(self, now: float) -> Activity:
        if self._activity is None:
            self._activity = Activity(self._plan, now)
            self._start = now
        return self._activity

    def _aside(self, begins: bool, now: float) -> None:
        if begins != self._writing:
            self._writing = begins
            self._active(now).aside("checkpoint", begins, now)

    def _take_instruction(self, instruction: m.Instruction, now: float) -> None:
        match instruction:
            case m.Release(worker=worker, blocks=blocks):
                self._edges.release_blocks([(worker, block) for block in blocks])
                return
            case m.Retire(workers=workers):
                for worker in workers:
                    self._end(worker, now)
                self._away.update(workers)
                return
            case m.StepClosed(step=step):
                self._close_step(self._plan.first + step, now)
                return
            case m.Load():
                self._weights.begin_load(instruction, now)
            case m.TrainStep() | m.TrainPart():
                lags, tokens = self._edges.measure_training(instruction)
                self._made.train(instruction, lags, tokens)
                self._edges.take_rows(instruction.node, instruction.inputs)
            case m.FinishStep():
                self._finishing = self._look().progress
            case m.RunChunk() | m.Evaluate():
                self._edges.take_rows(instruction.node, instruction.inputs)
        if isinstance(instruction, m.Task):
            self._active(now).add_task(instruction, now)

    def _take_heard(self, event: m.Event, now: float) -> None:
        match event:
            case m.Produced(node=node, ref=ref):
                self._edges.add_rows(node, ref, now)
                tokens = int(ref.lengths.sum())
                self._made.rows_of(node, ref.worker, len(ref.keys), tokens)
            case m.Tombstoned():
                self._made.tombstones[event.node, event.failed, event.row_only].append(event)
            case m.WorkerLost(worker=worker, error=error):
                self._lose(worker, error, now)
            case m.WorkerOpened(worker=worker):
                self._away.discard(worker)
            case _ if isinstance(event, m.TaskEnd):
                self._take_answer(event, now)

    def _take_answer(self, event: m.TaskEnd, now: float) -> None:
        match event:
            case m.Loaded():
                load = self._weights.end_load(event, now)
                if load is not None:
                    self._versions[load.reader, load.worker] = load.version
            case m.Stepped(node=node, worker=worker, step=step):
                self._versions[node, worker] = step
                self._made.chunks[node, worker] += 1
            case m.ChunkDone(id=task, node=node) | m.Evaluated(id=task, node=node):
                for worker in self._active(now).where(task):
                    self._made.chunks[node, worker] += 1
        self._active(now).end_task(event.id, getattr(event, "worker", ""), now)

    def _end(self, worker: str, now: float) -> None:
        """A Worker is gone, with what it was told and kept."""
        self._active(now).forget_worker(worker, now)
        self._edges.forget_worker(worker)
        self._weights.forget_worker(worker)
        self._outside.forget_worker(worker)

    def _lose(self, worker: str, error: str, now: float) -> None:
        self._end(worker, now)
        lost = Lost(step=self._step, wall=self._folded_wall, worker=worker, error=error)
        self._writer.step(lost)

    def _take_measurement(self, event: e.WorkersMeasured) -> None:
        self._doing = event.doing
        for report in event.reports:
            if report[0].startswith(FLOW):
                self._add_report(report)
        if self._activity is not None and event.at - self._start >= _SECOND:
            self._close(event.at)

    def _add_report(self, report: Report) -> None:
        name, number, _ = report
        kind, _, whose = name.removeprefix(FLOW).partition("/")
        if kind in ("bytes", "weights", "node_peak"):
            counter: Counter[str] = getattr(self._made, kind)
            if kind == "node_peak":
                counter[whose] = max(counter[whose], int(number))
            else:
                counter[whose] += int(number)
        elif kind == "outside":
            self._outside.add(whose, number)
        elif kind == "in_flight":
            self._outside.set_in_flight(whose, int(number))
        else:
            self._memory[whose][kind] = int(number)

    def _close_step(self, step: int, now: float) -> None:
        """A Step has ended; of its second end nothing is to be told."""
        if step <= self._step or self._activity is None:
            return
        self._step = step
        self._close(now)
        self._finishing = None
        self._writer.step(sum_flows(self._of_step))
        self._of_step = []

    # --- what it makes ----------------------------------------------------------------------------

    def _close(self, now: float) -> None:
        """End the stretch: add it to its Step's, and to the second's."""
        now = max(now, self._start)  # `meanwhile` may have read the clock since
        flow = self._flow(now)
        self._start = now
        self._write_tombstones()
        self._made = StretchCounts()
        self._of_step.append(flow)
        if len(self._of_step) >= _MANY:
            self._of_step = [sum_flows(self._of_step)]
        self._of_second.append(flow)
        if now - self._of_second[0].start >= _SECOND:
            self._writer.second(sum_flows(self._of_second))
            self._of_second = []

    def _flow(self, now: float) -> Flow:
        assert self._activity is not None
        seconds, states = self._activity.close(now)
        coordinator = self._look()
        return Flow(
            step=self._step,
            phase=self._phase,
            start=self._start,
            end=now,
            wall=self._folded_wall,
            nodes=self._node_flows(seconds, states, now - self._start),
            edges=self._edge_flows(now),
            weights=self._weight_flows(),
            cuts=cut_flows(coordinator.cuts, self._made.lags, self._plan.nodes),
            workers=self._worker_flows(now),
            streams=(self._finishing or coordinator.progress).streams,
            pools=coordinator.progress.pools,
        )

    def _look(self) -> CoordinatorState:
        """The coordinator at the event that is folded, or now, where that has just come."""
        return self._folded_state or self._coordinator.look()

    def _node_flows(
        self,
        seconds: Mapping[tuple[str, str], ReplicaSeconds],
        states: Mapping[Running, float],
        length: float,
    ) -> dict[str, ReplicaFlow]:
        flows: dict[str, ReplicaFlow] = {}
        nothing = ReplicaSeconds()
        for node in self._plan.nodes:
            for worker in node.workers:
                spent = seconds.get((node.name, worker), nothing)
                if worker in self._away and not spent.with_task:
                    continue
                waits = self._reasons.without_task(node.name, states, length - spent.with_task)
                flows[f"{node.name}@{worker}"] = replica_flow(
                    node.name,
                    worker,
                    spent=spent,
                    waits=waits,
                    outside=self._outside,
                    counts=self._made,
                    version=self._versions.get((node.name, worker), -1),
                )
        return flows

    def _edge_flows(self, now: float) -> dict[str, EdgeFlow]:
        ages = self._edges.ages(now)
        flows: dict[str, EdgeFlow] = {}
        for name, edge in self._edges.close().items():
            taken = int(self._made.bytes[name])
            if edge.rows and taken:
                self._bytes_a_row[name] = taken / edge.rows
            flows[name] = self._edge_flow(name, edge, taken, ages[name])
        return flows

    def _edge_flow(self, name: str, edge: EdgeRows, taken: int, age: float) -> EdgeFlow:
        waiting = int(edge.waiting * self._bytes_a_row.get(name, 0.0))
        return EdgeFlow(
            rows=edge.rows,
            bytes=taken,
            waiting_rows=edge.waiting,
            waiting_bytes=waiting,
            age=round_seconds(age),
        )

    def _weight_flows(self) -> dict[str, WeightFlow]:
        offered = self._weights.offered
        flows: dict[str, WeightFlow] = {}
        for name, reader in self._weights.close().items():
            model = name.partition("->")[0]
            flows[name] = WeightFlow(
                offered=offered.get(model, 0),
                loaded=reader.loaded,
                loads=reader.loads,
                seconds=round_seconds(reader.seconds),
                bytes=int(self._made.weights[name]),
            )
        return flows

    def _worker_flows(self, now: float) -> dict[str, WorkerFlow]:
        doing = {each.worker: each for each in self._doing}
        flows: dict[str, WorkerFlow] = {}
        for worker in self._plan.workers:
            flows[worker] = worker_flow(doing.get(worker, _IDLE), self._memory[worker], now)
        return flows

    def _write_tombstones(self) -> None:
        for (node, failed, row_only), events in self._made.tombstones.items():
            record = Tombstones(
                step=self._step,
                wall=self._folded_wall,
                node=node,
                keys=[event.key for event in events[:_KEYS]],
                error=events[0].error,
                failed=failed,
                row_only=row_only,
            )
            self._writer.step(record)


def _row_bytes(plan: Plan, producer: str, nbytes: int) -> float:
    """Bytes a row of an edge, by the plan."""
    node = plan.node(producer)
    batch = next((s.batch for s in plan.sources if s.name == node.source), 0)
    if batch:
        return nbytes / (batch * node.rows)
    return 0.0
