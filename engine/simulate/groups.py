"""Simulated Workers that act together: ranks of one node, and Workers on the same devices.

Owns: that no rank goes on in a collective before all have come to it; checking that a rank begins
only what it is prepared for, with every row in one share, whose ranks have the same rows, and that
of Workers that take turns one at most is awake and nobody is told anything in its sleep. Does not
own: when any of this happens (workers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dataflow.errors import RunError
from engine.coordinator.messages import Go, TrainStep
from engine.plan.plan import Plan

Versions = dict[str, np.ndarray]
"""For each producer, the version of each row."""
Work = tuple[str, str, int]
"""train, offer or save, of this node, with this number."""


class SimulatedRanks:
    """Who is prepared for what, and who has ended it."""

    def __init__(self, plan: Plan) -> None:
        self._ranks = {n.name: n.workers for n in plan.nodes}
        self._shares = {n.name: n.shares for n in plan.nodes}
        self._wanted: dict[tuple[str, str], int] = {}
        self._waiting: dict[tuple[str, str], TrainStep] = {}
        self._ended: dict[tuple[str, int], list[tuple[TrainStep, Versions]]] = {}
        self._meetings: dict[Work, list[dict[str, Callable[[], None]]]] = {}
        """Whom each collective still waits for: who has come, and how it goes on."""

    def told(self, message: TrainStep) -> None:
        """A rank is told of an assignment: what it waited with before is let go."""
        self._wanted[message.node, message.worker] = message.id
        self._waiting.pop((message.node, message.worker), None)

    def prepared(self, message: TrainStep) -> None:
        """It has fetched its rows; its Worker does other things until it may begin."""
        at = message.node, message.worker
        if self._wanted.get(at) == message.id:
            self._waiting[at] = message

    def begin(self, go: Go) -> TrainStep:
        """What a rank begins with now. Raises RunError where it is not prepared for this
        assignment.
        """
        found = self._waiting.pop((go.node, go.worker), None)
        if found is None or found.id != go.id:
            raise RunError(
                f"{go.node}: {go.worker} was told to begin {go.id} without being prepared for it"
            )
        return found

    def ended(self, message: TrainStep, versions: Versions) -> tuple[TrainStep, Versions] | None:
        """A rank has done its updates; after the last one, the assignment as if one had had all
        rows.

        Raises RunError where a row was with no share or with two, or the ranks of a share had
        others than the first.
        """
        parts = self._ended.setdefault((message.node, message.id), [])
        parts.append((message, versions))
        if len(parts) < len(self._ranks[message.node]):
            return None
        del self._ended[message.node, message.id]
        parts = self._once(message.node, parts)
        mine = [m.mine for m, _ in parts if m.mine is not None]
        rows = np.concatenate(mine)
        if not np.array_equal(np.sort(rows), np.arange(len(message.keys))):
            raise RunError(
                f"{message.node}: of {len(message.keys)} rows, the ranks had"
                f" {sorted(rows.tolist())}"
            )
        order = np.argsort(rows)
        whole = {name: np.concatenate([v[name] for _, v in parts])[order] for name in versions}
        return replace(message, worker=self._ranks[message.node][0], mine=None, inputs={}), whole

    def _once(
        self, node: str, parts: list[tuple[TrainStep, Versions]]
    ) -> list[tuple[TrainStep, Versions]]:
        """Those that fetched rows, one of each share."""
        shares = self._shares[node]
        if all(len(share) == 1 for share in shares):
            return parts
        by_rank = {m.worker: (m, versions) for m, versions in parts}
        for rank, giver in ((rank, share[0]) for share in shares for rank in share):
            told, first = by_rank[rank][0], by_rank[giver][0]
            assert told.mine is not None
            assert first.mine is not None
            if told.giver != first.worker or not np.array_equal(told.mine, first.mine):
                raise RunError(
                    f"{node}: {rank} had the rows {told.mine} of {told.giver}, not {first.worker}'s"
                    f" {first.mine}"
                )
        return [by_rank[share[0]] for share in shares]

    def meet(self, what: Work, worker: str, then: Callable[[], None]) -> None:
        """A rank has come to a collective: once all ranks of the node have, each goes on."""
        meetings = self._meetings.setdefault(what, [])
        there = next((each for each in meetings if worker not in each), None)
        if there is None:
            meetings.append(there := {})
        there[worker] = then
        if len(there) == len(self._ranks[what[1]]):
            meetings.remove(there)
            for each in there.values():
                each()

    def give_up(self, worker: str) -> None:
        """A Worker goes to sleep: what its ranks are prepared for is let go."""
        for node, rank in [*self._wanted]:
            if rank == worker:
                self._wanted[node, rank] = -1
                self._waiting.pop((node, rank), None)

    def forget(self, worker: str) -> None:
        """A Worker is gone."""
        for waiting in (self._wanted, self._waiting):
            for at in [at for at in waiting if at[1] == worker]:
                del waiting[at]
        for meetings in self._meetings.values():
            meetings[:] = [there for there in meetings if worker not in there]


class Devices:
    """Who of the Workers on the same devices is awake; those that take no turns always are."""

    def __init__(self, plan: Plan) -> None:
        self._mates = {name: group for group in plan.turns for name in group}
        self._awake: set[str] = set()

    def check(self, worker: str) -> None:
        """Raises RunError where a Worker is told something in its sleep."""
        if worker in self._mates and worker not in self._awake:
            raise RunError(f"worker {worker} was told something in its sleep")

    def wake(self, worker: str) -> None:
        """Raises RunError where another one of its group is awake."""
        others = self._awake.intersection(self._mates[worker])
        if others:
            raise RunError(
                f"worker {worker} was woken while {', '.join(sorted(others))} had its devices"
            )
        self._awake.add(worker)

    def sleep(self, worker: str) -> None:
        """It has given its devices back, or is gone."""
        self._awake.discard(worker)
