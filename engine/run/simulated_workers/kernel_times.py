"""How long the kernels of simulated Workers take: what is asked, and times at random, for proofs.

Owns: the questions, and the order of the random draws. Does not own: what happens meanwhile
(simulated_worker.py, chunks.py), times that follow from the plan
(engine/simulation/priced_times.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Protocol

import numpy as np

from engine.plan.leaving_batches import ForeseenRows
from engine.plan.plan import PlannedNode
from engine.plan.row_lengths import RowLengths
from engine.protocol import messages as m
from engine.run.simulated_workers.behaviour import Durations

Times = tuple[np.ndarray, np.ndarray]
"""Seconds from a chunk's start to the start and the end of each row, float64 [rows]."""

Rows = m.RunChunk | m.TrainStep | m.TrainPart | m.Evaluate | m.Record
"""Messages that name rows of other Workers."""


class DecodeRun(Protocol):
    """Rows that one replica decodes, and takes further ones into while it goes on: from the first
    row that came to an idle replica until none is left. Rows are numbered as they are added, the
    places of an episode that stay empty too; `now` never goes back.
    """

    def add(self, rows: RowLengths, now: float, weights: np.ndarray | None = None) -> None:
        """Take in rows, each to begin in a free slot. weights: float32 [rows], how much each is
        expected to take: the heavier ones of those that wait begin first.
        """
        ...

    def next_end(self) -> float | None:
        """When the next row ends if none is added; None where no row is left."""
        ...

    def advance(self, now: float) -> np.ndarray:
        """Go on until then: the numbers of the rows that have ended since this was asked before."""
        ...

    def begun(self, row: int) -> float:
        """When a row began that has ended."""
        ...


class KernelTimes(Protocol):
    """Asked once for each thing that a Worker does, as it begins it. Seconds, but for `lengths`."""

    def lengths(self, chunk: m.RunChunk, node: PlannedNode) -> RowLengths | None:
        """Tokens of the rows that a chunk makes; None where nobody needs them."""
        ...

    def rows(self, node: PlannedNode, rows: int, lengths: RowLengths | None, worker: str) -> Times:
        """Of the rows of a chunk, at a Worker."""
        ...

    def decode_run(self, node: PlannedNode, worker: str) -> DecodeRun:
        """A replica begins to decode rows of a node that binds late (`PlannedNode.binds_late`)."""
        ...

    def threads(self, node: PlannedNode) -> int:
        """Cores of its host that one rank of a node's kernel keeps busy; 0 where none counts."""
        ...

    def computing(self, node: PlannedNode) -> float:
        """The share of a function's seconds in which it keeps a core busy, 0 to 1; in the others it
        waits for something else. 0 where no core counts.
        """
        ...

    def cores(self, worker: str) -> int:
        """Of a Worker's host."""
        ...

    def batches(self, node: PlannedNode, rows: ForeseenRows) -> Iterator[tuple[float, np.ndarray]]:
        """When rows of a chunk are handed over, in seconds from its start, and their numbers."""
        ...

    def interrupted_rows(
        self, node: PlannedNode, ends: np.ndarray, groups: np.ndarray, seconds: float
    ) -> np.ndarray:
        """The rows that a chunk hands over at once, if it has not yet, as new weights interrupt it
        so many seconds after its start; `ends` as of all rows.
        """
        ...

    def fetch(self, message: Rows | m.FetchAhead, here: frozenset[tuple[str, int]] = ...) -> float:
        """Until all rows of a message are there. here: blocks (worker, number) of which the reader
        has its rows.
        """
        ...

    def train(self, message: m.TrainStep | m.TrainPart) -> float:
        """A Step's updates, or the gradients of a part, of one rank."""
        ...

    def finish(self, message: m.FinishStep) -> float:
        """The update of a Step whose parts are summed, of one rank."""
        ...

    def prepare(self, message: m.TrainStep | m.TrainPart | m.FinishStep) -> float:
        """Until a rank that has its rows may begin."""
        ...

    def answer(self, message: m.Evaluate | m.Record) -> float:
        """An evaluation, or a Step's samples."""
        ...

    def offer(self, message: m.Offer) -> float:
        """Until a version can be fetched."""
        ...

    def load(self, message: m.Load) -> float:
        """Until a reader has a version."""
        ...

    def interrupts(self, reader: str) -> bool:
        """Whether a reader takes new weights within a chunk."""
        ...

    def turn(self, worker: str) -> float:
        """Until a Worker has taken its devices, or given them back."""
        ...

    def start(self, worker: str) -> float:
        """Until a Worker that begins during the run is open."""
        ...

    def open(self) -> float:
        """Until a source is open."""
        ...

    def files(self) -> float:
        """Until files are read or written."""
        ...


class RandomDecode:
    """See DecodeRun: each row takes a time of its own."""

    def __init__(self, node: PlannedNode, durations: Durations, draw: Random) -> None:
        self._node, self._durations, self._draw = node, durations, draw
        self._free = [0.0] * durations.slots
        self._begins: list[float] = []
        self._under_way: list[tuple[float, int]] = []
        """(end, row), a heap."""

    def add(self, rows: RowLengths, now: float, weights: np.ndarray | None = None) -> None:
        """See DecodeRun; the heavier ones come first."""
        for _ in range(len(rows)):
            begin = max(now, heapq.heappop(self._free))
            end = begin + self._durations.of_row(self._node.name, self._draw)
            heapq.heappush(self._free, end)
            heapq.heappush(self._under_way, (end, len(self._begins)))
            self._begins.append(begin)

    def next_end(self) -> float | None:
        """See DecodeRun."""
        return self._under_way[0][0] if self._under_way else None

    def advance(self, now: float) -> np.ndarray:
        """See DecodeRun."""
        ended: list[int] = []
        while self._under_way and self._under_way[0][0] <= now:
            ended.append(heapq.heappop(self._under_way)[1])
        return np.array(ended, dtype=np.int64)

    def begun(self, row: int) -> float:
        """See DecodeRun."""
        return self._begins[row]


class RandomTimes:
    """Times from a generator of their own, about those of `durations`; rows come in random batches,
    at times after an empty one.
    """

    def __init__(self, durations: Durations) -> None:
        self._durations = durations
        self._draw = Random(durations.seed)
        # Apart from all else, so that a seed's times stay the same.
        self._beats = Random(f"{durations.seed}/beats")

    def lengths(self, chunk: m.RunChunk, node: PlannedNode) -> None:
        """Nobody needs them."""

    def rows(self, node: PlannedNode, rows: int, lengths: RowLengths | None, worker: str) -> Times:
        """Each row in the slot that is free first; all Workers are alike."""
        del worker
        durations = self._durations
        free = [0.0] * (durations.slots if node.traits.generates else 1)
        starts, ends = np.zeros(rows), np.zeros(rows)
        for row in range(rows):
            starts[row] = heapq.heappop(free)
            ends[row] = starts[row] + durations.of_row(node.name, self._draw)
            heapq.heappush(free, float(ends[row]))
        return starts, ends

    def decode_run(self, node: PlannedNode, worker: str) -> RandomDecode:
        """The same."""
        del worker
        return RandomDecode(node, self._durations, self._draw)

    def threads(self, node: PlannedNode) -> int:
        """No core counts."""
        return 0

    def computing(self, node: PlannedNode) -> float:
        """No core counts."""
        return 0.0

    def cores(self, worker: str) -> int:
        """Nobody asks."""
        return 1

    def batches(self, node: PlannedNode, rows: ForeseenRows) -> Iterator[tuple[float, np.ndarray]]:
        """The rows in the order in which they end, cut at random; at times with an empty batch."""
        draw, order = self._draw, np.argsort(rows.ends, kind="stable")
        parts = draw.choice((1, 1, 2, len(order)))
        cuts = {draw.randint(0, len(order)) for _ in range(parts - 1)} | {0, len(order)}
        if draw.random() < 0.1:
            yield 0.0, order[:0]
        for first, last in pairwise(sorted(cuts)):
            batch = order[first:last]
            shuffled = batch[draw.sample(range(len(batch)), len(batch))]
            yield float(rows.ends[batch].max(initial=0.0)), shuffled
        if node.traits.generates and self._beats.random() < 0.3:
            yield float(rows.ends.max(initial=0.0)) * self._beats.random(), order[:0]

    def interrupted_rows(
        self, node: PlannedNode, ends: np.ndarray, groups: np.ndarray, seconds: float
    ) -> np.ndarray:
        """None: its batches are random as they are."""
        return np.zeros(0, np.int64)

    def fetch(
        self, message: Rows | m.FetchAhead, here: frozenset[tuple[str, int]] = frozenset()
    ) -> float:
        """At once, but for what faults.py adds."""
        return 0.0

    def train(self, message: m.TrainStep | m.TrainPart) -> float:
        """About `durations.train`; of a part a quarter."""
        share = 0.25 if isinstance(message, m.TrainPart) else 1.0
        return self._vary(share * self._durations.train)

    def finish(self, message: m.FinishStep) -> float:
        """About `durations.load`."""
        return self._vary(self._durations.load)

    def prepare(self, message: m.TrainStep | m.TrainPart | m.FinishStep) -> float:
        """About `durations.load`."""
        return self._vary(self._durations.load)

    def answer(self, message: m.Evaluate | m.Record) -> float:
        """About `durations.store`."""
        return self._vary(self._durations.store)

    def offer(self, message: m.Offer) -> float:
        """About `durations.load`."""
        return self._vary(self._durations.load)

    def load(self, message: m.Load) -> float:
        """About `durations.load`."""
        return self._vary(self._durations.load)

    def interrupts(self, reader: str) -> bool:
        """As `durations.loads` says of all."""
        return self._durations.loads == "interrupt"

    def turn(self, worker: str) -> float:
        """About `durations.load`."""
        return self._vary(self._durations.load)

    def start(self, worker: str) -> float:
        """At once, but for what faults.py adds."""
        return 0.0

    def open(self) -> float:
        """About `durations.load`."""
        return self._vary(self._durations.load)

    def files(self) -> float:
        """About `durations.store`."""
        return self._vary(self._durations.store)

    def _vary(self, seconds: float) -> float:
        return seconds * self._draw.lognormvariate(0.0, self._durations.tail)
