"""Rank groups: the nodes that several Workers run in lock-step, between the core and the world.

    told(instructions) -> instructions             the core's, as the ranks have to hear them
    heard(event, asked) -> events, instructions    the ranks', as the core has to hear them

Owns: which rank is given which rows, by whom, and when all may begin. Does not own: who is a rank
(the plan), what becomes of a Step whose rows are lost (coordinator.py). The core knows nothing of
ranks: it tells the first Worker of a node, and hears one Stepped and one Offered from there.

An assignment of a node with ranks goes through these states:

    state       waits for                           left by
    preparing   every rank to fetch its rows        Prepared of the last: Go to all -> training
                                                    FetchFailed of one, which the core is told
                                                    once -> dropped
    training    every rank to do its updates        Stepped of the last: the core hears of one
    dropped     every rank to answer all the same   Prepared or FetchFailed of the last

The rows are split over the shares of the layout (`data`). The ranks of a share (`tensor`) have the
same rows: its first rank fetches them, and broadcasts them to the others after Go.

No rank enters a collective before Go, so a row that cannot be fetched never leaves the others
hanging in one. A rank drops a prepared assignment when it is told the next one. A lost rank takes a
part of the train state with it: the core answers with Rollback. The core releases the rows of a
dropped assignment at once; here their blocks are kept until no rank may still fetch them.

A rank is told the keys of its share's rows alone: what it costs to tell all ranks does not grow
with rows x ranks, and neither does the work here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeGuard

import numpy as np

from dataflow.batch import Keys
from dataflow.loss_terms import ROWS
from engine.coordinator.tables import shares
from engine.coordinator.task_ledger import Outstanding, Pending
from engine.plan.plan import Plan, PlannedNode
from engine.protocol import messages as m
from engine.protocol.grouping import grouped, values_at
from engine.protocol.refs import Gather, OwnRows, Ref


class RankGroups:
    """Every rank group of a plan. In a plan without one, everything passes as it is."""

    def __init__(self, plan: Plan, outstanding: Outstanding) -> None:
        self._outstanding = outstanding
        self._groups = {n.name: n for n in plan.nodes if n.work == "train" and n.ranks > 1}
        self._weighed = _producers(n for n in plan.nodes if n.name in self._groups)
        self._lengths: dict[tuple[str, int], np.ndarray] = {}
        """Tokens of each row of the blocks that a rank group may be given."""
        self._fetching: dict[tuple[int, str], frozenset[tuple[str, int]]] = {}
        """(id, rank) -> the blocks (worker, number) that it may still fetch."""
        self._awaited: Counter[tuple[str, int]] = Counter()
        """For each of these blocks, how many fetches."""
        self._free: set[tuple[str, int]] = set()
        """Blocks that only such a fetch keeps."""
        self._lacking: dict[int, str] = {}
        """id -> a rank that was not prepared when this was last looked at."""

    # --- what the core says -----------------------------------------------------------------------

    def told(self, instructions: Iterable[m.Instruction]) -> list[m.Instruction]:
        """The same, with every m.TrainStep and m.Offer to a rank group made into one a rank."""
        if not self._groups:
            return list(instructions)
        return [each for instruction in instructions for each in self._told(instruction)]

    def _told(self, instruction: m.Instruction) -> list[m.Instruction]:
        match instruction:
            case m.TrainStep() if instruction.node in self._groups:
                return self._assigned(instruction)
            case m.Offer() if instruction.writer in self._groups:
                ranks = self._groups[instruction.writer].workers
                self._outstanding.ask_all(instruction, ranks)
                return [replace(instruction, worker=rank) for rank in ranks]
            case m.Release():
                for block in instruction.blocks:
                    self._lengths.pop((instruction.worker, block), None)
                return self._released(instruction)
        return [instruction]

    def _assigned(self, message: m.TrainStep) -> list[m.Instruction]:
        group = self._groups[message.node]
        self._outstanding.ask_all(message, group.workers)
        of_share = self._shares(message, group)
        told: list[m.TrainStep] = []
        for share, ranks in enumerate(group.shares):
            rows = {name: every[share] for name, every in of_share.items()}
            own = _share(message, ranks[0], group, rows)
            told += [own] if len(ranks) == 1 else _given(own, ranks)
        for each in told:
            self._await(each)
        return [*told]

    def _await(self, message: m.TrainStep) -> None:
        """A rank may fetch these rows until it has answered."""
        every = (gather for gathers in message.inputs.values() for gather in gathers)
        refs = frozenset(ref for gather in every for ref in gather.refs)
        self._fetching[message.id, message.worker] = refs
        self._awaited.update(refs)

    def _released(self, message: m.Release) -> list[m.Instruction]:
        """Release what no rank may still fetch."""
        refs = ((message.worker, block) for block in message.blocks)
        self._free.update(ref for ref in refs if ref in self._awaited)
        now = tuple(block for block in message.blocks if (message.worker, block) not in self._free)
        return [replace(message, blocks=now)] if now else []

    def _shares(self, message: m.TrainStep, group: PlannedNode) -> dict[str, list[np.ndarray]]:
        """For each row set, the rows of each share, ascending. Each set is split by itself."""
        keys = {ROWS: message.keys} | {name: own.keys for name, own in message.others.items()}
        count, found = len(group.shares), dict[str, list[np.ndarray]]()
        for name, inputs in group.row_sets.items():
            if name in keys:
                there = (i.name for i in inputs if i.name in message.inputs)
                gathers = {i: message.inputs[i] for i in there}
                found[name] = grouped(self._split(keys[name], gathers, count), count)
        return found

    def _split(
        self, keys: Keys, inputs: Mapping[str, tuple[Gather, ...]], count: int
    ) -> np.ndarray:
        """int64 [rows]: the share of each row."""
        tokens = np.zeros(len(keys), dtype=np.int64)
        for gather in (g for gathers in inputs.values() for g in gathers):
            np.maximum(tokens, self._tokens(gather), out=tokens)
        return shares(keys.position, tokens, count)

    def _tokens(self, gather: Gather) -> np.ndarray:
        """int64 [rows]: tokens of each row that is gathered; 0 in a block that nobody weighed."""
        found = np.zeros(len(gather.block), dtype=np.int64)
        known = np.array([ref in self._lengths for ref in gather.refs], dtype=bool)
        blocks = [self._lengths.get(ref, found[:0]) for ref in gather.refs]
        there = known[gather.block]
        found[there] = values_at(blocks, gather.block[there], gather.row[there])
        return found

    # --- what the world says ----------------------------------------------------------------------

    def kept(self, refs: Iterable[Ref]) -> None:
        """Note the lengths of rows that a checkpoint brought back."""
        for ref in refs if self._groups else ():
            self._lengths[ref.worker, ref.block] = ref.lengths

    def heard(
        self, event: m.Event, asked: Pending | None
    ) -> tuple[list[m.Event], list[m.Instruction]]:
        """What the core is to hear, and what the ranks are to be told. asked: what this answers."""
        match event:
            case m.Produced() | m.ChunkDone():  # most events
                if isinstance(event, m.Produced) and event.node in self._weighed:
                    self.kept((event.ref,))
            case m.Prepared():
                return [], [*self._answered(event), *self._prepared(asked)]
            case m.Stepped() if event.node in self._groups:
                return self._stepped(event, asked), []
            case m.FetchFailed() if asked is not None and self._is_group(asked.task):
                return self._dropped(event, asked), self._answered(event)
            case m.Offered() if asked is not None and event.worker != asked.task.worker:
                # All ranks took part, but only the first one's block counts.
                spare: list[m.Instruction] = [m.Release(worker=event.worker, blocks=(event.block,))]
                return [], spare if event.block >= 0 else []
            case m.WorkerLost():
                self.lost(event.worker)
        return [event], []

    def _dropped(self, event: m.FetchFailed, asked: Pending) -> list[m.Event]:
        """A rank cannot fetch its rows: the core hears the first one that says so."""
        first = asked.wanted
        self._lacking.pop(event.id, None)
        self._outstanding.give_up(asked)
        return [event] if first else []

    def _stepped(self, event: m.Stepped, asked: Pending | None) -> list[m.Event]:
        """The core hears of the last one, as if the first rank said it."""
        ended = asked is not None and not asked.parts
        return [replace(event, worker=self._groups[event.node].workers[0])] if ended else []

    def lost(self, worker: str) -> None:
        """A Worker is gone, with its blocks."""
        self._lengths = {at: found for at, found in self._lengths.items() if at[0] != worker}
        self._free = {ref for ref in self._free if ref[0] != worker}

    def _is_group(self, task: m.Task) -> TypeGuard[m.TrainStep]:
        return isinstance(task, m.TrainStep) and task.node in self._groups

    def _answered(self, event: m.Prepared | m.FetchFailed) -> list[m.Instruction]:
        """A rank has fetched its rows, or dropped them: release the blocks that only it kept."""
        refs = self._fetching.pop((event.id, event.worker), frozenset())
        self._awaited.subtract(refs)
        gone = {ref for ref in refs if not self._awaited[ref]}
        for ref in gone:
            del self._awaited[ref]
        done = self._free & gone
        self._free -= done
        return [m.Release(worker=worker, blocks=(block,)) for worker, block in sorted(done)]

    def _prepared(self, asked: Pending | None) -> list[m.Instruction]:
        """Once all ranks are prepared, they begin."""
        if asked is None or not asked.wanted or self._lacks_one(asked):
            return []
        task = asked.task
        assert isinstance(task, m.TrainStep)
        del self._lacking[task.id]
        self._outstanding.begin(asked)
        return [m.Go(id=task.id, node=task.node, worker=rank) for rank in asked.parts]

    def _lacks_one(self, asked: Pending) -> bool:
        """Whether a rank is not prepared yet. All are looked at only when the one that was seen
        last has become so: ranks answer in about the order in which they are told.
        """
        parts, seen = asked.parts, self._lacking.get(asked.task.id, "")
        if parts.get(seen, "prepared") == "prepared":
            seen = next((rank for rank in reversed(parts) if parts[rank] != "prepared"), "")
            self._lacking[asked.task.id] = seen
        return bool(seen)

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines = []
        for asked in self._outstanding.of(m.TrainStep):
            if self._is_group(asked.task):
                begun = "begun" in asked.parts.values()
                lacks = "ended their updates" if begun else "fetched their rows"
                left = sorted(rank for rank, part in asked.parts.items() if part != "prepared")
                lines.append(f"{asked.task.node}: ranks {', '.join(left)} have not {lacks} yet")
        return lines


def _producers(nodes: Iterable[PlannedNode]) -> frozenset[str]:
    return frozenset(fetch.producer for node in nodes for i in node.inputs for fetch in i.fetches)


def _share(
    message: m.TrainStep, worker: str, group: PlannedNode, rows: Mapping[str, np.ndarray]
) -> m.TrainStep:
    """What one rank is told: the keys and gathers of its own rows of each set, and where these are
    among how many.
    """
    sets = {i.name: i.row_set for i in group.inputs}
    inputs = {
        name: tuple(_part(gather, rows[sets.get(name, ROWS)]) for gather in gathers)
        for name, gathers in message.inputs.items()
    }
    others = {name: _own(own.keys, rows[name]) for name, own in message.others.items()}
    own = _own(message.keys, rows[ROWS])
    return replace(
        message,
        worker=worker,
        keys=own.keys,
        mine=own.mine,
        total=own.total,
        inputs=inputs,
        others=others,
    )


def _own(keys: Keys, rows: np.ndarray) -> OwnRows:
    """These rows of a set with all of these keys."""
    return OwnRows(keys=keys.take(rows), mine=rows, total=len(keys))


def _given(message: m.TrainStep, ranks: tuple[str, ...]) -> list[m.TrainStep]:
    """What the ranks of one share are told: the first fetches, and gives the others its rows."""
    message = replace(message, giver=message.worker)
    nothing: dict[str, tuple[Gather, ...]] = dict.fromkeys(message.inputs, ())
    return [message, *(replace(message, worker=rank, inputs=nothing) for rank in ranks[1:])]


def _part(gather: Gather, rows: np.ndarray) -> Gather:
    """Some rows of a gather, with the blocks that they lie in and no others."""
    used, block = np.unique(gather.block[rows], return_inverse=True)
    refs = tuple(gather.refs[number] for number in used.tolist())
    return replace(gather, refs=refs, block=block.astype(gather.block.dtype), row=gather.row[rows])
