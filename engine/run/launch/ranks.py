"""Rank groups, and the file in which the Workers of a group or a pair meet.

Owns: these files, which have no name and are visible to their Workers only, and which group is on
several hosts. Does not own: where such a group meets (engine/run/worker_process), their use
(engine/channels/tensors/world.py), the order of what ranks do (engine/coordinator/ranks.py).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

from dataflow.errors import PlanError
from engine.channels.tensors.world import meeting_place
from engine.plan.plan import Plan
from engine.run.control.control import Seat

Group = tuple[str, ...]
"""The Workers of one replica, by rank."""


def groups_by_worker(plan: Plan) -> dict[str, Group]:
    """The rank group of each Worker that has one, the largest. Raises PlanError for one with two
    groups of which none is a part of the other.
    """
    groups: dict[str, Group] = {}
    for node in sorted(plan.nodes, key=lambda n: -n.ranks):
        for ranks in node.rank_groups:
            group = tuple(rank.worker for rank in ranks)
            if len(group) > 1:
                _add_group(groups, group, node.name)
    return groups


def _add_group(groups: dict[str, Group], group: Group, node: str) -> None:
    """Add a node's group by each of its Workers. Raises PlanError for one with another group."""
    for worker in group:
        if not set(group) <= set(other := groups.setdefault(worker, group)):
            both = f"{', '.join(group)} and of {', '.join(other)}"
            fix = "Fix: pin nodes with other ranks to other workers."
            raise PlanError(f"{node}: worker {worker} is a rank of {both}. {fix}")


def find_spanning(groups: Mapping[str, Group], here: Collection[str]) -> dict[str, Group]:
    """The groups of the Workers that are here, of which others are on other hosts."""
    spanning: dict[str, Group] = {}
    for worker, group in groups.items():
        if worker in here and not set(group) <= set(here):
            spanning[worker] = group
    return spanning


def far_seat(worker: str, group: Group) -> Seat:
    """A Worker's place in a group on several hosts."""
    return Seat(rank=group.index(worker), world=len(group), names=group)


class Meeting:
    """Where the ranks of one group meet once."""

    def __init__(self, group: Group) -> None:
        self._group = group
        # A file without a name: nobody else can find it, and it leaves nothing behind (0008).
        self._file = meeting_place()

    def seat(self, worker: str) -> Seat:
        """This Worker's place."""
        return Seat(rank=self._group.index(worker), world=len(self._group))

    def descriptor(self) -> int:
        """A new descriptor of the file; the receiver closes it."""
        return os.dup(self._file)

    def close(self) -> None:
        """Close this process's descriptor; the file lives as long as one of the ranks has it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_meetings(members: Sequence[str], groups: Mapping[str, Group]) -> dict[str, Meeting]:
    """By Worker, a new meeting for each group. Raises PlanError for a group that is not whole."""
    by_worker: dict[str, Meeting] = {}
    for worker in members:
        group = groups.get(worker)
        if group is None or worker in by_worker:
            continue
        if missing := ", ".join(name for name in group if name not in members):
            problem = f"ranks begin together, and {missing} would not"
            raise PlanError(f"{worker}: {problem}. Fix: go back.")
        by_worker |= dict.fromkeys(group, Meeting(group))
    return by_worker
