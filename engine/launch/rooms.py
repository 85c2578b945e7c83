"""Where the hosts of a plan are in a Ray cluster: what each needs, and the rooms that it has.

Owns: bundles of hosts, every room that was asked for, where a lost host begins again. Does not own:
a room (ray.py), what runs there (hosts.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from engine.launch.bundle import Bundle
from engine.launch.ray import ClusterRoom, avoid
from engine.plan.plan import Plan


class HostRooms:
    """The rooms of one attempt at a run. wait: seconds for room for what the run waits for."""

    def __init__(self, plan: Plan, wait: float) -> None:
        self._plan = plan
        self._wait = wait
        self._rooms: list[ClusterRoom] = []
        self._still_there: dict[str, ClusterRoom] = {}
        """Of lost hosts whose process alone ended, or whose bundle Ray places again."""

    def workers_on(self, host: str) -> tuple[str, ...]:
        """The Workers that have a place on a host."""
        return tuple(w for w, name in self._plan.hosts.items() if name == host)

    def first(self, hosts: Iterable[str]) -> ClusterRoom:
        """The room of all hosts with which the run begins, on the nodes of the plan."""
        return self._asked([self._bundle(name) for name in hosts], self._wait)

    def again(self, host: str) -> ClusterRoom:
        """Where a lost host begins again, or a spare Worker joins, however long that takes."""
        if (there := self._still_there.pop(host, None)) is not None:
            return there
        joins = host in self._plan.spare
        return self._asked([self._bundle(host, again=True)], math.inf if joins else self._wait)

    def lost(self, host: str, room: ClusterRoom, *, ended: bool) -> None:
        """A host is lost. ended: its process ended, its node is still there."""
        assert self._plan.cluster is not None
        if not ended:
            avoid(room.nodes.get(host) or self._plan.cluster.host(host).node)
        if host in self._plan.spare:
            self.give_back(room)
        elif ended:
            self._still_there[host] = room
        elif room.moves(host):
            room.wait_again()
            self._still_there[host] = room

    def give_back(self, room: ClusterRoom) -> None:
        """Nothing runs there any more."""
        self._rooms.remove(room)
        room.close()

    def close(self) -> None:
        """Give all back, which ends what is still there."""
        while self._rooms:
            self._rooms.pop().close()

    def _asked(self, bundles: list[Bundle], wait: float) -> ClusterRoom:
        self._rooms.append(ClusterRoom(bundles, wait))
        return self._rooms[-1]

    def _bundle(self, name: str, *, again: bool = False) -> Bundle:
        """What a host's Workers need. again: on any node."""
        plan = self._plan
        assert plan.cluster is not None
        host = plan.cluster.host(name)
        layouts = {w: [n.layout for n in plan.nodes_on(w)] for w in self.workers_on(name)}
        wide = (max(each.threads * each.inner for each in of) for of in layouts.values())
        gpus = {gpu for worker in layouts for gpu in plan.devices.get(worker, ())}
        return Bundle(
            host=name,
            cores=max(1, min(host.cores, sum(wide))),
            gpus=len(gpus),
            node="" if again else host.node,
            label=host.label,
        )
