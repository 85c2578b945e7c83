"""Chunks: who runs which, what they read, and which have to be run once more.

    a chunk is   waits for                                       left by
    parked       what it reads to be there, a free replica       RunChunk -> told
    told         its Worker                                      ChunkDone -> ended
                                                                 WorkerLost, FetchFailed -> parked,
                                                                 or given up
    ended        a reader of rows that were lost                 such a reader -> parked

A chunk of rows that are bound late is told as it is made (late_binding.py), and never parked.

Owns: which chunk is next; keeping what a chunk reads until it has ended; and the lineage, by which
rows that died with a Worker are made again. Does not own: the choice of a replica
(replica_choice.py, late_binding.py), which rows make a chunk (readiness.py, step.py), what becomes
of its output (run_region.py), nor who is alive (recovery.py).

A chunk runs again whole, with the same keys, where that gives the same rows: above the cut of a
synchronous source, below the cut, and in an evaluation; if it reads a trained Model, only until the
Step begins to train. Its inputs are held while its rows are wanted, and it runs again only when a
reader asks for lost rows. Elsewhere a lost chunk is given up, and its prompt table decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from dataflow.arrays import all_true
from dataflow.batch import Keys
from engine.coordinator.blocks import Blocks
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.chunk_queue import Parked
from engine.coordinator.late_binding import LateBinding
from engine.coordinator.memory_limits import LoweredLimits
from engine.coordinator.replica_choice import Idlest
from engine.coordinator.tables import codes
from engine.coordinator.task_ledger import Outstanding, Pending
from engine.coordinator.unit_pool import UnitPool
from engine.plan.plan import Plan, PlannedNode
from engine.plan.replica_ranges import elastic_nodes
from engine.protocol.messages import RunChunk
from engine.protocol.refs import Ref

_AHEAD = 2
"""Chunks that a replica of an elastic node has at most, where its rows are cut into chunks: one to
run, one so that it need not wait. The others are for replicas that join.
"""


class Dispatch:
    """Every chunk that was assigned and is not forgotten. pools: of nodes that bind late."""

    def __init__(
        self,
        plan: Plan,
        blocks: Blocks,
        outstanding: Outstanding,
        pools: Iterable[UnitPool],
        limits: LoweredLimits | None = None,
    ) -> None:
        self.limits = limits or LoweredLimits(plan)
        self._place = plan.place
        self._blocks = blocks
        self._outstanding = outstanding
        blocks.on_gone = self._gone
        self._again = {n.name for n in plan.nodes if not n.lag}
        self._elastic = {n.name for n in elastic_nodes(plan)}
        self._readers = {n.name for n in plan.nodes if any(use.trained for use in n.states)}
        self.late = LateBinding(pools)
        in_chunks = [n for n in plan.nodes if n.name not in self.late.credits]
        self._idlest = Idlest(in_chunks, outstanding.rows)
        outstanding.on_chunk.append(self._rows_moved)
        self._parked = Parked()
        self._news = False
        """Whether a chunk was parked since the last look."""
        self._unended: dict[str, set[NodeChunk]] = {}
        """By region, the chunks of nodes without lag whose metrics are still to come."""
        self._lost: set[int] = set()
        """Blocks that are gone and have not been made again."""
        self._maker: dict[int, NodeChunk] = {}
        """Block -> the chunk that made it, if that may run again."""
        self._suspects: set[str] = set()
        """Workers that others say are gone, before their loss is known here."""
        self.moved_on = False
        """Whether the weights have changed since the Step's rows were made."""
        self.beyond: int | None = None
        """A block that is asked for and cannot be made again."""

    # --- telling ----------------------------------------------------------------------------------

    def add(self, chunk: NodeChunk, step: int) -> None:
        """Take a chunk up."""
        self._blocks.hold(chunk.holds)
        chunk.step, chunk.again = step, chunk.node.name in self._again
        self._park(chunk)

    def consider(self, worker: str) -> None:
        """A Worker may be able to run what it could not: it is there, or has its weights."""
        self._idlest.touch(worker)
        self.late.consider(worker)

    def tell(self, able: Callable[[PlannedNode, str], bool]) -> list[RunChunk]:
        """What can be told now. able: whether a worker can run chunks of a node; whoever it becomes
        true of is considered.
        """
        tasks = self._tell_parked(able)
        if not self.late.has_changed:  # at most events
            return tasks
        for chunk, worker in self.late.bind(able, self._may_read):
            chunk.again = False
            self._blocks.hold(chunk.holds)
            tasks.append(self._tell(chunk, worker))
        return tasks

    def _tell_parked(self, able: Callable[[PlannedNode, str], bool]) -> list[RunChunk]:
        tasks: list[RunChunk] = []
        if not self._parked:
            return tasks
        if self._lost or self._suspects:
            return self._tell_readable(able)
        if not (self._news or self._idlest.has_changed):
            return tasks
        self._news = False
        full_nodes: set[str] = set()
        while (chunk := self._parked.first(but=full_nodes)) is not None:
            worker = self._find_replica(chunk, able)
            if worker is None:
                full_nodes.add(chunk.node.name)
            else:
                tasks.append(self._tell(self._parked.pop(chunk.node.name), worker))
        return tasks

    def _tell_readable(self, able: Callable[[PlannedNode, str], bool]) -> list[RunChunk]:
        """The same where a chunk may have to wait for what it reads, and later ones need not."""
        tasks: list[RunChunk] = []
        waiting: list[NodeChunk] = []
        chunks = deque(self._parked.take())
        while chunks:
            chunk = chunks.popleft()
            is_readable = self.there(chunk.holds)
            worker = self._find_replica(chunk, able) if is_readable else None
            if worker is None:
                waiting.append(chunk)
            else:
                tasks.append(self._tell(chunk, worker))
            chunks.extend(self._parked.take())  # what has to be made again
        for chunk in waiting:
            self._parked.add(chunk)
        # Whether a block can be read may change without a chunk or a Worker that says so.
        self._news = True
        return tasks

    def _find_replica(
        self, chunk: NodeChunk, able: Callable[[PlannedNode, str], bool]
    ) -> str | None:
        """The one for which the chunk was cut, if that is able; else the idlest one that is."""
        node = chunk.node
        if chunk.replica and able(node, chunk.replica):
            return chunk.replica
        if node.name not in self._elastic:
            return self._idlest.choose(node.name, lambda worker: able(node, worker))
        has = self._outstanding.under_way
        return self._idlest.choose(
            node.name, lambda worker: has[node.name, worker] < _AHEAD and able(node, worker)
        )

    def _rows_moved(self, node: str, worker: str, more: int) -> None:
        del node, more
        self._idlest.touch(worker)

    def _tell(self, chunk: NodeChunk, worker: str) -> RunChunk:
        """Give a chunk to a replica."""
        if not chunk.runs:  # later it keeps them: with others it might have other bits
            chunk.limits = self.limits.of(chunk.node.name)
        chunk.state = "told"
        chunk.runs += 1
        task = RunChunk(
            id=self._outstanding.new_id(),
            node=chunk.node.name,
            worker=worker,
            step=chunk.step,
            keys=chunk.keys,
            inputs=self._blocks.gathers(chunk.inputs),
            again=chunk.closed or chunk.has_counted,
            spans=chunk.spans,
            weights=chunk.weights,
            limits=chunk.limits,
        )
        self._outstanding.ask(task, self._blocks.places(chunk.holds), chunk)
        return task

    def there(self, numbers: Iterable[int]) -> bool:
        """Whether these blocks can be read now; arranges that missing ones are made again."""
        missing = self._blocks.missing(numbers)
        for number in missing:
            self._make_again(number)
        return not missing and not self._has_suspect(numbers)

    def _has_suspect(self, numbers: Iterable[int]) -> bool:
        """Whether one of these blocks is at a Worker that may be gone."""
        suspects = self._suspects
        return bool(suspects) and self._blocks.some_at(self._blocks.places(numbers), suspects)

    def _may_read(self, numbers: frozenset[int]) -> bool:
        """Whether these blocks can be read now; what is lost, the region of the rows knows soon."""
        is_missing = bool(self._lost) and bool(self._blocks.missing(numbers))
        return not is_missing and not self._has_suspect(numbers)

    def _make_again(self, number: int) -> None:
        chunk = self._maker.get(number)
        # A chunk that reads a trained Model gives other rows once the Step has begun to train.
        if chunk is None or (chunk.node.name in self._readers and self.moved_on):
            self.beyond = number
        elif chunk.state == "ended":
            self._park(chunk)

    def _park(self, chunk: NodeChunk) -> None:
        chunk.state = "parked"
        self._parked.add(chunk)
        self._news = True
        if not (chunk.closed or chunk.node.lag):
            self._unended.setdefault(chunk.node.region, set()).add(chunk)

    # --- what comes of it -------------------------------------------------------------------------

    def find_fresh(self, chunk: NodeChunk, keys: Keys) -> np.ndarray | None:
        """Boolean [rows]: which of the rows come for the first time; None where all do."""
        if chunk.runs == 1 or not chunk.blocks_made:
            return None
        earlier = [codes(came.position, came.sample) for came, _ in chunk.blocks_made.values()]
        return ~np.isin(codes(keys.position, keys.sample), np.concatenate(earlier))

    def note_rows(self, chunk: NodeChunk, number: int, ref: Ref) -> None:
        """Rows of a chunk have come, as this block."""
        if not chunk.again:
            return
        self._maker[number] = chunk
        chunk.blocks_made[number] = (ref.keys, ref.digest)
        if chunk.runs > 1:
            self._blocks.hold((number,))
            chunk.blocks_remade.append(number)

    def finish(self, asked: Pending) -> str:
        """A chunk has ended: release what it read. Returns what differs from an earlier run."""
        chunk = asked.chunk
        assert chunk is not None
        self.late.end(asked)
        difference = self._moves(chunk) if asked.wanted and chunk.runs > 1 else ""
        self._end(chunk)
        return difference

    def _end(self, chunk: NodeChunk) -> None:
        chunk.state = "ended"
        self._never_ends(chunk)
        self._blocks.let_go(chunk.blocks_remade)
        chunk.blocks_remade.clear()
        self._forget(chunk)

    def _forget(self, chunk: NodeChunk) -> None:
        """What a chunk read may go once its rows cannot be asked for again."""
        if not chunk.blocks_made and chunk.state == "ended":
            self._blocks.let_go(chunk.holds)
            chunk.holds = frozenset()

    def _gone(self, number: int) -> None:
        self._lost.discard(number)
        chunk = self._maker.pop(number, None)
        if chunk is not None:
            del chunk.blocks_made[number]
            self._forget(chunk)

    def _moves(self, chunk: NodeChunk) -> str:
        """Find the rows of its lost blocks in the new ones; says which is missing or differs.

        The chunk ran again whole, as the last bits of a batched product depend on what shares the
        batch (decision 0009); so its rows have to be the same to the bit.
        """
        lost = [number for number in chunk.blocks_made if self._blocks.lost_with(number)]
        if not lost:
            return ""
        code, numbers, rows, digests = _remade(chunk)
        for number in lost:
            keys, digest = chunk.blocks_made[number]
            lost_code = codes(keys.position, keys.sample)
            at = np.searchsorted(code, lost_code)
            came = np.isin(lost_code, code)
            is_same = came.copy()
            if len(digest) and len(digests):
                is_same[came] = digest[came] == digests[at[came]]
            if not all_true(came):
                return self._not_the_same(chunk, keys.take(~came), "did not come")
            if not all_true(is_same):
                return self._not_the_same(chunk, keys.take(~is_same), "is another")
            self._blocks.move(number, numbers[at], rows[at])
            self._lost.discard(number)
        return ""

    def _not_the_same(self, chunk: NodeChunk, rows: Keys, how: str) -> str:
        return (
            f"{self._place(chunk.node.name)}: its chunk was run again as its rows were lost, and"
            f" row {rows.rows()[0]} {how}: its kernel is not deterministic. Fix: let it depend on"
            " nothing but its rows and the draws of its session."
        )

    def has_unended(self, region: str) -> bool:
        """Whether a chunk of this region, of a node without lag, has never ended, so that metrics
        of it are still to come.
        """
        return bool(self._unended.get(region))

    def _never_ends(self, chunk: NodeChunk) -> None:
        """It has ended, or nobody waits for it."""
        self._unended.get(chunk.node.region, set()).discard(chunk)

    # --- losses -----------------------------------------------------------------------------------

    def lose(
        self, workers: Iterable[str], owed: Iterable[Pending], blocks: frozenset[int]
    ) -> list[NodeChunk]:
        """Workers are gone, with what they owed and these blocks. Returns the given-up chunks."""
        self._suspects.difference_update(workers)
        self._lost |= blocks
        self._news = True
        given_up: list[NodeChunk] = []
        for asked in owed:
            given_up += self.take_back(asked)
        unreadable = self._parked.take_if(lambda c: not (c.again or blocks.isdisjoint(c.holds)))
        for chunk in unreadable:
            self._end(chunk)
        return given_up + unreadable

    def suspect(self, peer: str, reads: Iterable[int]) -> None:
        """Someone could not read these blocks: if `peer` has some, wait until its loss is told."""
        if self._blocks.some_at(reads, (peer,)):
            self._suspects.add(peer)

    def take_back(self, asked: Pending) -> list[NodeChunk]:
        """What was asked came to nothing; returns its chunk if that is given up."""
        chunk = asked.chunk
        if chunk is None:
            return []
        self.late.end(asked)
        self._blocks.let_go(chunk.blocks_remade)
        chunk.blocks_remade.clear()
        if chunk.again and asked.wanted:
            self._park(chunk)
            return []
        self._end(chunk)
        return [chunk] if asked.wanted else []

    def abandon(self, whose: Callable[[PlannedNode], bool], but: Iterable[NodeChunk] = ()) -> None:
        """Give up the chunks of these nodes; the results of those under way are discarded. but:
        other ones of these nodes, which are not given up.
        """
        others = frozenset(but)
        for asked in self._outstanding.of(RunChunk):
            chunk = asked.chunk
            if chunk is not None and chunk not in others and whose(chunk.node):
                asked.wanted = False
                self._never_ends(chunk)
        for chunk in self._parked.take_if(lambda c: c not in others and whose(c.node)):
            self._end(chunk)

    def next_step(self, but: Iterable[NodeChunk]) -> None:
        """The Step is done: drop chunks that still run again for it, as the weights changed. but:
        those for the next one.
        """
        self.moved_on = False
        self.abandon(lambda node: node.name in self._again and node.region != "evaluation", but)

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines = [
            f"{peer}: is gone as others say; its end has not been told"
            for peer in sorted(self._suspects)
        ]
        for chunk in self._parked:
            rows = f"{chunk.node.name}: a chunk of {len(chunk.keys)} rows"
            lines.append(f"{rows} waits for {self._what_lacks(chunk)}")
        lines += self.late.waiting()
        for (node, worker), count in self._outstanding.under_way.items():
            lines.append(f"{node}: chunks under way at {worker}: {count}")
        return lines

    def _what_lacks(self, chunk: NodeChunk) -> str:
        lost_with = {self._blocks.lost_with(n) for n in self._blocks.missing(chunk.holds)}
        if lost_with:
            return f"rows that {', '.join(sorted(lost_with))} had"
        return f"one of {', '.join(chunk.node.leads)}"


def _remade(chunk: NodeChunk) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Code, block, row and digest (if there are any) of each row of a further run, by code."""
    # Each begins with no row, as no block at all may have come.
    code_parts = [np.zeros(0, dtype=np.int64)]
    number_parts = [np.zeros(0, dtype=np.int64)]
    row_parts = [np.zeros(0, dtype=np.int64)]
    digest_parts = [np.zeros(0, dtype=np.uint64)]
    for number in chunk.blocks_remade:
        keys, digest = chunk.blocks_made[number]
        code_parts.append(codes(keys.position, keys.sample))
        number_parts.append(np.full(len(keys), number))
        row_parts.append(np.arange(len(keys)))
        digest_parts.append(digest)
    code = np.concatenate(code_parts)
    numbers = np.concatenate(number_parts)
    rows = np.concatenate(row_parts).astype(np.int32)
    digests = np.concatenate(digest_parts)
    order = np.argsort(code)
    if len(digests):
        digests = digests[order]
    return code[order], numbers[order], rows[order], digests
