"""How a simulated Worker runs a chunk: in which batches its rows come, when, with which version.

Does not own: when a chunk begins (simulated_worker.py), how long a row takes (kernel_times.py),
whether it fails or is kept (behaviour.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from engine.coordinator.tables import codes
from engine.plan.leaving_batches import ForeseenRows
from engine.plan.plan import PlannedNode
from engine.protocol.messages import Produced, RunChunk, Tombstoned
from engine.protocol.staleness import NO_VERSION, ages
from engine.run.simulated_workers.history import ModelRead
from engine.run.simulated_workers.outbox import count_tokens
from engine.run.simulated_workers.world import RunningWorker, SharedWorld


class _KernelRun:
    """A chunk that a kernel has under way. ends: seconds of computing from its begin to the end of
    each row. lost: what kernels of its host had lost when it began.
    """

    def __init__(
        self,
        node: PlannedNode,
        begun: float,
        lost: float,
        ends: np.ndarray,
        groups: np.ndarray,
        produce: Callable[[np.ndarray], None],
    ) -> None:
        self.node, self.ends, self.groups = node, ends, groups
        self.begun, self.lost = begun, lost
        self._produce = produce
        self._gone = np.zeros(len(ends), bool)
        """The rows that were handed over."""

    def hand_over(self, batch: np.ndarray) -> None:
        """Those of these rows that are still here; a batch without rows is handed over, too."""
        rows = batch[~self._gone[batch]]
        self._gone[rows] = True
        if len(rows) or not len(batch):
            self._produce(rows)


class RowsOfChunk:
    """The rows that a chunk makes, some failing, and how they are handed over. lengths: tokens of
    each, where they are known.
    """

    def __init__(self, worker: RunningWorker, world: SharedWorld, chunk: RunChunk) -> None:
        self._worker, self._world = worker, world
        self.chunk = chunk
        name, outcomes = chunk.node, world.outcomes
        self.node = node = world.nodes[name]
        keys = chunk.keys
        if node.relation in ("expand", "source"):
            keys = keys.expand_spans(node.rows // node.inner, chunk.spans)
        self.keys = keys
        self.lengths = world.kernels.lengths(chunk, node)
        failed = outcomes.draw_failed_rows(name, keys) | _without_any(node, chunk)
        lost = outcomes.draw_lost_rows(name, keys) & ~failed
        empty = outcomes.find_empty_places(name, keys) & ~(failed | lost)
        self._failed, self._lost, self._empty = failed, lost, empty
        self._wanted = ~(failed | lost | empty)
        if node.relation == "subset":
            self._wanted &= outcomes.draw_kept_rows(name, keys)

    @property
    def samples(self) -> np.ndarray:
        """int64: how many rows come of each row of the chunk."""
        chunk, node = self.chunk, self.node
        if chunk.spans is not None:
            return (chunk.spans[:, 1] - chunk.spans[:, 0]).astype(np.int64)
        count = node.rows // node.inner if node.relation == "expand" else 1
        return np.full(len(chunk.keys), count)

    @property
    def groups(self) -> np.ndarray:
        """int64 [rows]: rows that come of one row of the chunk have one number."""
        samples = self.samples
        return np.repeat(np.arange(len(samples)), samples)

    @property
    def tokens(self) -> int:
        """Of all rows; 0 where nobody knows them."""
        if self.lengths is None:
            return 0
        return int(self.lengths.prompts.sum() + self.lengths.answers.sum())

    def foresee(self, starts: np.ndarray, ends: np.ndarray) -> ForeseenRows:
        """When its rows begin and end. Where nobody knows lengths, those told of rows count."""
        growth = self._world.outcomes.growth
        answers = count_tokens(self.node, self.keys, self.lengths, growth)
        return ForeseenRows(starts=starts, ends=ends, groups=self.groups, answers=answers)

    def find_watermark(self, rows: ForeseenRows, seconds: float, has_left: np.ndarray) -> int:
        """The least tokens of a row that has not ended; where nobody knows lengths of one that has
        not left, as rows may be lost whose group then is shorter than was foreseen.
        """
        if not self.node.traits.generates:
            return 0
        if self.lengths is None:
            rows = replace(rows, groups=np.arange(len(rows.ends)))
        return rows.watermark(seconds, has_left)

    def produce(
        self,
        batch: np.ndarray,
        version_of: Callable[[int], int],
        span: int | None = None,
        watermark: int = 0,
    ) -> None:
        """Hand over some of its rows. version_of: the version that a row began with."""
        worker, world, keys = self._worker, self._world, self.keys
        good = batch[self._wanted[batch]]
        versions = [version_of(row) for row in good.tolist()]
        if self.node.traits.generates:  # its first version counts as 0
            versions = [max(version, 0) for version in versions]
        aged = ages(world.plan, self.node.name, np.array(versions, np.int32))
        sizes = None if self.lengths is None else self.lengths.take(good)
        ref = world.outbox.keep(worker.name, self.node, keys.take(good), aged, sizes)
        produced = Produced(id=self.chunk.id, node=self.node.name, ref=ref, watermark=watermark)
        worker.say(produced, span)
        for rows in batch[self._failed[batch]].tolist():
            self._give_up(rows, span, row_only=False)
        for rows in batch[self._lost[batch]].tolist():
            self._give_up(rows, span, row_only=True)
        for rows in batch[self._empty[batch]].tolist():
            self._give_up(rows, span, row_only=True, is_failure=False)

    def _give_up(
        self, row: int, span: int | None, *, row_only: bool, is_failure: bool = True
    ) -> None:
        (key,) = self.keys.take(np.array([row])).rows()
        tombstone = Tombstoned(
            id=self.chunk.id,
            node=self.chunk.node,
            key=key,
            error="simulated",
            failed=is_failure,
            row_only=row_only,
        )
        self._worker.say(tombstone, span)


class ChunkRuns:
    """The chunks of one Worker."""

    def __init__(self, worker: RunningWorker, world: SharedWorld) -> None:
        self._worker = worker
        self._world = world
        self._loads: dict[str, list[tuple[float, int]]] = {}
        """Node -> (time, version) of each version that it loaded."""
        self._running: dict[str, _KernelRun] = {}
        """Node -> the chunk that its kernel has under way."""

    def note_load(self, node: str, version: int) -> None:
        """Note that a reader has this version from now on; interrupts what it has under way."""
        chunk = self._running.get(node)
        if chunk is not None:
            cores, kernels = self._world.cores, self._world.kernels
            seconds = cores.count_computed(self._worker.name, chunk.begun, chunk.lost)
            rows = kernels.interrupted_rows(chunk.node, chunk.ends, chunk.groups, seconds)
            if len(rows):
                chunk.hand_over(rows)
        self._loads.setdefault(node, []).append((self._world.clock.now, version))

    def run(
        self, chunk: RunChunk, end: Callable[[], None], share: float = 1.0
    ) -> tuple[float, int, int]:
        """Produce a chunk's rows in batches as they finish, some failing; then call `end`. Returns
        how long that takes, its rows, and their tokens where they are known. share: of the batches
        that come.
        """
        world, worker, begun = self._world, self._worker, self._world.clock.now
        lost = world.cores.find_lost(worker.name)
        rows = RowsOfChunk(worker, world, chunk)
        node = rows.node
        starts, ends = world.kernels.rows(node, len(rows.keys), rows.lengths, worker.name)

        has_left = np.zeros(len(rows.keys), dtype=bool)

        def version_of(row: int) -> int:
            return self.version_at(node.name, float(begun + starts[row]))

        foreseen = rows.foresee(starts, ends)

        def produce(batch: np.ndarray) -> None:
            has_left[batch] = True
            seconds = world.cores.count_computed(worker.name, begun, lost)
            watermark = rows.find_watermark(foreseen, seconds, has_left)
            rows.produce(batch, version_of, watermark=watermark)

        batches = list(world.kernels.batches(node, foreseen))
        batches = batches[: math.ceil(share * len(batches))]
        seconds = max(ends.tolist(), default=0.0)
        if world.kernels.computing(node):  # a function: its rows are there all at once

            def produce_all() -> None:
                for _, batch in batches:
                    produce(batch)
                end()

            world.cores.run(worker, node, seconds, produce_all)
        else:
            self._run_kernel(rows, batches, ends, produce, end)
        return seconds, len(rows.keys), rows.tokens

    def _run_kernel(
        self,
        rows: RowsOfChunk,
        batches: Sequence[tuple[float, np.ndarray]],
        ends: np.ndarray,
        produce: Callable[[np.ndarray], None],
        end: Callable[[], None],
    ) -> None:
        """Hand each batch over when it leaves, and keep cores busy until then."""
        node = rows.node

        def end_kernel() -> None:
            del self._running[node.name]
            self._world.cores.end(self._worker.name, node)
            end()

        now, lost = self._world.clock.now, self._world.cores.find_lost(self._worker.name)
        chunk = _KernelRun(node, now, lost, ends, rows.groups, produce)
        self._running[node.name] = chunk
        self._world.cores.begin(self._worker.name, node)
        compute = self._world.cores.compute
        for leaving, batch in batches:
            compute(self._worker, leaving, partial(chunk.hand_over, batch))
        compute(self._worker, max(ends.tolist(), default=0.0), end_kernel)

    def note_read(self, chunk: RunChunk, begun: float) -> None:
        """Note which versions a chunk that ends now has read."""
        name, step, region = chunk.node, chunk.step, self._world.nodes[chunk.node].region
        now = self._world.clock.now
        first, last = self.version_at(name, begun), self.version_at(name, now)
        if first != NO_VERSION:
            read = ModelRead(node=name, region=region, step=step, first=first, last=last)
            self._world.history.note_read(read)

    def version_at(self, node: str, start: float) -> int:
        """The version that a row begun at `start` is made with, or NO_VERSION."""
        loads = self._loads.get(node, ())
        return max((version for when, version in loads if when <= start), default=NO_VERSION)


def _without_any(node: PlannedNode, chunk: RunChunk) -> np.ndarray:
    """Boolean [rows] (or one False): rows of a reduction that have no descendants left."""
    for i in node.inputs:
        if i.fan_in:
            owners = chunk.inputs[i.name][0].keys
            assert owners is not None
            wanted = codes(chunk.keys.position, chunk.keys.sample)
            return ~np.isin(wanted, codes(owners.position, owners.sample))
    return np.zeros(1, dtype=bool)
