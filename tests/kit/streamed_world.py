"""Workers that answer a coordinator's instructions in any order between them: for streamed Steps.

Owns: rows that are as long as their keys say, and rollouts that hand over whole groups as these
end, with the watermark. Does not own: the coordinator, nor what a test asserts. The simulated
Workers (engine/run/simulated_workers) have times and deaths besides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from random import Random

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.coordinator import Coordinator, Settings
from engine.coordinator.run_settings import RecordedParts
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.refs import Ref
from engine.protocol.staleness import NO_VERSION


class StreamedWorld:
    """One run. length: of the answer at a position and sample. drops: of rows of `score`. slow: a
    Worker that goes on only where no other can, mostly. parts: as in Settings.
    """

    def __init__(
        self,
        plan: Plan,
        steps: int,
        length: Callable[[int, int], int],
        drops: Callable[[int], bool] = lambda position: False,
        seed: int = 0,
        slow: str = "",
        parts: Mapping[str, RecordedParts] | None = None,
    ) -> None:
        self._plan, self._length, self._drops = plan, length, drops
        self._random = Random(seed)
        self._slow = slow
        self._awake: set[str] = set()
        self._coordinator = Coordinator(plan, Settings(steps=steps, parts=parts or {}))
        self._queues: dict[str, deque[Iterator[m.Event]]] = {w: deque() for w in plan.workers}
        self._blocks = 0
        self.told: list[m.Instruction] = []
        self.order: list[str] = []
        """What has happened, in a word each."""
        self.heard: list[m.Event] = []

    def run(self) -> None:
        """Until the run is over."""
        self._take(self._coordinator.start())
        for node in self._plan.nodes:
            if node.work == "source":
                self._hear(m.SourceOpened(node=node.name, rows=1 << 20))
        while not any(isinstance(message, m.Finish) for message in self.told):
            busy = [queue for queue in self._queues.values() if queue]
            assert busy, self._coordinator.waiting()
            queue = self._random.choice(busy)
            if queue is self._queues.get(self._slow) and self._random.random() < 0.95:
                continue
            event = next(queue[0], None)
            if event is None:
                queue.popleft()
            else:
                self._hear(event)

    def _hear(self, event: m.Event) -> None:
        self.order.append(type(event).__name__)
        self.heard.append(event)
        self._take(self._coordinator.handle(event, 0.0))

    def _take(self, instructions: list[m.Instruction]) -> None:
        for instruction in instructions:
            self.told.append(instruction)
            if isinstance(instruction, m.Finish):
                assert not instruction.error, instruction.error
            elif isinstance(instruction, m.Checkpoint):
                self._queues[self._plan.recorder].append(
                    iter([m.Checkpointed(step=instruction.step)])
                )
            elif isinstance(instruction, m.Wake | m.Sleep):
                self._queues[instruction.worker].append(self._turn(instruction))
            elif isinstance(instruction, m.Task):
                self._queues[instruction.worker].append(self._answers(instruction))

    def _turn(self, instruction: m.Wake | m.Sleep) -> Iterator[m.Event]:
        """Take the devices that a Worker shares, or give them up."""
        worker = instruction.worker
        mates = next(group for group in self._plan.turns if worker in group)
        if isinstance(instruction, m.Wake):
            assert self._awake.isdisjoint(mates), "two have the devices"
            self._awake.add(worker)
            yield m.Woken(worker=worker)
        else:
            self._awake.remove(worker)
            yield m.Slept(worker=worker)

    def _answers(self, task: m.Task) -> Iterator[m.Event]:
        worker = task.worker
        match task:
            case m.RunChunk() if self._plan.node(task.node).traits.generates:
                yield from self._generate(task)
            case m.RunChunk():
                yield from self._run(task)
            case m.TrainPart():
                yield m.PartTrained(id=task.id, node=task.node, step=task.step, worker=worker)
            case m.TrainStep() | m.FinishStep():
                yield m.Stepped(id=task.id, node=task.node, step=task.step, worker=worker)
            case m.Load():
                yield m.Loaded(id=task.id, worker=worker)
            case m.Offer():
                yield m.Offered(id=task.id, worker=worker, block=-1, digest="")
            case m.Record():
                yield m.Recorded(id=task.id)

    def _run(self, task: m.RunChunk) -> Iterator[m.Event]:
        node = self._plan.node(task.node)
        is_dropped = np.array([self._drops(place) for place in task.keys.position.tolist()], bool)
        if task.node != "score":
            is_dropped[:] = False
        yield self._produced(task, task.keys.take(~is_dropped), np.ones((~is_dropped).sum()))
        for key in task.keys.take(is_dropped).rows():
            yield m.Tombstoned(id=task.id, node=node.name, key=key, error="test")
        yield m.ChunkDone(id=task.id, node=node.name)

    def _generate(self, task: m.RunChunk) -> Iterator[m.Event]:
        node = self._plan.node(task.node)
        keys = task.keys.expand_spans(node.rows, task.spans)
        pairs = zip(keys.position.tolist(), keys.sample.tolist(), strict=True)
        lengths = np.array([self._length(*pair) for pair in pairs])
        left, written = np.ones(len(keys), bool), 0
        while left.any():
            written += self._random.randint(1, 5)
            waits = np.isin(keys.position, keys.position[lengths > written])
            ended = left & ~waits
            left &= waits
            # Rows that have ended stay with those of their group here that have not.
            least = written if (lengths > written).any() else 0
            if ended.any():
                yield self._produced(task, keys.take(ended), lengths[ended], least)
        yield m.ChunkDone(id=task.id, node=task.node)

    def _produced(
        self, task: m.RunChunk, keys: Keys, lengths: np.ndarray, watermark: int = 0
    ) -> m.Produced:
        self._blocks += 1
        rows = Ref(
            worker=task.worker,
            block=self._blocks,
            keys=keys,
            lengths=lengths.astype(np.int64),
            version=np.full(len(keys), NO_VERSION, np.int32),
            digest=np.zeros(len(keys), np.uint64),
        )
        return m.Produced(id=task.id, node=task.node, ref=rows, watermark=watermark)
