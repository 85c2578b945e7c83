"""Where a lost host begins again: the run never waits for a bundle that it holds itself.

Ray's side is a fake that knows its bundles' states by heart; tests/processes/test_ray_losses.py has
Ray.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from engine.plan.cluster import Host, with_first
from tests.kit import host_plans
from tests.kit.ray_clusters import needs_ray

needs_ray()
from engine.run.hosts import host_bundles as rooms_module  # noqa: E402  (it imports Ray)
from engine.run.hosts.bundle import Bundle, BundleState  # noqa: E402
from engine.run.hosts.host_bundles import HostPlace, HostReservations  # noqa: E402

pytestmark = pytest.mark.timeout(60)
FREE, BUSY = BundleState.FREE, BundleState.BUSY
SILENT, GONE = BundleState.SILENT, BundleState.GONE


class FakeRoom:
    """A room. is_settled: whether it is there; states: of its bundles, one after another."""

    def __init__(self, bundles: Sequence[Bundle], wait: float, *, is_settled: bool) -> None:
        self.bundles = bundles
        self.is_settled = is_settled
        self.closed = False
        self.nodes: dict[str, str] = {}
        self.states: dict[str, Iterator[BundleState]] = {}

    def dial(self, bundle: str, host: str) -> Any:
        def dial_host(stop: threading.Event) -> tuple[FakeRoom, str, str]:
            self.nodes[bundle] = f"node of {bundle}"
            return self, bundle, host

        return dial_host

    def moves(self, host: str) -> bool:
        return False

    def state(self, host: str) -> BundleState:
        return next(self.states[host])

    def close(self) -> None:
        assert not self.closed
        self.closed = True


@dataclass
class FakeRay:
    """Every room that was asked for. has_room: for what is asked from now on."""

    rooms: list[FakeRoom]
    avoided: list[str]
    has_room: bool = True

    def ask(self, bundles: Sequence[Bundle], wait: float) -> FakeRoom:
        self.rooms.append(FakeRoom(bundles, wait, is_settled=self.has_room))
        return self.rooms[-1]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeRay(rooms=[], avoided=[])
    monkeypatch.setattr(rooms_module, "ClusterReservation", ray.ask)
    monkeypatch.setattr(rooms_module, "avoid", ray.avoided.append)
    monkeypatch.setattr(rooms_module, "_POLL", 0.0)
    return ray


@pytest.fixture
def rooms(ray: FakeRay) -> HostReservations:
    """Worker source on host a, Worker host on b, spare Worker more on c."""
    hosts = [Host(name=name, cores=2, memory=2**30, node=f"node of {name}") for name in "abc"]
    plan = host_plans.plan()
    cluster, where = with_first(hosts), {"source": "a", "host": "b"}
    return HostReservations(replace(plan, cluster=cluster, hosts=where), 60.0)


def begin(rooms: HostReservations, *hosts: str) -> dict[str, HostPlace]:
    """The first room, with a process in each bundle."""
    places = rooms.first(hosts)
    for place in places.values():
        place.dial(threading.Event())
    return places


def test_the_bundle_on_a_node_that_answers_again_is_used_again(
    ray: FakeRay, rooms: HostReservations
) -> None:
    """After a partition there is no other room: the first one holds what there is."""
    places, ray.has_room = begin(rooms, "a", "b"), False
    rooms.note_lost_host(places["b"], ended=False)
    first = ray.rooms[0]
    first.states["b"] = iter([SILENT, SILENT, BUSY, FREE])
    place = rooms.again("b")
    assert place.dial(threading.Event()) == (first, "b", "b")
    assert ray.avoided == ["node of b"]
    assert place.node == "node of b"
    assert [room.closed for room in ray.rooms] == [False, True], "what it asked for goes back"
    rooms.close()
    assert first.closed


def test_a_process_that_is_being_killed_is_waited_for(
    ray: FakeRay, rooms: HostReservations
) -> None:
    """Though there is room elsewhere: nobody would be in this bundle until the run ends."""
    places = begin(rooms, "a", "b")
    rooms.note_lost_host(places["b"], ended=False)
    ray.rooms[0].states["b"] = iter([SILENT, BUSY, BUSY, FREE])
    assert rooms.again("b").dial(threading.Event()) == (ray.rooms[0], "b", "b")
    assert ray.rooms[1].closed


@pytest.mark.parametrize("state", [GONE, SILENT, BUSY])
def test_a_bundle_that_does_not_come_back_is_not_waited_for_where_there_is_room(
    ray: FakeRay, rooms: HostReservations, monkeypatch: pytest.MonkeyPatch, state: BundleState
) -> None:
    for each in (SILENT, BUSY):
        monkeypatch.setitem(rooms_module._PATIENCE, each, 0.0)
    places = begin(rooms, "a", "b")
    rooms.note_lost_host(places["b"], ended=False)
    ray.rooms[0].states["b"] = iter([state])
    assert rooms.again("b").dial(threading.Event()) == (ray.rooms[1], "b", "b")
    assert not ray.rooms[1].closed


def test_whoever_looks_for_room_has_a_vacant_bundle(ray: FakeRay, rooms: HostReservations) -> None:
    """Host b is elsewhere by now, and a is lost after it: where b was is the only room."""
    places = begin(rooms, "a", "b")
    rooms.note_lost_host(places["b"], ended=False)
    first = ray.rooms[0]
    first.states["b"] = iter([GONE, FREE])
    elsewhere = rooms.again("b")
    elsewhere.dial(threading.Event())
    ray.has_room = False
    places["c"] = rooms.again("c")
    assert places["c"].dial(threading.Event()) == (first, "b", "c")
    assert elsewhere.at.room is ray.rooms[1]
    rooms.note_lost_host(places["a"], ended=False)
    assert not first.closed, "c is in it"
    rooms.give_back(places["c"])
    assert first.closed, "nobody is"


def test_a_room_in_which_nobody_is_any_more_is_given_back_at_once(
    ray: FakeRay, rooms: HostReservations
) -> None:
    (place,) = begin(rooms, "b").values()
    rooms.note_lost_host(place, ended=False)
    assert ray.rooms[0].closed
    assert rooms.again("b").dial(threading.Event()) == (ray.rooms[1], "b", "b")


def test_two_hosts_do_not_get_one_bundle(ray: FakeRay, rooms: HostReservations) -> None:
    places = begin(rooms, "a", "b", "c")
    ray.rooms[0].states |= {"a": iter([FREE, GONE]), "b": iter([GONE, FREE])}
    for name in "ab":
        rooms.note_lost_host(places[name], ended=False)
    taken = [rooms.again(name).dial(threading.Event()) for name in "ab"]
    assert taken == [(ray.rooms[0], "a", "a"), (ray.rooms[0], "b", "b")]


def test_a_smaller_bundle_or_one_of_another_label_is_none_for_it() -> None:
    wants = Bundle(host="b", cores=2, gpus=1)
    assert replace(wants, host="a", node="n", label=("zone", "x")).covers(wants)
    assert not replace(wants, gpus=0).covers(wants)
    assert not replace(wants, cores=1).covers(wants)
    assert not wants.covers(replace(wants, label=("zone", "x")))


def test_a_host_whose_process_alone_ended_begins_in_its_bundle(
    ray: FakeRay, rooms: HostReservations
) -> None:
    places = begin(rooms, "a", "b")
    rooms.note_lost_host(places["b"], ended=True)
    assert rooms.again("b").dial(threading.Event()) == (ray.rooms[0], "b", "b")
    assert len(ray.rooms) == 1
    assert ray.avoided == []


def test_who_looks_for_room_stops_with_its_link(ray: FakeRay, rooms: HostReservations) -> None:
    places, ray.has_room = begin(rooms, "a", "b"), False
    rooms.note_lost_host(places["b"], ended=False)
    stop = threading.Event()

    def silent() -> Iterator[BundleState]:
        yield SILENT
        stop.set()
        yield SILENT

    ray.rooms[0].states["b"] = silent()
    place = rooms.again("b")
    place.dial(stop)
    assert place.at.room is ray.rooms[1]
    rooms.close()
    assert all(room.closed for room in ray.rooms)
