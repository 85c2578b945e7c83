"""Chunks that the ranks of a replica run together, as one simulated Worker does its part.

Owns: waiting for the other ranks before and after a chunk, and what follows where its lead could
not fetch the rows. Does not own: the ranks that have come (groups.py), the rows of a chunk
(chunks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from engine.protocol import messages as m
from engine.run.simulated_workers.chunks import ChunkRuns
from engine.run.simulated_workers.task_queue import Done
from engine.run.simulated_workers.world import RunningWorker, SharedWorld


class RankWorker(RunningWorker, Protocol):
    """A simulated Worker, as its part of a replica sees it."""

    def note_compute(self, seconds: float, rows: int = 0, tokens: int = 0) -> None:
        """Note that what it does now keeps its device busy for so long."""
        ...

    def after(self, seconds: float, action: Done) -> None:
        """Schedule an action of this process, if it is still there by then."""
        ...


class ReplicaChunks:
    """Of one Worker. run: has the chunk's rows made, and calls its second argument at the end.
    go_on: begins what comes next here.
    """

    def __init__(
        self,
        worker: RankWorker,
        world: SharedWorld,
        chunks: ChunkRuns,
        run: Callable[[m.RunChunk, Done], None],
        go_on: Done,
    ) -> None:
        self._worker, self._world, self._chunks, self._run = worker, world, chunks, run
        self._go_on = go_on
        self.followed: set[str] = set()
        """Nodes that are decoded here, whose rows the lead has."""

    def run(self, chunk: m.RunChunk, done: Done) -> None:
        """Begin once all ranks are here, with one version; end with the last of them. One whose
        memory runs out ends alone.
        """
        self._meet("chunk", chunk, partial(self._begin_alike, chunk, done))

    def _begin_alike(self, chunk: m.RunChunk, done: Done) -> None:
        groups = self._world.groups
        begin = partial(self._begin, chunk, done)
        if groups.is_nothing_given(chunk.id) or not groups.lagged.governs(chunk.node):
            begin()
            return
        find_version = partial(self._find_version, chunk.node)
        groups.lagged.begin(chunk.node, self._worker.name, find_version, begin)

    def _find_version(self, node: str) -> int:
        return self._chunks.version_at(node, self._world.clock.now)

    def join(self, chunk: m.RunChunk, join: Callable[[m.RunChunk], None], done: Done) -> None:
        """Let a chunk join what the ranks decode, once all of them are here. join: as the lead."""
        self._meet("chunk", chunk, partial(self._begin_together, chunk, join, done))

    def _begin_together(
        self, chunk: m.RunChunk, join: Callable[[m.RunChunk], None], done: Done
    ) -> None:
        groups, name = self._world.groups, self._worker.name
        if groups.is_nothing_given(chunk.id):
            self._say_ended(chunk, done)
            return

        find_version = partial(self._find_version, chunk.node)

        def begin() -> None:
            groups.require_one_version(chunk, find_version())
            if chunk.giver == name:
                join(chunk)
            else:
                self._follow(chunk)
            done()

        groups.lagged.begin(chunk.node, name, find_version, begin)

    def _follow(self, chunk: m.RunChunk) -> None:
        """Decode a chunk whose rows its lead has."""
        node, name = chunk.node, self._worker.name

        def end_run() -> None:
            self.followed.discard(node)
            self._go_on()

        self.followed.add(node)
        say = partial(self._worker.say, m.RankDone(id=chunk.id, node=node, worker=name))
        say_later = partial(self._worker.after, 0.0, say)
        end_later = partial(self._worker.after, 0.0, end_run)
        self._world.groups.lagged.follow(node, name, chunk.id, say_later, end_later)

    def give_nothing(self, chunk: m.RunChunk, failed: m.FetchFailed, done: Done) -> None:
        """Let the other ranks go, as the lead has no rows for them."""
        self._world.groups.note_nothing_given(chunk.id)

        def end() -> None:
            self._worker.say(failed)
            done()

        self._meet("chunk", chunk, end)

    def _meet(self, what: str, chunk: m.RunChunk, then: Done) -> None:
        ranks = self._world.nodes[chunk.node].share_of(self._worker.name)
        work = what, chunk.node, chunk.id
        self._world.groups.meet(work, self._worker.name, then, len(ranks))

    def _begin(self, chunk: m.RunChunk, done: Done) -> None:
        begun, is_lead = self._world.clock.now, chunk.giver == self._worker.name
        cores, node = self._world.cores, self._world.nodes[chunk.node]

        def end() -> None:
            if not is_lead:
                cores.end(self._worker.name, node)
                self._worker.note_compute(self._world.clock.now - begun)
            self._say_ended(chunk, done)

        if self._world.shorts.ends(chunk):
            short = self._world.shorts.find(chunk)
            assert short is not None
            self._worker.say(self._world.shorts.say(chunk, short))
            self._world.end_short(self._worker.name)
            return
        version = self._chunks.version_at(chunk.node, begun)
        self._world.groups.require_one_version(chunk, version)
        if self._world.groups.is_nothing_given(chunk.id):
            self._say_ended(chunk, done)
            return
        if is_lead:
            self._run(chunk, partial(self._meet, "end of chunk", chunk, end))
            return
        # The lead's cores are kept busy with its rows.
        cores.begin(self._worker.name, node)
        self._meet("end of chunk", chunk, end)

    def _say_ended(self, chunk: m.RunChunk, done: Done) -> None:
        if chunk.giver == self._worker.name:
            self._worker.say(m.ChunkDone(id=chunk.id, node=chunk.node))
            self._end_run(chunk)
        else:
            name = self._worker.name
            self._worker.say(m.RankDone(id=chunk.id, node=chunk.node, worker=name))
        done()

    def _end_run(self, chunk: m.RunChunk) -> None:
        """After a chunk that none can join, weights are taken up again as they come."""
        lagged, node = self._world.groups.lagged, self._world.nodes[chunk.node]
        if not node.binds_late:
            lagged.end_run(node.name, self._worker.name)
