"""Rank groups: the nodes that several Workers run in lock-step, between the core and the world.

    told(instructions) -> instructions             the core's, as the ranks have to hear them
    heard(event, asked) -> events, instructions    the ranks', as the core has to hear them

Owns: which rank is given which rows, by whom, and when all may begin. Does not own: who is a rank
(the plan), what becomes of a Step whose rows are lost (training.py). The core knows nothing of
ranks: it tells the first Worker of a node, and hears one Stepped and one Offered from there.

An assignment of a node with ranks goes through these states:

    state       waits for                           left by
    preparing   every rank to fetch its rows        Prepared of the last: Go to all -> training
                                                    FetchFailed of one, which the core is told
                                                    once -> dropped
    training    every rank to do its updates        Stepped of the last: the core hears of one
                                                    Short of the last, likewise -> dropped
    dropped     every rank to answer all the same   Prepared or FetchFailed of the last

A part of a streamed Step goes through them, too, where ranks compute it together (Layout.in_step);
else each rank sums the gradients of its share by itself, and answers PartTrained.

The rows are split over the shares of the layout (`data`). The ranks of a share (`tensor`,
`context`) have the same rows: its first rank fetches them, and broadcasts them to the others after
Go.

No rank enters a collective before Go, so a row that cannot be fetched never leaves the others
hanging in one. A rank drops a prepared assignment when it is told the next one. A lost rank takes a
part of the train state with it: the core answers with Rollback. The core releases the rows of a
dropped assignment at once; here their blocks are kept until no rank may still fetch them.

A rank is told the keys of its share's rows alone: what it costs to tell all ranks does not grow
with rows x ranks, and neither does the work here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import TypeGuard

import numpy as np

from dataflow.batch import Keys
from dataflow.loss_terms import ROWS
from engine.coordinator.replica_ranks import ReplicaRanks
from engine.coordinator.tables import shares
from engine.coordinator.task_ledger import Outstanding, Pending
from engine.plan.plan import Plan, PlannedNode
from engine.protocol import messages as m
from engine.protocol.grouping import group_indices, values_at
from engine.protocol.refs import Gather, OwnRows, Ref

Assigned = m.TrainStep | m.TrainPart
"""What is told with rows, which are split over ranks."""
Together = m.TrainStep | m.TrainPart | m.FinishStep
"""What is told to all ranks of a train node."""


class RankGroups:
    """Every rank group of a plan. In a plan without one, everything passes as it is."""

    def __init__(self, plan: Plan, outstanding: Outstanding) -> None:
        self._outstanding = outstanding
        self._groups = {n.name: n for n in plan.nodes if n.work == "train" and n.ranks > 1}
        self.replicas = ReplicaRanks(plan, outstanding)
        self._keepers = {name: _find_keepers(plan, group) for name, group in self._groups.items()}
        self._weighed = _producers(n for n in plan.nodes if n.name in self._groups)
        self._lengths: dict[tuple[str, int], np.ndarray] = {}
        """Tokens of each row of the blocks that a rank group may be given."""
        self._fetching: dict[tuple[int, str], frozenset[tuple[str, int]]] = {}
        """(id, rank) -> the blocks (worker, number) that it may still fetch."""
        self._awaited: Counter[tuple[str, int]] = Counter()
        """For each of these blocks, how many fetches."""
        self._free: set[tuple[str, int]] = set()
        """Blocks that only such a fetch keeps."""
        self._shorts: dict[int, list[m.Short]] = {}
        """id -> what ranks said whose memory ran out, until all have."""
        self._lacking: dict[int, str] = {}
        """id -> a rank that was not prepared when this was last looked at."""

    # --- what the core says -----------------------------------------------------------------------

    def split_by_rank(self, instructions: Iterable[m.Instruction]) -> list[m.Instruction]:
        """Make what is told a rank group, or a replica of several Workers, into one message a rank;
        all else passes.
        """
        if not (self._groups or self.replicas.nodes):
            return list(instructions)
        out: list[m.Instruction] = []
        for instruction in instructions:
            out += self._split_instruction(instruction)
        return out

    def _split_instruction(self, instruction: m.Instruction) -> list[m.Instruction]:
        match instruction:
            case m.RunChunk() if instruction.node in self.replicas.nodes:
                return self.replicas.split(instruction)
            case m.TrainStep() | m.TrainPart() if instruction.node in self._groups:
                return self._split_assignment(instruction)
            case m.FinishStep() if instruction.node in self._groups:
                return self._tell_all(instruction, self._groups[instruction.node])
            case m.FetchAhead() if instruction.node in self._groups:
                return self._split_ahead(instruction)
            case m.Offer() if instruction.writer in self._groups:
                return self._split_offer(instruction)
            case m.Release():
                for block in instruction.blocks:
                    self._lengths.pop((instruction.worker, block), None)
                return self._release_unread(instruction)
        return [instruction]

    def _tell_all(self, task: m.FinishStep, group: PlannedNode) -> list[m.Instruction]:
        """What every rank is told alike."""
        self._outstanding.ask_all(task, group.workers)
        return [replace(task, worker=rank) for rank in group.workers]

    def _split_offer(self, offer: m.Offer) -> list[m.Instruction]:
        """Every rank takes part, and some keep the version for readers beside the first one."""
        ranks, keepers = self._groups[offer.writer].workers, self._keepers[offer.writer]
        self._outstanding.ask_all(offer, ranks)
        return [replace(offer, worker=rank, keeps=rank in keepers) for rank in ranks]

    def _split_assignment(self, message: Assigned) -> list[m.Instruction]:
        group = self._groups[message.node]
        self._outstanding.ask_all(message, group.workers)
        rows_by_share = self._shares(message, group)
        messages: list[Assigned] = []
        for share, ranks in enumerate(group.shares):
            rows = {name: rows_of[share] for name, rows_of in rows_by_share.items()}
            to_first = _share(message, ranks[0], group, rows)
            messages += _to_ranks_of_share(to_first, ranks)
        for each in messages:
            self._await(each)
        return [*messages]

    def _split_ahead(self, message: m.FetchAhead) -> list[m.Instruction]:
        """The first rank of each share fetches its rows, as it will be told to in the Step."""
        group = self._groups[message.node]
        other_sets = {name: keys for name, keys in message.keys.items() if name != ROWS}
        assignment = m.TrainStep(
            id=-1,
            node=message.node,
            worker=message.worker,
            step=message.step,
            keys=message.keys[ROWS],
            inputs=message.inputs,
            others={name: OwnRows(keys=keys) for name, keys in other_sets.items()},
        )
        rows_by_share = self._shares(assignment, group)
        messages: list[m.Instruction] = []
        for number, ranks in enumerate(group.shares):
            rows = {name: rows_of[number] for name, rows_of in rows_by_share.items()}
            share = _share(assignment, ranks[0], group, rows)
            keys = {name: rest.keys for name, rest in share.others.items()}
            keys[ROWS] = share.keys
            messages.append(replace(message, worker=ranks[0], keys=keys, inputs=share.inputs))
        return messages

    def _await(self, message: Assigned) -> None:
        """A rank may fetch these rows until it has answered."""
        refs: set[tuple[str, int]] = set()
        for gather in _gathers(message.inputs):
            refs.update(gather.refs)
        self._fetching[message.id, message.worker] = frozenset(refs)
        self._awaited.update(refs)

    def _release_unread(self, message: m.Release) -> list[m.Instruction]:
        """Release what no rank may still fetch; the rest once it has answered."""
        worker = message.worker
        released: list[int] = []
        for block in message.blocks:
            if (worker, block) in self._awaited:
                self._free.add((worker, block))
            elif (worker, block) not in self._free:
                released.append(block)
        return [replace(message, blocks=tuple(released))] if released else []

    def _shares(self, message: Assigned, group: PlannedNode) -> dict[str, list[np.ndarray]]:
        """For each row set, the rows of each share, ascending. Each set is split by itself."""
        keys_of = {ROWS: message.keys}
        keys_of |= {name: own_rows.keys for name, own_rows in message.others.items()}
        count = len(group.shares)
        rows_by_share: dict[str, list[np.ndarray]] = {}
        for name, inputs in group.row_sets.items():
            if name not in keys_of:
                continue
            gathers = {i.name: message.inputs[i.name] for i in inputs if i.name in message.inputs}
            share = self._split(keys_of[name], gathers, group)
            rows_by_share[name] = group_indices(share, count)
        return rows_by_share

    def _split(
        self, keys: Keys, inputs: Mapping[str, tuple[Gather, ...]], group: PlannedNode
    ) -> np.ndarray:
        """int64 [rows]: the share of each row."""
        tokens = np.zeros(len(keys), dtype=np.int64)
        for gather in _gathers(inputs):
            np.maximum(tokens, self._tokens(gather), out=tokens)
        return shares(keys.position, tokens, len(group.shares), group.loads)

    def _tokens(self, gather: Gather) -> np.ndarray:
        """int64 [rows]: tokens of each row that is gathered; 0 in a block that nobody weighed."""
        tokens = np.zeros(len(gather.block), dtype=np.int64)
        is_weighed = np.array([ref in self._lengths for ref in gather.refs], dtype=bool)
        lengths = [self._lengths.get(ref, tokens[:0]) for ref in gather.refs]
        weighed = is_weighed[gather.block]
        tokens[weighed] = values_at(lengths, gather.block[weighed], gather.row[weighed])
        return tokens

    # --- what the world says ----------------------------------------------------------------------

    def note_lengths(self, refs: Iterable[Ref]) -> None:
        """Note the lengths of rows that a checkpoint brought back."""
        for ref in refs if self._groups else ():
            self._lengths[ref.worker, ref.block] = ref.lengths

    def merge_answers(
        self, event: m.Event, asked: Pending | None
    ) -> tuple[list[m.Event], list[m.Instruction]]:
        """Merge what ranks say into what the core hears; also returns what the ranks are told.
        asked: what this answers.
        """
        match event:
            case m.Produced():  # most events
                if event.node in self._weighed:
                    self.note_lengths((event.ref,))
            case m.ChunkDone():
                pass
            case m.RankDone():
                return [], []
            case m.Prepared():
                released = self._end_fetch(event)
                return [], released + self._begin_if_prepared(asked)
            case m.Stepped() | m.PartTrained() if event.node in self._groups:
                released = self._end_fetch(event) if isinstance(event, m.PartTrained) else []
                return self._pass_last_step(event, asked), released
            case m.FetchFailed() | m.Short() if asked is not None and self._is_group(asked.task):
                return self._merge_failure(event, asked)
            case m.Offered() if asked is not None and event.worker != asked.task.worker:
                # All ranks took part, but not every one has a block.
                return ([event] if event.block >= 0 else []), []
            case m.WorkerLost():
                self.forget_worker(event.worker)
        return [event], []

    def _merge_failure(
        self, event: m.FetchFailed | m.Short, asked: Pending
    ) -> tuple[list[m.Event], list[m.Instruction]]:
        if isinstance(event, m.Short):
            return self._pass_last_short(event, asked), []
        return self._pass_first_failure(event, asked), self._end_fetch(event)

    def _pass_first_failure(self, event: m.FetchFailed, asked: Pending) -> list[m.Event]:
        """Pass on the first of the ranks that says that it cannot fetch its rows."""
        is_first = asked.wanted
        self._lacking.pop(event.id, None)
        self._outstanding.give_up(asked)
        return [event] if is_first else []

    def _pass_last_step(
        self, event: m.Stepped | m.PartTrained, asked: Pending | None
    ) -> list[m.Event]:
        """Pass on the last rank's Step, as if the first rank said it."""
        if asked is None or asked.parts or not asked.wanted:
            return []
        return [replace(event, worker=self._groups[event.node].workers[0])]

    def _pass_last_short(self, event: m.Short, asked: Pending) -> list[m.Event]:
        """Pass on what the rank said that had no memory, once all ranks have given up alike; at
        once where nothing is left of what they had.
        """
        if event.is_lost:
            return [event]
        shorts = self._shorts.setdefault(event.id, [])
        shorts.append(event)
        if asked.parts or not asked.wanted:
            return []
        del self._shorts[event.id]
        # The others were at nothing that had no room.
        worst = max(shorts, key=lambda each: each.need.tokens)
        is_lost = len({each.need.updates for each in shorts}) > 1
        return [replace(worst, is_lost=is_lost)]

    def forget_worker(self, worker: str) -> None:
        """Forget the blocks of a Worker that is gone."""
        self._lengths = {ref: tokens for ref, tokens in self._lengths.items() if ref[0] != worker}
        self._free = {ref for ref in self._free if ref[0] != worker}

    def _is_group(self, task: m.Task) -> TypeGuard[Together]:
        return isinstance(task, Together) and task.node in self._groups

    def _end_fetch(self, event: m.Prepared | m.FetchFailed | m.PartTrained) -> list[m.Instruction]:
        """Release the blocks that only this rank kept, as it has fetched or dropped its rows."""
        refs = self._fetching.pop((event.id, event.worker), frozenset())
        self._awaited.subtract(refs)
        unread = {ref for ref in refs if not self._awaited[ref]}
        for ref in unread:
            del self._awaited[ref]
        released = self._free & unread
        self._free -= released
        return [m.Release(worker=worker, blocks=(block,)) for worker, block in sorted(released)]

    def _begin_if_prepared(self, asked: Pending | None) -> list[m.Instruction]:
        """Let the ranks begin once all of them are prepared."""
        if asked is None or not asked.wanted or self._lacks_one(asked):
            return []
        task = asked.task
        assert isinstance(task, Together)
        del self._lacking[task.id]
        self._outstanding.begin(asked)
        return [m.Go(id=task.id, node=task.node, worker=rank) for rank in asked.parts]

    def _lacks_one(self, asked: Pending) -> bool:
        """Whether a rank is not prepared yet. All are looked at only when the one that was seen
        last has become so: ranks answer in about the order in which they are told.
        """
        parts = asked.parts
        late_rank = self._lacking.get(asked.task.id, "")
        if parts.get(late_rank, "prepared") == "prepared":
            late_ranks = (rank for rank in reversed(parts) if parts[rank] != "prepared")
            late_rank = next(late_ranks, "")
            self._lacking[asked.task.id] = late_rank
        return bool(late_rank)

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines = []
        for kind in (m.TrainStep, m.TrainPart, m.FinishStep):
            for asked in self._outstanding.of(kind):
                if self._is_group(asked.task):
                    lines.append(f"{asked.task.node}: {_what_ranks_lack(asked)}")
        return lines


def _what_ranks_lack(asked: Pending) -> str:
    late = sorted(rank for rank, part in asked.parts.items() if part != "prepared")
    have_begun = "begun" in asked.parts.values()
    lacking = "ended their updates" if have_begun else "fetched their rows"
    return f"ranks {', '.join(late)} have not {lacking} yet"


def _find_keepers(plan: Plan, group: PlannedNode) -> frozenset[str]:
    """The ranks that keep a version for readers beside the first one: the first of each other host,
    where each rank has all of the weights.
    """
    if group.layout.shard or group.layout.tensor > 1:
        return frozenset()
    firsts: dict[str, str] = {}
    for worker in group.workers:
        firsts.setdefault(plan.host_of(worker), worker)
    return frozenset(firsts.values()) - {group.workers[0]}


def _producers(nodes: Iterable[PlannedNode]) -> frozenset[str]:
    producers: set[str] = set()
    for node in nodes:
        for i in node.inputs:
            producers.update(fetch.producer for fetch in i.fetches)
    return frozenset(producers)


def _gathers(inputs: Mapping[str, tuple[Gather, ...]]) -> Iterator[Gather]:
    return chain.from_iterable(inputs.values())


def _share(
    message: Assigned, worker: str, group: PlannedNode, rows: Mapping[str, np.ndarray]
) -> Assigned:
    """What one rank is told: the keys and gathers of its own rows of each set, and where these are
    among how many.
    """
    row_set_of = {i.name: i.row_set for i in group.inputs}
    inputs: dict[str, tuple[Gather, ...]] = {}
    for name, gathers in message.inputs.items():
        rows_of_input = rows[row_set_of.get(name, ROWS)]
        inputs[name] = tuple(_part(gather, rows_of_input) for gather in gathers)
    node_rows = _own_rows(message.keys, rows[ROWS])
    return replace(
        message,
        worker=worker,
        keys=node_rows.keys,
        mine=node_rows.mine,
        total=node_rows.total,
        inputs=inputs,
        others={name: _own_rows(rest.keys, rows[name]) for name, rest in message.others.items()},
    )


def _own_rows(keys: Keys, rows: np.ndarray) -> OwnRows:
    """These rows of a set with all of these keys."""
    return OwnRows(keys=keys.take(rows), mine=rows, total=len(keys))


def _to_ranks_of_share(message: Assigned, ranks: tuple[str, ...]) -> list[Assigned]:
    """What the ranks of one share are told: the first fetches, and gives the others its rows.
    message: the first one's, as if it were alone.
    """
    if len(ranks) == 1:
        return [message]
    to_first = replace(message, giver=message.worker)
    no_gathers: dict[str, tuple[Gather, ...]] = dict.fromkeys(message.inputs, ())
    to_others = (replace(to_first, worker=rank, inputs=no_gathers) for rank in ranks[1:])
    return [to_first, *to_others]


def _part(gather: Gather, rows: np.ndarray) -> Gather:
    """Some rows of a gather, with the blocks that they lie in and no others."""
    used, block = np.unique(gather.block[rows], return_inverse=True)
    refs = tuple(gather.refs[number] for number in used.tolist())
    return replace(gather, refs=refs, block=block.astype(gather.block.dtype), row=gather.row[rows])
