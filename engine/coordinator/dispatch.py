"""Chunks: who runs which, what they read, and which have to be run once more.

    a chunk is    waits for                                         left by
    parked        what it reads to be there, a replica that can     RunChunk -> told
    told          its worker                                        ChunkDone -> ended
                                                                    WorkerLost, Unfetched -> parked or given up
    ended         nothing                                           a reader of rows that were lost -> parked

Owns: the choice of a replica; keeping what a chunk reads until it has ended; and the lineage, by
which rows that died with a Worker are made again. Does not own: which rows make a chunk
(lane.py, step.py), nor what becomes of its output (core.py), nor who is alive (recovery.py).

A chunk is run again whole, with the same keys, where that gives the same rows: above the cut of a
synchronous source, below the cut, and in an evaluation; and, if it reads a trained Model, only
until the Step begins to train. Its inputs are held for that until its rows are wanted no longer,
and it is run again when a reader asks for rows that were lost, not before. Elsewhere a chunk that
was lost is given up, and its lane decides what to do instead.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.blocks import Blocks, Readings
from engine.coordinator.messages import RunChunk
from engine.coordinator.prompt_table import Ready
from engine.coordinator.refs import Ref
from engine.coordinator.tables import codes
from engine.plan.plan import Plan, PlannedNode


@dataclass(slots=True, eq=False)
class Chunk:
    """A chunk and how far it has come. again: whether it may be run again. closed: it has ended
    once.
    """

    node: PlannedNode
    keys: Keys
    step: int
    inputs: Readings
    holds: frozenset[int]
    again: bool
    wanted: bool = True
    """Whether its rows are of use when they come."""
    closed: bool = False
    worker: str = ""
    """Who has it; nobody while it is parked, or has ended."""
    parked: bool = True
    runs: int = 0
    reads: frozenset[int] = frozenset()
    """The blocks that it was told to read."""
    made: dict[int, tuple[Keys, np.ndarray]] = field(default_factory=dict)
    """Keys and digests of each block of its output that is still needed."""
    remade: list[int] = field(default_factory=list)
    """Blocks of a further run, kept until it has ended."""


class Dispatch:
    """Every chunk that was assigned and is not forgotten."""

    def __init__(self, plan: Plan, blocks: Blocks, ids: Iterator[int]) -> None:
        self._place = plan.place
        self._blocks = blocks
        self._ids = ids
        blocks.on_gone = self._gone
        many = len(plan.workers) > 1
        self._again = {n.name for n in plan.nodes if many and not n.lag}
        self._readers = {n.name for n in plan.nodes if any(use.trained for use in n.models)}
        self._rows_at = dict.fromkeys(plan.workers, 0)
        """Rows under way at each worker."""
        self._parked: list[Chunk] = []
        self._told: dict[int, Chunk] = {}
        self._maker: dict[int, Chunk] = {}
        """Block -> the chunk that it is of, if that may be run again."""
        self._suspects: set[str] = set()
        """Workers of which somebody said that they are gone, before their loss was known here."""
        self.moved_on = False
        """Whether the weights are no longer those that the Step's rows were made with."""
        self.beyond: int | None = None
        """A block that is asked for and cannot be made again."""

    # --- telling ----------------------------------------------------------------------------------

    def add(self, ready: Ready, step: int) -> None:
        """Take a chunk up."""
        self._blocks.hold(ready.holds)
        chunk = Chunk(
            ready.node, ready.keys, step, ready.inputs, ready.holds, ready.node.name in self._again
        )
        self._parked.append(chunk)

    def tell(self, able: Callable[[PlannedNode, str], bool]) -> list[RunChunk]:
        """What can be told now. able: whether a worker can run chunks of a node."""
        found: list[RunChunk] = []
        if not self._parked:
            return found
        left: list[Chunk] = []
        at = 0
        while at < len(self._parked):  # it grows by what has to be made again
            chunk = self._parked[at]
            at += 1
            workers = (
                [w for w in chunk.node.workers if able(chunk.node, w)]
                if self.there(chunk.holds)
                else []
            )
            if workers:
                found.append(self._tell(chunk, min(workers, key=self._rows_at.__getitem__)))
            else:
                left.append(chunk)
        self._parked = left
        return found

    def _tell(self, chunk: Chunk, worker: str) -> RunChunk:
        """Give a chunk to a replica."""
        number = next(self._ids)
        self._rows_at[worker] += len(chunk.keys)
        self._told[number] = chunk
        chunk.worker, chunk.parked = worker, False
        chunk.runs += 1
        chunk.reads = self._blocks.places(chunk.holds)
        return RunChunk(
            id=number,
            node=chunk.node.name,
            worker=worker,
            step=chunk.step,
            keys=chunk.keys,
            inputs=self._blocks.gathers(chunk.inputs),
            again=chunk.closed,
        )

    def there(self, numbers: Iterable[int]) -> bool:
        """Whether these blocks can be read now; sees to it that what is missing is made again."""
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
        elif not chunk.worker and not chunk.parked:
            self._park(chunk)

    def _park(self, chunk: Chunk) -> None:
        chunk.worker, chunk.parked = "", True
        self._parked.append(chunk)

    # --- what comes of it -------------------------------------------------------------------------

    def find(self, chunk: int) -> Chunk | None:
        """The chunk that was told under this id and has not ended; None where its rows are of no
        use.
        """
        found = self._told.get(chunk)
        return found if found is not None and found.wanted else None

    def worker_of(self, chunk: int) -> str:
        """Who was told this chunk and has not ended it."""
        return self._told[chunk].worker if chunk in self._told else ""

    def fresh(self, chunk: Chunk, keys: Keys) -> np.ndarray | None:
        """Boolean [rows]: which of the rows come for the first time; None where all do."""
        if chunk.runs == 1 or not chunk.made:
            return None
        came = np.concatenate([codes(k.position, k.sample) for k, _ in chunk.made.values()])
        return ~np.isin(codes(keys.position, keys.sample), came)

    def made(self, chunk: Chunk, number: int, ref: Ref) -> None:
        """Rows of a chunk have come, as this block."""
        if not chunk.again:
            return
        self._maker[number] = chunk
        chunk.made[number] = (ref.keys, ref.digest)
        if chunk.runs > 1:
            self._blocks.hold((number,))
            chunk.remade.append(number)

    def done(self, chunk: int) -> tuple[Chunk | None, str]:
        """A chunk has ended: what it read may go. None where it had ended before, or is of no use.

        The text says what is wrong where its rows are others than those of the first time.
        """
        found = self._told.pop(chunk, None)
        if found is None:
            return None, ""
        self._rows_at[found.worker] -= len(found.keys)
        found.worker = ""
        wrong = self._moves(found) if found.wanted and found.runs > 1 else ""
        self._end(found)
        return (found if found.wanted else None), wrong

    def _end(self, chunk: Chunk) -> None:
        self._blocks.let_go(chunk.remade)
        chunk.remade.clear()
        self._forget(chunk)

    def _forget(self, chunk: Chunk) -> None:
        """What a chunk read may go once its rows cannot be asked for again."""
        if not chunk.made and not chunk.worker and not chunk.parked:
            self._blocks.let_go(chunk.holds)
            chunk.holds = frozenset()

    def _gone(self, number: int) -> None:
        chunk = self._maker.pop(number, None)
        if chunk is not None:
            del chunk.made[number]
            self._forget(chunk)

    def _moves(self, chunk: Chunk) -> str:
        """Where the rows of its lost blocks are now; says which row is missing, or not what it was."""
        lost = [number for number in chunk.made if self._blocks.lost_with(number)]
        if not lost:
            return ""
        new = [(number, *chunk.made[number]) for number in chunk.remade]
        code = np.concatenate(
            [codes(k.position, k.sample) for _, k, _ in new] or [np.zeros(0, dtype=np.int64)]
        )
        numbers = np.repeat(
            np.array([n for n, _, _ in new], dtype=np.int64), [len(k) for _, k, _ in new]
        )
        rows = np.concatenate([np.arange(len(k), dtype=np.int32) for _, k, _ in new] or [code])
        digests = np.concatenate([d for _, _, d in new] or [code])
        order = np.argsort(code)
        for number in lost:
            keys, digest = chunk.made[number]
            want = codes(keys.position, keys.sample)
            at = np.searchsorted(code[order], want)
            there = np.isin(want, code)
            same = there.copy()
            if len(digest) and len(digests):
                same[there] = digest[there] == digests[order[at[there]]]
            if not same.all():
                what = "did not come" if not there.all() else "is another"
                key = keys.take(~(there if not there.all() else same)).rows()[0]
                return (
                    f"{self._place(chunk.node.name)}: its chunk was run again as its rows were"
                    f" lost, and row {key} {what}: its kernel is not deterministic. Fix: let it"
                    " depend on nothing but its rows and the draws of its session."
                )
            self._blocks.move(number, numbers[order[at]], rows[order[at]])
        return ""

    def unmeasured(self, nodes: Set[str]) -> bool:
        """Whether a chunk of these nodes has not ended once: what was measured of it is still to
        come, also where all of its rows have come, then its Worker was lost, and it is run again.
        """
        if not nodes:
            return False
        chunks = itertools.chain(self._told.values(), self._parked)
        return any(
            chunk.wanted and not chunk.closed and chunk.node.name in nodes for chunk in chunks
        )

    # --- losses -----------------------------------------------------------------------------------

    def lost(self, worker: str, blocks: frozenset[int]) -> list[Chunk]:
        """A worker is gone, with these blocks. Returns the chunks that are given up: their rows
        have to be assigned anew by those whose they are.
        """
        self._suspects.discard(worker)
        gone = [number for number, chunk in self._told.items() if chunk.worker == worker]
        found = [chunk for number in gone for chunk in self._untold(number)]
        short = [c for c in self._parked if not c.again and not blocks.isdisjoint(c.holds)]
        for chunk in short:
            self._parked.remove(chunk)
            chunk.parked = False
            self._end(chunk)
        return found + short

    def unfetched(self, chunk: int, peer: str) -> list[Chunk]:
        """A chunk was not begun, as `peer` was gone; returns it where it is given up."""
        if chunk in self._told:
            self.suspect(peer, self._told[chunk].reads)
        return self._untold(chunk)

    def suspect(self, peer: str, reads: Iterable[int]) -> None:
        """Somebody could not read these blocks, as far as they are there and with `peer`: none are
        read until its loss is known here too.
        """
        if self._blocks.some_at(reads, (peer,)):
            self._suspects.add(peer)

    def _untold(self, number: int) -> list[Chunk]:
        chunk = self._told.pop(number, None)
        if chunk is None:
            return []
        self._rows_at[chunk.worker] -= len(chunk.keys)
        chunk.worker = ""
        self._blocks.let_go(chunk.remade)
        chunk.remade.clear()
        if chunk.again and chunk.wanted:
            self._park(chunk)
            return []
        self._end(chunk)
        return [chunk] if chunk.wanted else []

    def abandon(self, whose: Callable[[PlannedNode], bool]) -> None:
        """The chunks of these nodes are wanted no longer; those under way come to nothing."""
        for chunk in self._told.values():
            chunk.wanted = chunk.wanted and not whose(chunk.node)
        for chunk in [c for c in self._parked if whose(c.node)]:
            self._parked.remove(chunk)
            chunk.parked = False
            self._end(chunk)

    def next_step(self) -> None:
        """The Step is done: nobody asks any more for the rows of a chunk that is still run again
        for it. From now on it would have other weights, and give other rows.
        """
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
            what = (
                f"rows that {', '.join(lost)} had"
                if lost
                else f"one of {', '.join(chunk.node.workers)}"
            )
            lines.append(f"{chunk.node.name}: a chunk of {len(chunk.keys)} rows waits for {what}")
        told = Counter((chunk.node.name, chunk.worker) for chunk in self._told.values())
        return lines + [
            f"{node}: chunks under way at {w}: {count}" for (node, w), count in told.items()
        ]
