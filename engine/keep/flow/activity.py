"""What every node in every Worker was doing, as the coordinator can tell: works, or waits, and for
what.

    a node in a Worker                    counts as
    its task is the Worker's first        busy, until its answer; fetching its rows is part of it
    its task stands behind another one    waits for its turn, behind that one's node
    weights for it are under way          waits for weights, of their writer
    it has no task                        as its place in the graph says (reasons.py)

Owns: each Worker's queue as it was told, and the seconds of each state. Does not own: why a node
has no task, nor what becomes of the figures (fold.py).

A Worker carries out what it was told one after another (engine/run/worker_process/task_inbox.py),
weights before queued chunks, so its first unanswered task is the one under way; but while weights
come from another Worker it does what else it was told. An event costs a step or two here, whatever
the number of Workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.plan.plan import Plan
from engine.protocol import messages as m

Replica = tuple[str, str]
"""(node, Worker)."""


@dataclass(frozen=True, slots=True)
class Queued:
    """A task that a Worker has not answered. node: which computes, or loads; empty for the Worker's
    own work. passes: it is carried out before chunks that wait.
    """

    id: int
    node: str
    loads: str = ""
    """The writer of the weights that it brings."""
    passes: bool = False
    beside: bool = False
    """Weights that are fetched beside whatever else it does."""


@dataclass(slots=True)
class ReplicaSeconds:
    """Where the seconds of one replica went in a stretch."""

    busy: float = 0.0
    for_turn: float = 0.0
    for_weights: float = 0.0
    blames: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def with_task(self) -> float:
        """Seconds with a task."""
        return self.busy + self.for_turn + self.for_weights


@dataclass(frozen=True, slots=True)
class Running:
    """Which nodes are under way, in the order of the plan. alone: of one with several replicas, the
    only Worker where it is.
    """

    nodes: tuple[str, ...]
    alone: tuple[tuple[str, str], ...] = ()


class Activity:
    """What each Worker is doing in one attempt. Times are of the run's clock. One that goes back,
    as another thread has read the clock meanwhile, counts as the last one.
    """

    def __init__(self, plan: Plan, now: float) -> None:
        self._replicas = {n.name: n.workers for n in plan.nodes}
        self._order = {n.name: i for i, n in enumerate(plan.nodes)}
        self._several = frozenset(n.name for n in plan.nodes if len(n.rank_groups) > 1)
        self._queues: dict[str, list[Queued]] = {w: [] for w in plan.workers}
        self._heads: dict[str, str] = dict.fromkeys(plan.workers, "")
        self._since: dict[str, float] = dict.fromkeys(plan.workers, now)
        self._where: dict[int, list[str]] = {}
        """The Workers of each task."""
        self._running: dict[str, dict[str, None]] = defaultdict(dict)
        """Node -> the Workers where it is under way."""
        self._state = Running(nodes=())
        self._state_since = now
        self.seconds: dict[Replica, ReplicaSeconds] = defaultdict(ReplicaSeconds)
        self.states: dict[Running, float] = defaultdict(float)
        """Seconds of each set of running nodes."""

    # --- what is heard ----------------------------------------------------------------------------

    def add_task(self, task: m.Task, now: float) -> None:
        """Add a task to a Worker's queue."""
        queued, worker = _queue_entry(task), task.worker
        self._accrue(worker, now)
        queue = self._queues.setdefault(worker, [])
        at = len(queue)
        while queued.passes and at > 1 and not queue[at - 1].passes:
            at -= 1
        while not queued.passes and at and queue[at - 1].beside:
            at -= 1
        queue.insert(at, queued)
        self._where.setdefault(task.id, []).append(worker)
        self._look(worker, now)

    def end_task(self, task: int, worker: str, now: float) -> None:
        """Take a task out of the queue of the Worker that has answered. worker: may be empty where
        only one has the task.
        """
        where = self._where.get(task, [])
        workers = [worker] if worker else list(where)
        for name in workers:
            if name in where:
                where.remove(name)
                self._accrue(name, now)
                queue = self._queues[name]
                queue[:] = [queued for queued in queue if queued.id != task]
                self._look(name, now)
        if not where:
            self._where.pop(task, None)

    def where(self, task: int) -> tuple[str, ...]:
        """The Workers that have a task."""
        return tuple(self._where.get(task, ()))

    def forget_worker(self, worker: str, now: float) -> None:
        """Forget a Worker that is gone, with all that it was told."""
        self._accrue(worker, now)
        for queued in self._queues[worker]:
            where = self._where.get(queued.id, [])
            if worker in where:
                where.remove(worker)
            if not where:
                self._where.pop(queued.id, None)
        self._queues[worker] = []
        self._look(worker, now)

    def aside(self, what: str, begins: bool, now: float) -> None:
        """The run does something that is no node's, for which others may wait."""
        self._accrue_state(now)
        nodes = [name for name in self._state.nodes if name != what]
        if begins:
            nodes.append(what)
        self._state = Running(tuple(nodes), self._state.alone)

    # --- what it makes ----------------------------------------------------------------------------

    def close(self, now: float) -> tuple[Mapping[Replica, ReplicaSeconds], Mapping[Running, float]]:
        """The seconds since the last call."""
        for worker in self._queues:
            self._accrue(worker, now)
        self._accrue_state(now)
        figures = self.seconds, self.states
        self.seconds, self.states = defaultdict(ReplicaSeconds), defaultdict(float)
        return figures

    def _accrue(self, worker: str, now: float) -> None:
        """Count the time since the Worker's last change to what its tasks were in."""
        since = self._since.get(worker, now)
        seconds = now - since
        self._since[worker] = max(now, since)
        queue = self._queues.get(worker)
        if not queue or seconds <= 0:
            return
        head, seen = queue[0], set()
        for queued in queue:
            if not queued.node or queued.node in seen:
                continue
            seen.add(queued.node)
            each = self.seconds[queued.node, worker]
            if queued is head and not queued.loads:
                each.busy += seconds
            elif queued.loads:
                each.for_weights += seconds
                each.blames[queued.loads] += seconds
            else:
                each.for_turn += seconds
                # A Worker's own work has no node, and so no blame.
                each.blames[head.node] += seconds if head.node else 0.0

    def _accrue_state(self, now: float) -> None:
        if now > self._state_since:
            self.states[self._state] += now - self._state_since
            self._state_since = now

    def _look(self, worker: str, now: float) -> None:
        """Note which node the Worker runs now."""
        queue = self._queues[worker]
        if queue:
            node = queue[0].node
        else:
            node = ""
        before = self._heads.get(worker, "")
        if node == before:
            return
        self._accrue_state(now)
        self._heads[worker] = node
        if before:
            self._running[before].pop(worker, None)
        if node:
            self._running[node][worker] = None
        self._state = self._now(before, node)

    def _now(self, before: str, node: str) -> Running:
        nodes = set(self._state.nodes)
        for each in (before, node):
            if each:
                if self._running[each]:
                    nodes.add(each)
                else:
                    nodes.discard(each)
        alone: list[tuple[str, str]] = []
        for several in sorted(nodes & self._several):
            workers = self._running[several]
            if len(workers) == 1:
                alone.append((several, next(iter(workers))))
        order = self._order
        in_order = sorted(nodes, key=lambda node: order.get(node, 0))
        return Running(tuple(in_order), tuple(alone))


def _queue_entry(task: m.Task) -> Queued:
    match task:
        case m.Load():
            loads = task.leader or task.writer
            beside = task.source not in ("", task.worker)
            loads = loads or task.model
            return Queued(task.id, task.reader, loads=loads, passes=True, beside=beside)
        case m.Offer():
            return Queued(task.id, task.writer, passes=True)
        case m.Record():
            return Queued(task.id, "")
        case _:
            return Queued(task.id, task.node)
