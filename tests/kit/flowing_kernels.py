"""Kernels whose run goes on while chunks join, and a plan of them: no torch, no model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from threading import Event

import numpy as np

from dataflow.batch import Batch, Keys
from dataflow.errors import KernelError
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.kernel_abilities import Interruptible, Joinable
from dataflow.schema import Reward
from engine.plan.plan import Plan
from tests.kit import host_plans

PATIENCE = 30.0
"""Seconds after which a run to which nothing comes gives up."""


class RowsOfRuns(Interruptible):
    """A row whose prompt is a number ends once so many rows have come to its run, with the number
    of the run as its reward. A negative one is given up.
    """

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        self._session = session
        self._asked = Event()
        self._runs = 0
        self._chunks: list[tuple[Keys, list[int]]] = []

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        self._runs += 1
        self._count, self._chunks = 0, []
        self._take(chunk)
        while self._chunks:
            rows = self._find_ready()
            if rows is not None:
                reward = np.full(len(rows), self._runs, np.float32)
                yield Batch.make(rows, {"reward": reward}, Reward)
                continue
            if self._chunks:
                if not self._asked.wait(PATIENCE):
                    raise KernelError("flows: expected a chunk to join, found none. Fix: send one.")
                self._asked.clear()
                yield Batch.make(Keys.of([]), {"reward": np.zeros(0, np.float32)}, Reward)

    def interrupt(self) -> None:
        self._asked.set()

    def close(self) -> None:
        pass

    def _take(self, chunk: Chunk) -> None:
        texts = chunk.inputs["prompt"].array("prompt").to_pylist()
        numbers = [int(text) for text in texts]
        self._count += len(numbers)
        for key, number in zip(chunk.keys.rows(), numbers, strict=True):
            if number < 0:
                self._session.tombstone(key, "it is negative")
        keeps = np.array([number >= 0 for number in numbers], bool)
        self._chunks.append((chunk.keys.take(keeps), [each for each in numbers if each >= 0]))

    def _find_ready(self) -> Keys | None:
        """Rows of one chunk that end now."""
        self._chunks = [chunk for chunk in self._chunks if len(chunk[0])]
        for place, (keys, numbers) in enumerate(self._chunks):
            ends = np.array([number <= self._count for number in numbers], bool)
            if ends.any():
                rest = [number for number in numbers if number > self._count]
                self._chunks[place] = keys.take(~ends), rest
                return keys.take(ends)
        return None


class FlowingRows(RowsOfRuns, Joinable):
    """Chunks join it."""

    def join(self, chunk: Chunk) -> None:
        self._take(chunk)


class QueueingRows(RowsOfRuns):
    """No chunk can join it."""


class RowsInParts(RowsOfRuns):
    """Asked for the first and the second time it says that rows have 3 and 7 tokens, and then all
    rows end.
    """

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        for tokens in (3, 7):
            if not self._asked.wait(PATIENCE):
                raise KernelError("flows: expected to be asked, found silence. Fix: interrupt it.")
            self._asked.clear()
            self._session.note_least_tokens(tokens)
            yield Batch.make(Keys.of([]), {"reward": np.zeros(0, np.float32)}, Reward)
        reward = np.ones(len(chunk.keys), np.float32)
        yield Batch.make(chunk.keys, {"reward": reward}, Reward)


class NumbersAsTold(host_plans.Numbers):
    """A source whose rows are their positions modulo 50; from 50 on negative."""

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        for batch in super().run(chunk):
            numbers = [int(text) for text in batch.array("prompt").to_pylist()]
            texts = [str(number if number < 50 else 49 - number) for number in numbers]
            yield Batch.make(chunk.keys, {"prompt": texts}, host_plans.Prompt)


def plan(kernel: type[RowsOfRuns] = FlowingRows, lag: int = 1, part_tokens: int = 0) -> Plan:
    """`numbers` in the Workers `source` and `host` -> `doubled` by this kernel in `host`."""
    planned = host_plans.plan(source=NumbersAsTold)
    numbers, second = planned.nodes
    layout = replace(second.layout, part_tokens=part_tokens)
    nodes = (
        replace(numbers, kernel=f"{__name__}:NumbersAsTold", workers=("source", "host")),
        replace(second, kernel=f"{__name__}:{kernel.__name__}", lag=lag, layout=layout),
    )
    return replace(planned, nodes=nodes)
