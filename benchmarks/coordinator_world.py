"""Workers that answer the coordinator at once, an event a row, so that it alone takes time.

Owns: the plans that are measured, what Workers answer and in which order, the count of events and
the coordinator's CPU seconds. Does not own: what is measured, and the goals (coordinator.py).

Each Worker does one thing at a time, in the order in which it was told. Those that generate say one
row each in turn, so that rows that wait together are of as many chunks as can be; that is the
dearest case. All others say everything that they have to say when it is their turn.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

import numpy as np
import pyarrow as pa

from dataflow.batch import Keys
from dataflow.check import CheckedGraph, check
from engine.coordinator.coordinator import Coordinator
from engine.coordinator.run_settings import Settings
from engine.plan.cluster import Cluster
from engine.plan.placement import Placing
from engine.plan.plan import Plan
from engine.plan.planner import make_plan
from engine.protocol import messages as m
from engine.protocol.refs import Ref
from engine.protocol.staleness import NO_VERSION
from graphs.grpo import grpo

CLUSTER = Cluster(cores=1 << 15, memory=2**60)
_TOKENS = 64


Told = m.Task | m.Go | m.Wake | m.Sleep
"""What a Worker answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldLoad:
    """A run: Steps of so many prompts and samples of each, on so many Workers that generate, whose
    rows of a Step are cut into so many chunks. ranks: of the train node. turns: half of the Workers
    compute a reference's log-probs, each in turns with one that generates, on the same device.
    late: no chunks are asked for, so rows are bound to a Worker as its slots fall free.
    """

    prompts: int
    samples: int
    workers: int = 64
    chunks: int = 64
    ranks: int = 1
    steps: int = 1
    turns: bool = False
    late: bool = False

    def plan(self) -> Plan:
        """GRPO with a lag of one Step: generation, its reward and training are not in step."""
        placing = Placing(
            replicas={"rollout": self.workers},
            chunks={} if self.late else {"rollout": self.chunks},
            ranks={"train_policy": self.ranks} if self.ranks > 1 else {},
        )
        if self.turns:
            pairs = [(f"gen-{i}", f"ref-{i}") for i in range(self.workers // 2)]
            generating, referring = zip(*pairs, strict=True)
            chunks: dict[str, int] = {"rollout": self.chunks, "reference": self.chunks}
            pin = {"rollout": generating, "reference": referring}
            placing = Placing(pin=pin, chunks=chunks, turns=tuple(pairs))
        checked = _checked(self.prompts, self.samples, 0.04 if self.turns else 0.0)
        return make_plan(checked, seed=0, threads=1, placing=placing, cluster=CLUSTER)


def reward(completions: Sequence[str]) -> list[float]:
    """A reward function, never called here."""
    return [float(len(c)) for c in completions]


@cache
def _checked(prompts: int, samples: int, beta: float) -> CheckedGraph:
    columns = {"prompt": pa.utf8(), "answer": pa.utf8()}
    graph = grpo(
        "models/policy",
        "train.parquet",
        reward,
        n=samples,
        batch=prompts,
        max_tokens=_TOKENS,
        max_lag=1,
        beta=beta,
    )
    return check(graph, lambda data, split: columns)


@dataclass(slots=True, kw_only=True)
class Spent:
    """Of a run: events that were heard, the coordinator's CPU seconds, and the most in one turn."""

    events: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    @property
    def each(self) -> float:
        """Microseconds an event."""
        return self.seconds / self.events * 1e6

    def add(self, events: int, seconds: float) -> None:
        """One turn of the loop."""
        self.events += events
        self.seconds += seconds
        self.longest = max(self.longest, seconds)


class CoordinatorWorld:
    """A coordinator and its Workers. together: so many messages wait whenever it looks."""

    def __init__(self, load: WorldLoad, together: int) -> None:
        self._load = load
        self._together = together
        self._plan = load.plan()
        self._nodes = {n.name: n for n in self._plan.nodes}
        self._coordinator = Coordinator(self._plan, Settings(steps=load.steps + 1))
        self._generate = set(self._nodes["rollout"].workers)
        self._said = dict.fromkeys(self._plan.workers, 0)
        self._blocks = dict.fromkeys(self._plan.workers, 0)
        self._todo: dict[str, deque[Iterator[m.Event]]] = {}
        """What each Worker that is not idle has still to say."""
        self._turns: deque[str] = deque()
        """These Workers, the next one first."""
        self._version = 0
        self._closed = 0
        self.assignments: list[m.TrainStep] = []
        """What ranks were told of each Step."""

    def run(self, most: int = 1 << 62) -> Spent:
        """Until the Steps are closed, or about so many events are heard."""
        spent = Spent()
        gc.collect()
        gc.freeze()
        self._carry_out(self._coordinator.start())
        self._carry_out(self._heard([m.SourceOpened(node="prompts", rows=1 << 20)])[0])
        while self._closed < self._load.steps and spent.events < most:
            waiting = list(islice(self._come(), self._together))
            if not waiting:
                raise RuntimeError(f"nothing moves: {self._coordinator.waiting()}")
            told, seconds = self._heard(waiting)
            # Loads before the first row are the run's beginning.
            if spent.events or any(isinstance(w.event, m.Produced) for w in waiting):
                spent.add(len(waiting), seconds)
            self._carry_out(told)
        gc.unfreeze()
        return spent

    def _heard(self, waiting: Sequence[m.From | m.Event]) -> tuple[list[m.Instruction], float]:
        """What is said to these, and the CPU seconds that it took."""
        coordinator, told = self._coordinator, list[m.Instruction]()
        start = time.process_time()
        for group in coordinator.groups(waiting, self._together):
            told += coordinator.handle_together([event for _, event in group], 0.0)
        return told, time.process_time() - start

    # --- what Workers say -------------------------------------------------------------------------

    def _come(self) -> Iterator[m.From]:
        """Messages in the order in which they come; ends where nobody has anything to say."""
        while (message := self._next()) is not None:
            yield message

    def _next(self) -> m.From | None:
        while self._turns:
            worker = self._turns[0]
            todo = self._todo[worker]
            event = next(todo[0], None) if todo else None
            if event is None and todo:
                todo.popleft()
                continue
            if event is None:
                del self._todo[worker]
                self._turns.popleft()
                continue
            if worker in self._generate:
                self._turns.rotate(-1)
            number = self._said[worker]
            self._said[worker] = number + 1
            return m.From(worker=worker, epoch=0, number=number, event=event)
        return None

    def _carry_out(self, told: Sequence[m.Instruction]) -> None:
        for each in told:
            if isinstance(each, m.StepClosed):
                self._closed = each.step
            elif isinstance(each, m.Finish | m.Rollback):
                raise RuntimeError(f"the run ends: {each}")
            elif isinstance(each, m.Checkpoint):
                self._carry_out(self._heard([m.Checkpointed(step=each.step)])[0])
            elif isinstance(each, m.Task | m.Go | m.Wake | m.Sleep):
                self._begin(each)

    def _begin(self, task: Told) -> None:
        if isinstance(task, m.TrainStep):
            self.assignments.append(task)
        if task.worker not in self._todo:
            self._todo[task.worker] = deque()
            self._turns.append(task.worker)
        self._todo[task.worker].append(self._answers(task))

    def _answers(self, task: Told) -> Iterator[m.Event]:
        match task:
            case m.RunChunk():
                yield from self._rows(task)
                yield m.ChunkDone(id=task.id, node=task.node)
            case m.TrainStep() if self._load.ranks > 1:
                yield m.Prepared(id=task.id, node=task.node, worker=task.worker)
            case m.TrainStep() | m.Go():
                done = self._closed + 1
                yield m.Stepped(id=task.id, node=task.node, step=done, worker=task.worker)
            case m.Record():
                yield m.Recorded(id=task.id)
            case m.Offer():
                yield m.Offered(
                    id=task.id, worker=task.worker, block=self._block(task.worker), digest=""
                )
            case m.Load():
                self._version = task.version
                yield m.Loaded(id=task.id, worker=task.worker)
            case m.Wake():
                yield m.Woken(worker=task.worker)
            case m.Sleep():
                yield m.Slept(worker=task.worker)

    def _rows(self, task: m.RunChunk) -> Iterator[m.Produced]:
        """Each row alone."""
        node, keys = self._nodes[task.node], task.keys
        if node.relation == "expand":
            keys = keys.expand_spans(node.rows // node.inner, task.spans)
        version = self._version if node.traits.generates else NO_VERSION
        for row in range(len(keys)):
            ref = Ref(
                worker=task.worker,
                block=self._block(task.worker),
                keys=Keys(
                    keys.position[row : row + 1],
                    keys.sample[row : row + 1],
                    keys.attempt[row : row + 1],
                ),
                lengths=np.array([_TOKENS], dtype=np.int64),
                version=np.array([version], dtype=np.int32),
                digest=np.array([row], dtype=np.uint64),
            )
            yield m.Produced(id=task.id, node=task.node, ref=ref)

    def _block(self, worker: str) -> int:
        self._blocks[worker] += 1
        return self._blocks[worker]
