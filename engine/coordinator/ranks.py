"""Rank groups: the nodes that several Workers run in lock-step, between the core and the world.

    told(instructions) -> instructions    what the core says to a node, as its ranks have to hear it
    heard(event) -> events, instructions  what ranks say, as the core has to hear it

Owns: which rank is given which rows, by whom, and when all may begin. Does not own: who is a rank
(the plan), what becomes of a Step whose rows are lost (core.py). The core knows nothing of ranks:
it tells the first Worker of a node, and hears one Stepped and one Offered from there.

An assignment of a node with ranks goes through these states:

    state       waits for                                    left by
    preparing   every rank to have fetched its rows          Prepared of the last one: Go to all -> training
                                                             FetchFailed of one -> dropped (the core is told once)
    training    every rank to have done its updates          Stepped of the last one: one Stepped to the core -> done
    dropped     the core: another assignment, or GoBack      TrainStep of a later sequence

The rows are split over the shares of the layout (`data`). The ranks of a share (`tensor`) have the
same rows: its first rank fetches them, and gives them to the others by a broadcast, which is a
collective like those of the kernel: it comes after Go. So each row is fetched once, and ranks that
are given theirs have nothing to fetch and are prepared at once.

No rank enters a collective before Go, so that a row that cannot be fetched never leaves the others
hanging in one. A rank that is prepared for a dropped assignment lets it go when it is told the next
one; what it still says of the former is of no interest. A rank that is lost takes a part of the
train state with it: the core answers with GoBack.

Of a dropped assignment the core knows that its rows are free. A rank that has not answered is still
going to fetch them: until it has, their blocks are not released.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.messages import (
    Event,
    FetchFailed,
    Go,
    Instruction,
    Offer,
    Offered,
    Prepared,
    Produced,
    Release,
    Stepped,
    TrainStep,
    WorkerLost,
)
from engine.coordinator.refs import Gather, Ref
from engine.coordinator.tables import shares
from engine.plan.plan import Plan, PlannedNode


@dataclass(slots=True)
class _Group:
    """The ranks of a node, and the assignment that they have. shares: those with the same rows."""

    ranks: tuple[str, ...]
    shares: tuple[tuple[str, ...], ...]
    id: int = -1
    state: Literal["done", "preparing", "training", "dropped"] = "done"
    left: set[str] = field(default_factory=set)
    """Ranks that have not said yet what the state waits for."""


class RankGroups:
    """Every rank group of a plan. In a plan without one, everything passes as it is."""

    def __init__(self, plan: Plan) -> None:
        grouped = [n for n in plan.nodes if n.work == "train" and n.ranks > 1]
        self._groups = {n.name: _Group(n.workers, n.shares) for n in grouped}
        self._first = {
            m.name: self._groups[m.writer].ranks[0] for m in plan.models if m.writer in self._groups
        }
        """For each Model that a rank group writes, the Worker whose pieces count."""
        self._weighed = _producers(n for n in plan.nodes if n.name in self._groups)
        self._lengths: dict[tuple[str, int], np.ndarray] = {}
        """Tokens of each row of the blocks that a rank group may be given."""
        self._fetching: dict[tuple[int, str], frozenset[tuple[str, int]]] = {}
        """(id, rank) -> the blocks, by (worker, number), that it has not said to have
        fetched.
        """
        self._assigned_to: dict[int, str] = {}
        self._free: set[tuple[str, int]] = set()
        """Blocks of which only that is awaited."""

    # --- what the core says -----------------------------------------------------------------------

    def told(self, instructions: Iterable[Instruction]) -> list[Instruction]:
        """The same, with every TrainStep and Offer to a rank group made into one a rank."""
        if not self._groups:
            return list(instructions)
        return [each for instruction in instructions for each in self._told(instruction)]

    def _told(self, instruction: Instruction) -> list[Instruction]:
        match instruction:
            case TrainStep() if instruction.node in self._groups:
                return self._assigned(instruction)
            case Offer() if instruction.writer in self._groups:
                ranks = self._groups[instruction.writer].ranks
                return [replace(instruction, worker=rank) for rank in ranks]
            case Release():
                for block in instruction.blocks:
                    self._lengths.pop((instruction.worker, block), None)
                return self._released(instruction)
        return [instruction]

    def _assigned(self, message: TrainStep) -> list[Instruction]:
        group = self._groups[message.node]
        self._assigned_to[message.id] = message.node
        group.id, group.state, group.left = message.id, "preparing", set(group.ranks)
        share_of = self._split(message.keys, message.inputs, len(group.shares))
        told: list[TrainStep] = []
        for share, ranks in enumerate(group.shares):
            own = _share(message, ranks[0], np.flatnonzero(share_of == share))
            told += [own] if len(ranks) == 1 else _given(own, ranks)
        for each in told:
            refs = (
                ref for gathers in each.inputs.values() for gather in gathers for ref in gather.refs
            )
            self._fetching[each.id, each.worker] = frozenset(refs)
        return [*told]

    def _released(self, message: Release) -> list[Instruction]:
        """What no rank is going to fetch any more goes now."""
        awaited = frozenset[tuple[str, int]]().union(*self._fetching.values())
        self._free |= awaited.intersection((message.worker, block) for block in message.blocks)
        now = tuple(block for block in message.blocks if (message.worker, block) not in self._free)
        return [replace(message, blocks=now)] if now else []

    def _split(
        self, keys: Keys, inputs: Mapping[str, tuple[Gather, ...]], count: int
    ) -> np.ndarray:
        """int64 [rows]: the share of each row."""
        tokens = np.zeros(len(keys), dtype=np.int64)
        for gather in (g for gathers in inputs.values() for g in gathers):
            np.maximum(tokens, self._tokens(gather), out=tokens)
        return shares(keys.position, tokens, count)

    def _tokens(self, gather: Gather) -> np.ndarray:
        """int64 [rows]: tokens of each row that is gathered."""
        found = np.zeros(len(gather.block), dtype=np.int64)
        for number, ref in enumerate(gather.refs):
            lengths = self._lengths.get(ref)
            if lengths is not None:
                mine = gather.block == number
                found[mine] = lengths[gather.row[mine]]
        return found

    # --- what the world says ----------------------------------------------------------------------

    def kept(self, refs: Iterable[Ref]) -> None:
        """Take note of the lengths of rows that a checkpoint brought back."""
        for ref in refs if self._groups else ():
            self._lengths[ref.worker, ref.block] = ref.lengths

    def heard(self, event: Event) -> tuple[list[Event], list[Instruction]]:
        """What the core is to hear of it, and what the ranks are to be told."""
        match event:
            case Produced() if event.node in self._weighed:
                self.kept((event.ref,))
            case Prepared() if event.node in self._groups:
                return [], [*self._answered(event), *self._prepared(event)]
            case Stepped() if event.node in self._groups:
                return self._stepped(event), []
            case FetchFailed() if event.id in self._assigned_to:
                return self._unfetched(event), self._answered(event)
            case Offered() if event.worker != self._first.get(event.model, event.worker):
                # All ranks took part; whoever kept a block all the same may let it go.
                return [], (
                    [Release(worker=event.worker, blocks=(event.block,))]
                    if event.block >= 0
                    else []
                )
            case WorkerLost():
                self._lengths = {
                    at: found for at, found in self._lengths.items() if at[0] != event.worker
                }
                self._free = {ref for ref in self._free if ref[0] != event.worker}
        return [event], []

    def _answered(self, event: Prepared | FetchFailed) -> list[Instruction]:
        """A rank has fetched its rows, or let them go: blocks that were to be free go with the last
        one's answer.
        """
        self._fetching.pop((event.id, event.worker), None)
        done = self._free.difference(*self._fetching.values())
        self._free -= done
        return [Release(worker=worker, blocks=(block,)) for worker, block in sorted(done)]

    def _prepared(self, event: Prepared) -> list[Instruction]:
        group = self._groups[event.node]
        if event.id != group.id or group.state != "preparing":
            return []
        group.left.discard(event.worker)
        if group.left:
            return []
        group.state, group.left = "training", set(group.ranks)
        return [Go(node=event.node, worker=rank, id=group.id) for rank in group.ranks]

    def _stepped(self, event: Stepped) -> list[Event]:
        group = self._groups[event.node]
        if group.state != "training":
            return []
        group.left.discard(event.worker)
        if group.left:
            return []
        group.state = "done"
        return [replace(event, worker=group.ranks[0])]

    def _unfetched(self, event: FetchFailed) -> list[Event]:
        group = self._groups[self._assigned_to[event.id]]
        if event.id != group.id or group.state != "preparing":
            return []
        group.state = "dropped"
        return [event]

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lacks = {
            "preparing": "have not fetched their rows yet",
            "training": "have not ended their updates yet",
        }
        return [
            f"{name}: ranks {', '.join(sorted(group.left))} {lacks[group.state]}"
            for name, group in self._groups.items()
            if group.state in lacks
        ]


def _producers(nodes: Iterable[PlannedNode]) -> frozenset[str]:
    return frozenset(fetch.producer for node in nodes for i in node.inputs for fetch in i.fetches)


def _share(message: TrainStep, worker: str, mine: np.ndarray) -> TrainStep:
    """What one rank is told: all keys, and the gathers of its own rows."""
    inputs = {
        name: tuple(_part(gather, mine) for gather in gathers)
        for name, gathers in message.inputs.items()
    }
    return replace(message, worker=worker, inputs=inputs, mine=mine)


def _given(message: TrainStep, ranks: tuple[str, ...]) -> list[TrainStep]:
    """What the ranks of one share are told: the first to fetch its rows, the others that it gives
    them.
    """
    message = replace(message, giver=message.worker)
    nothing: dict[str, tuple[Gather, ...]] = dict.fromkeys(message.inputs, ())
    return [message, *(replace(message, worker=rank, inputs=nothing) for rank in ranks[1:])]


def _part(gather: Gather, rows: np.ndarray) -> Gather:
    """Some rows of a gather, with the blocks that they lie in and no others."""
    used, block = np.unique(gather.block[rows], return_inverse=True)
    refs = tuple(gather.refs[number] for number in used.tolist())
    return replace(gather, refs=refs, block=block.astype(gather.block.dtype), row=gather.row[rows])
