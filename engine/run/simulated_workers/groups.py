"""Simulated Workers that act together: ranks of one node, and Workers on the same devices.

Owns: ranks waiting for each other in a collective; checks that a rank begins only what it is
prepared for, that each row is in one share whose ranks have the same rows, that at most one Worker
of a device group is awake and that none is told anything while asleep. Does not own: when any of
this happens (workers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dataflow.batch import Keys
from dataflow.errors import RunError
from engine.plan.plan import Plan
from engine.protocol.messages import FinishStep, Go, OwnRows, RunChunk, TrainPart, TrainStep
from engine.run.simulated_workers.lagged_ranks import LaggedRanks

Versions = dict[str, np.ndarray]
"""Producer -> the version of each row."""
Work = tuple[str, str, int]
"""(train, offer, save, chunk or its end; node; number)."""


Assigned = TrainStep | TrainPart
Together = TrainStep | TrainPart | FinishStep


class SimulatedRanks:
    """Which ranks are prepared for which assignment, and which have ended it."""

    def __init__(self, plan: Plan) -> None:
        self._ranks = {n.name: n.workers for n in plan.nodes}
        self._shares = {n.name: n.shares for n in plan.nodes}
        self._wanted: dict[tuple[str, str], int] = {}
        self._waiting: dict[tuple[str, str], Together] = {}
        self._ended: dict[tuple[str, int, int], list[tuple[Assigned, Versions]]] = {}
        self._meetings: dict[Work, list[dict[str, Callable[[], None]]]] = {}
        """The ranks that have come to each collective, and how each goes on."""
        self.lagged = LaggedRanks(plan)
        self._nothing_given: set[int] = set()
        self._versions: dict[int, int] = {}
        """Chunk of a replica with several Workers -> the version of its weights."""

    def note_assignment(self, message: Together) -> None:
        """Note a rank's assignment, which replaces the one that it was prepared for."""
        self._wanted[message.node, message.worker] = message.id
        self._waiting.pop((message.node, message.worker), None)

    def note_prepared(self, message: Together) -> None:
        """Note that the rank has its rows; its Worker does other things until it may begin."""
        at = message.node, message.worker
        if self._wanted.get(at) == message.id:
            self._waiting[at] = message

    def begin(self, go: Go) -> Together:
        """The assignment that a rank begins. Raises RunError if it is not prepared for it."""
        prepared = self._waiting.pop((go.node, go.worker), None)
        if prepared is None or prepared.id != go.id:
            raise RunError(f"{go.node}: {go.worker} was told to begin {go.id} unprepared")
        return prepared

    def take_updates(
        self, message: Assigned, versions: Versions
    ) -> tuple[Assigned, Versions] | None:
        """Take a rank's updates. After the last, returns the assignment as if one rank had all
        rows. Raises RunError if a row was in no share or in two, or a share's ranks had different
        rows.
        """
        what = _what_ranks_share(message)
        parts = self._ended.setdefault(what, [])
        parts.append((message, versions))
        if len(parts) < len(self._ranks[message.node]):
            return None
        del self._ended[what]
        parts = self._once(message.node, parts)
        messages = [part for part, _ in parts]
        others: dict[str, OwnRows] = {}
        for name in message.others:
            shares = [part.others[name] for part in messages]
            others[name] = OwnRows(keys=_together(f"{message.node}.{name}", shares))
        whole = replace(
            message,
            worker=self._ranks[message.node][0],
            keys=_together(message.node, messages),
            others=others,
            mine=None,
            total=None,
            inputs={},
        )
        all_versions: Versions = {}
        for producer in versions:
            by_part = [part_versions[producer] for _, part_versions in parts]
            all_versions[producer] = np.concatenate(by_part)
        return whole, all_versions

    def _once(
        self, node: str, parts: list[tuple[Assigned, Versions]]
    ) -> list[tuple[Assigned, Versions]]:
        """One rank of each share. Raises RunError if another rank of it had different rows."""
        by_rank = {m.worker: (m, versions) for m, versions in parts}
        shares = self._shares[node]
        for share in (share for share in shares if len(share) > 1):
            for rank in share:
                _require_same_rows(by_rank[rank][0], by_rank[share[0]][0])
        return [by_rank[share[0]] for share in shares]

    def note_nothing_given(self, chunk: int) -> None:
        """Note that a replica's lead has no rows for the other ranks."""
        self._nothing_given.add(chunk)

    def is_nothing_given(self, chunk: int) -> bool:
        """Whether the other ranks of a replica get no rows of this chunk."""
        return chunk in self._nothing_given

    def require_one_version(self, chunk: RunChunk, version: int) -> None:
        """Raises RunError if the ranks of a replica have weights of several versions."""
        first = self._versions.setdefault(chunk.id, version)
        if version != first:
            problem = f"{chunk.worker} has version {version}, another rank {first}"
            raise RunError(f"{chunk.node}: chunk {chunk.id}: {problem}")

    def meet(
        self, what: Work, worker: str, then: Callable[[], None], count: int | None = None
    ) -> None:
        """A rank has come to a collective: once so many, or all of the node, have, each goes on."""
        meetings = self._meetings.setdefault(what, [])
        arrived = next((ranks for ranks in meetings if worker not in ranks), None)
        if arrived is None:
            meetings.append(arrived := {})
        arrived[worker] = then
        if len(arrived) == (count or len(self._ranks[what[1]])):
            meetings.remove(arrived)
            for go_on in arrived.values():
                go_on()

    def give_up(self, worker: str) -> None:
        """A Worker goes to sleep: its ranks are no longer prepared for anything."""
        for waiting in (self._wanted, self._waiting):
            for at in [at for at in waiting if at[1] == worker]:
                del waiting[at]

    def forget(self, worker: str) -> None:
        """A Worker is gone."""
        self.give_up(worker)
        self.lagged.forget(worker)
        for meetings in self._meetings.values():
            meetings[:] = [arrived for arrived in meetings if worker not in arrived]


class Devices:
    """Which Workers that take turns on devices are awake; all others always are."""

    def __init__(self, plan: Plan) -> None:
        self._mates: dict[str, tuple[str, ...]] = {}
        for group in plan.turns:
            self._mates |= dict.fromkeys(group, group)
        self._awake: set[str] = set()

    def check(self, worker: str) -> None:
        """Raises RunError if the Worker is asleep."""
        if worker in self._mates and worker not in self._awake:
            raise RunError(f"worker {worker} was told something while asleep")

    def wake(self, worker: str) -> None:
        """Raises RunError if another Worker of its group is awake."""
        if others := ", ".join(sorted(self._awake.intersection(self._mates[worker]))):
            raise RunError(f"worker {worker} was woken while {others} had its devices")
        self._awake.add(worker)

    def sleep(self, worker: str) -> None:
        """It has given its devices back, or has died."""
        self._awake.discard(worker)


def _together(what: str, shares: Sequence[Assigned | OwnRows]) -> Keys:
    """The keys of a row set, in its order. Raises RunError unless each of its rows is one of the
    shares'.
    """
    counts = {share.total for share in shares}
    mine = np.concatenate([share.mine for share in shares if share.mine is not None])
    rows, order = np.sort(mine), np.argsort(mine)
    if counts != {len(rows)} or not np.array_equal(rows, np.arange(len(rows))):
        raise RunError(f"{what}: of {counts} rows, the ranks had {rows.tolist()}")
    return Keys.concat([share.keys for share in shares]).take(order)


def _require_same_rows(rank: Assigned, first: Assigned) -> None:
    assert rank.mine is not None
    assert first.mine is not None
    same = np.array_equal(rank.mine, first.mine) and rank.keys.rows() == first.keys.rows()
    if rank.giver != first.worker or not same:
        had = f"{rank.worker} had the rows {rank.mine} of {rank.giver}"
        raise RunError(f"{rank.node}: {had}, not {first.worker}'s {first.mine}")


def _what_ranks_share(message: Assigned) -> tuple[str, int, int]:
    """What all ranks do together: a part may be told again, by another number."""
    if isinstance(message, TrainPart):
        return message.node, message.step, message.part
    return message.node, message.step, -message.id - 1
