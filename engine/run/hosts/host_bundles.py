"""Where the hosts of a plan are in a Ray cluster: what each needs, and the bundle that it has.

    waits for                                                 unblocked by
    room, or a vacant bundle in its place (`HostPlace.dial`)  Ray, the clock, the stop of a link

Owns: bundles of hosts, every room that was asked for, who is in which bundle, where a lost host
begins again. Does not own: a room (ray.py), what runs there (hosts.py).

A room is given back as a whole, so not while any host is in it. What a lost host had in a room of
several is vacant: Ray gives it to nobody else. So whoever looks for room has it as soon as its node
answers and the process that was there has ended. Else the run would wait for what it holds itself.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from engine.plan.plan import Plan
from engine.run.hosts.bundle import Bundle, BundleState
from engine.run.hosts.link import Calls, Dial
from engine.run.hosts.ray import ClusterReservation, avoid

_POLL = 0.25
"""Seconds between two looks at vacant bundles."""
_PATIENCE = {
    BundleState.FREE: 0.0,
    BundleState.BUSY: 15.0,  # Ray kills a process that does not end by itself after 5 s
    BundleState.SILENT: 10.0,  # a node that is there begins a process to answer
    BundleState.GONE: 0.0,
}
"""Seconds for which a vacant bundle in this state is waited for although there is room elsewhere:
that would leave it to nobody until the run ends.
"""


@dataclass(frozen=True, slots=True, eq=False)
class _ReservedBundle:
    """One bundle of a room."""

    room: ClusterReservation
    bundle: Bundle

    def state(self) -> BundleState:
        """Not FREE while somebody waits for its room."""
        return self.room.state(self.bundle.host) if self.room.is_settled else BundleState.GONE


class HostPlace:
    """Where one host of the run is, or will be once it is dialled. takes_vacant: whether a vacant
    bundle does as well, if it is there before its room.
    """

    def __init__(
        self,
        rooms: HostReservations,
        needs: Bundle,
        room: ClusterReservation,
        *,
        takes_vacant: bool,
    ) -> None:
        self.needs = needs
        self.at = _ReservedBundle(room, needs)
        self.takes_vacant = takes_vacant
        self._rooms = rooms

    @property
    def host(self) -> str:
        """The host of the plan."""
        return self.needs.host

    @property
    def node(self) -> str:
        """The node on which its process has begun; empty before."""
        return self.at.room.nodes.get(self.at.bundle.host, "")

    def dial(self, stop: threading.Event) -> Calls | None:
        """See Dial."""
        if self.takes_vacant:
            self._rooms.find_bundle(self, stop)
        dial: Dial = self.at.room.dial(self.at.bundle.host, self.host)
        return dial(stop)


class HostReservations:
    """The rooms of one attempt at a run. wait: seconds for room for what the run waits for."""

    def __init__(self, plan: Plan, wait: float) -> None:
        self._plan = plan
        self._wait = wait
        self._still_there: dict[str, HostPlace] = {}
        """Of lost hosts whose process alone ended, or whose bundle Ray places again."""
        self._lock = threading.Lock()
        """Guards what follows: each host is dialled in a thread of its own."""
        self._taken: dict[ClusterReservation, set[_ReservedBundle]] = {}
        """Of each room, the bundles in which a host is, or that one waits for."""
        self._vacant: list[_ReservedBundle] = []
        """The other bundles of these rooms."""

    def workers_on(self, host: str) -> tuple[str, ...]:
        """The Workers that have a place on a host."""
        return tuple(w for w, name in self._plan.hosts.items() if name == host)

    def first(self, hosts: Iterable[str]) -> dict[str, HostPlace]:
        """Those of all hosts with which the run begins, in one room on the nodes of the plan."""
        bundles = {name: self._bundle(name) for name in hosts}
        return self._request_room(bundles, self._wait, takes_vacant=False)

    def again(self, host: str) -> HostPlace:
        """Where a lost host begins again, or a spare Worker joins, however long that takes."""
        if (place := self._still_there.pop(host, None)) is not None:
            return place
        joins = host in self._plan.spare
        wait = math.inf if joins else self._wait
        bundle = self._bundle(host, again=True)
        return self._request_room({host: bundle}, wait, takes_vacant=True)[host]

    def note_lost_host(self, place: HostPlace, *, ended: bool) -> None:
        """Note that a host is lost. ended: its process ended, its node is still there."""
        assert self._plan.cluster is not None
        room, host = place.at.room, place.host
        if not ended:
            avoid(place.node or self._plan.cluster.host(host).node)
        if host in self._plan.spare:
            self.give_back(place)
        elif ended:
            place.takes_vacant = False
            self._still_there[host] = place
        elif room.moves(place.at.bundle.host):
            room.wait_again()
            place.takes_vacant = True
            self._still_there[host] = place
        else:
            self.give_back(place)

    def give_back(self, place: HostPlace) -> None:
        """Nothing of this host runs there any more. The room stays while another host is in it."""
        room = place.at.room
        with self._lock:
            self._taken[room].remove(place.at)
            if is_used := bool(self._taken[room]):
                self._vacant.append(place.at)
            else:
                del self._taken[room]
                self._vacant = [each for each in self._vacant if each.room is not room]
        if not is_used:
            room.close()

    def find_bundle(self, place: HostPlace, stop: threading.Event) -> None:
        """Wait until a place's room is there, or until it has a vacant bundle instead."""
        began = time.monotonic()
        while not stop.is_set():
            with self._lock:
                covering = [each for each in self._vacant if each.bundle.covers(place.needs)]
            states = {each: each.state() for each in covering}
            for vacant in (each for each in covering if states[each] is BundleState.FREE):
                if self._move(place, vacant):
                    return
            patience = max((_PATIENCE[state] for state in states.values()), default=0.0)
            if place.at.room.is_settled and time.monotonic() - began >= patience:
                return
            stop.wait(_POLL)

    def close(self) -> None:
        """Give all back, which ends what is still there."""
        while self._taken:
            room, _ = self._taken.popitem()
            room.close()

    def _move(self, place: HostPlace, vacant: _ReservedBundle) -> bool:
        """Into a vacant bundle, unless another host has it or its room is given back meanwhile."""
        with self._lock:
            if vacant not in self._vacant:
                return False
            self._vacant.remove(vacant)
            self._taken[vacant.room].add(vacant)
        self.give_back(place)
        place.at = vacant
        return True

    def _request_room(
        self, bundles: dict[str, Bundle], wait: float, *, takes_vacant: bool
    ) -> dict[str, HostPlace]:
        room = ClusterReservation([*bundles.values()], wait)
        places = {
            name: HostPlace(self, each, room, takes_vacant=takes_vacant)
            for name, each in bundles.items()
        }
        with self._lock:
            self._taken[room] = {place.at for place in places.values()}
        return places

    def _bundle(self, name: str, *, again: bool = False) -> Bundle:
        """What a host's Workers need. again: on any node."""
        plan = self._plan
        assert plan.cluster is not None
        host = plan.cluster.host(name)
        cores, gpus = 0, set[int]()
        for worker in self.workers_on(name):
            layouts = [node.layout for node in plan.nodes_on(worker)]
            # A Worker runs one node at a time, so its widest one counts.
            cores += max(layout.threads * layout.inner for layout in layouts)
            gpus.update(plan.devices.get(worker, ()))
        return Bundle(
            host=name,
            cores=max(1, min(host.cores, cores)),
            gpus=len(gpus),
            node="" if again else host.node,
            label=host.label,
        )
