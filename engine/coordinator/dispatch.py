"""Chunks: who runs which, what they read, and which have to be run once more.

    a chunk is   waits for                                       left by
    parked       what it reads to be there, a free replica       RunChunk -> told
    told         its Worker                                      ChunkDone -> ended
                                                                 WorkerLost, FetchFailed -> parked,
                                                                 or given up
    ended        a reader of rows that were lost                 such a reader -> parked

Owns: which chunk is next; keeping what a chunk reads until it has ended; and the lineage, by which
rows that died with a Worker are made again. Does not own: the choice of a replica
(replica_choice.py), which rows make a chunk (readiness.py, step.py), what becomes of its output
(coordinator.py), nor who is alive (recovery.py).

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
from engine.coordinator.replica_choice import Idlest
from engine.coordinator.tables import codes
from engine.coordinator.task_ledger import Outstanding, Pending
from engine.plan.plan import Plan, PlannedNode
from engine.plan.replica_ranges import elastic_nodes
from engine.protocol.messages import RunChunk
from engine.protocol.refs import Ref

_AHEAD = 2
"""Chunks that a replica of an elastic node has at most: one to run, one so that it need not wait.
The others are for replicas that join.
"""


class Dispatch:
    """Every chunk that was assigned and is not forgotten."""

    def __init__(self, plan: Plan, blocks: Blocks, outstanding: Outstanding) -> None:
        self._place = plan.place
        self._blocks = blocks
        self._outstanding = outstanding
        blocks.on_gone = self._gone
        self._again = {n.name for n in plan.nodes if len(plan.workers) > 1 and not n.lag}
        self._elastic = {n.name for n in elastic_nodes(plan)}
        self._readers = {n.name for n in plan.nodes if any(use.trained for use in n.models)}
        self._idlest = Idlest(plan.nodes, outstanding.rows)
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

    def tell(self, able: Callable[[PlannedNode, str], bool]) -> list[RunChunk]:
        """What can be told now. able: whether a worker can run chunks of a node; whoever it becomes
        true of is considered.
        """
        if not self._parked:
            return []
        if self._lost or self._suspects:
            return self._tell_readable(able)
        if not (self._news or self._idlest.changed):
            return []
        self._news = False
        found: list[RunChunk] = []
        full: set[str] = set()
        while (chunk := self._parked.first(but=full)) is not None:
            worker = self._idlest_of(chunk.node, able)
            if worker is None:
                full.add(chunk.node.name)
            else:
                found.append(self._tell(self._parked.pop(chunk.node.name), worker))
        return found

    def _tell_readable(self, able: Callable[[PlannedNode, str], bool]) -> list[RunChunk]:
        """The same where a chunk may have to wait for what it reads, and later ones need not."""
        found: list[RunChunk] = []
        left: list[NodeChunk] = []
        chunks = deque(self._parked.take())
        while chunks:
            chunk = chunks.popleft()
            there = self.there(chunk.holds)
            worker = self._idlest_of(chunk.node, able) if there else None
            if worker is None:
                left.append(chunk)
            else:
                found.append(self._tell(chunk, worker))
            chunks.extend(self._parked.take())  # what has to be made again
        for chunk in left:
            self._parked.add(chunk)
        self._news = True
        return found

    def _idlest_of(self, node: PlannedNode, able: Callable[[PlannedNode, str], bool]) -> str | None:
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
        chunk.state = "told"
        chunk.runs += 1
        task = RunChunk(
            id=self._outstanding.new_id(),
            node=chunk.node.name,
            worker=worker,
            step=chunk.step,
            keys=chunk.keys,
            inputs=self._blocks.gathers(chunk.inputs),
            again=chunk.closed,
        )
        self._outstanding.ask(task, self._blocks.places(chunk.holds), chunk)
        return task

    def there(self, numbers: Iterable[int]) -> bool:
        """Whether these blocks can be read now; arranges that missing ones are made again."""
        missing = self._blocks.missing(numbers)
        for number in missing:
            self._make_again(number)
        if missing:
            return False
        return not self._suspects or not self._blocks.some_at(
            self._blocks.places(numbers), self._suspects
        )

    def _make_again(self, number: int) -> None:
        chunk = self._maker.get(number)
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

    def fresh(self, chunk: NodeChunk, keys: Keys) -> np.ndarray | None:
        """Boolean [rows]: which of the rows come for the first time; None where all do."""
        if chunk.runs == 1 or not chunk.made:
            return None
        came = np.concatenate([codes(k.position, k.sample) for k, _ in chunk.made.values()])
        return ~np.isin(codes(keys.position, keys.sample), came)

    def made(self, chunk: NodeChunk, number: int, ref: Ref) -> None:
        """Rows of a chunk have come, as this block."""
        if not chunk.again:
            return
        self._maker[number] = chunk
        chunk.made[number] = (ref.keys, ref.digest)
        if chunk.runs > 1:
            self._blocks.hold((number,))
            chunk.remade.append(number)

    def done(self, asked: Pending) -> str:
        """A chunk has ended: release what it read. Returns what differs from an earlier run."""
        chunk = asked.chunk
        assert chunk is not None
        wrong = self._moves(chunk) if asked.wanted and chunk.runs > 1 else ""
        self._end(chunk)
        return wrong

    def _end(self, chunk: NodeChunk) -> None:
        chunk.state = "ended"
        self._never_ends(chunk)
        self._blocks.let_go(chunk.remade)
        chunk.remade.clear()
        self._forget(chunk)

    def _forget(self, chunk: NodeChunk) -> None:
        """What a chunk read may go once its rows cannot be asked for again."""
        if not chunk.made and chunk.state == "ended":
            self._blocks.let_go(chunk.holds)
            chunk.holds = frozenset()

    def _gone(self, number: int) -> None:
        self._lost.discard(number)
        chunk = self._maker.pop(number, None)
        if chunk is not None:
            del chunk.made[number]
            self._forget(chunk)

    def _moves(self, chunk: NodeChunk) -> str:
        """Find the rows of its lost blocks in the new ones; says which is missing or differs."""
        lost = [number for number in chunk.made if self._blocks.lost_with(number)]
        if not lost:
            return ""
        code, numbers, rows, digests = _remade(chunk)
        for number in lost:
            keys, digest = chunk.made[number]
            want = codes(keys.position, keys.sample)
            at = np.searchsorted(code, want)
            there = np.isin(want, code)
            same = there.copy()
            if len(digest) and len(digests):
                same[there] = digest[there] == digests[at[there]]
            if not all_true(same):
                what = "is another" if there.all() else "did not come"
                key = keys.take(~(same if there.all() else there)).rows()[0]
                return (
                    f"{self._place(chunk.node.name)}: its chunk was run again as its rows were"
                    f" lost, and row {key} {what}: its kernel is not deterministic. Fix: let it"
                    " depend on nothing but its rows and the draws of its session."
                )
            self._blocks.move(number, numbers[at], rows[at])
            self._lost.discard(number)
        return ""

    def unended(self, region: str) -> bool:
        """Whether a chunk of this region, of a node without lag, has never ended, so that metrics
        of it are still to come.
        """
        return bool(self._unended.get(region))

    def _never_ends(self, chunk: NodeChunk) -> None:
        """It has ended, or nobody waits for it."""
        self._unended.get(chunk.node.region, set()).discard(chunk)

    # --- losses -----------------------------------------------------------------------------------

    def lost(self, worker: str, owed: Iterable[Pending], blocks: frozenset[int]) -> list[NodeChunk]:
        """A Worker is gone, with what it owed and these blocks. Returns the given-up chunks."""
        self._suspects.discard(worker)
        self._lost |= blocks
        self._news = True
        found = [chunk for asked in owed for chunk in self.undone(asked)]
        short = self._parked.take_if(lambda c: not (c.again or blocks.isdisjoint(c.holds)))
        for chunk in short:
            self._end(chunk)
        return found + short

    def suspect(self, peer: str, reads: Iterable[int]) -> None:
        """Someone could not read these blocks: if `peer` has some, wait until its loss is told."""
        if self._blocks.some_at(reads, (peer,)):
            self._suspects.add(peer)

    def undone(self, asked: Pending) -> list[NodeChunk]:
        """What was asked came to nothing; returns its chunk if that is given up."""
        chunk = asked.chunk
        if chunk is None:
            return []
        self._blocks.let_go(chunk.remade)
        chunk.remade.clear()
        if chunk.again and asked.wanted:
            self._park(chunk)
            return []
        self._end(chunk)
        return [chunk] if asked.wanted else []

    def abandon(self, whose: Callable[[PlannedNode], bool]) -> None:
        """Give up the chunks of these nodes; the results of those under way are discarded."""
        for asked in self._outstanding.of(RunChunk):
            if asked.chunk is not None and whose(asked.chunk.node):
                asked.wanted = False
                self._never_ends(asked.chunk)
        for chunk in self._parked.take_if(lambda c: whose(c.node)):
            self._end(chunk)

    def next_step(self) -> None:
        """The Step is done: drop chunks that still run again for it, as the weights changed."""
        self.moved_on = False
        self.abandon(lambda node: node.name in self._again and node.region != "evaluation")

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines = [
            f"{peer}: is gone as others say; its end has not been told"
            for peer in sorted(self._suspects)
        ]
        for chunk in self._parked:
            lost = sorted({self._blocks.lost_with(n) for n in self._blocks.missing(chunk.holds)})
            replicas = f"one of {', '.join(chunk.node.workers)}"
            what = f"rows that {', '.join(lost)} had" if lost else replicas
            lines.append(f"{chunk.node.name}: a chunk of {len(chunk.keys)} rows waits for {what}")
        return lines + [
            f"{node}: chunks under way at {worker}: {count}"
            for (node, worker), count in self._outstanding.under_way.items()
        ]


def _remade(chunk: NodeChunk) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Code, block, row and digest (if there are any) of each row of a further run, by code."""
    blocks = [(number, *chunk.made[number]) for number in chunk.remade]
    none = np.zeros(0, dtype=np.int64)
    code = np.concatenate([none, *(codes(keys.position, keys.sample) for _, keys, _ in blocks)])
    numbers = np.concatenate([none, *(np.full(len(keys), number) for number, keys, _ in blocks)])
    rows = np.concatenate([none, *(np.arange(len(keys)) for _, keys, _ in blocks)])
    digests = np.concatenate([np.zeros(0, np.uint64), *(digest for _, _, digest in blocks)])
    order = np.argsort(code)
    digests = digests[order] if len(digests) else digests
    return code[order], numbers[order], rows[order].astype(np.int32), digests
