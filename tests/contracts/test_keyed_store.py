"""The store by which ranks on several hosts find each other: its answers, strangers, losses."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore

from dataflow.errors import RunError
from engine.channels.contract import PeerLost
from engine.channels.tensors.interfaces import interface_of
from engine.channels.tensors.keyed_store import KeyedStore
from engine.channels.zmq.curve_keys import Address, CurveKeyPair, PeerKeys
from engine.channels.zmq.rendezvous import MeetingServer, StoreRequest, encoded
from engine.channels.zmq.rendezvous_client import MeetingClient
from tests.contracts.ranks import Door, keyed_client
from tests.kit.host_plans import PickleBomb
from tests.kit.strangers import stranger
from tests.kit.turns import example_count

pytestmark = pytest.mark.timeout(120)

KEYS = st.sampled_from(["a", "b", "c"])
NUMBERS = st.integers(-(2**40), 2**40)
CALLS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.binary(max_size=9)),
    st.tuples(st.just("add"), st.just("n"), NUMBERS),
    st.tuples(st.just("check"), st.lists(KEYS, min_size=1, max_size=3)),
    st.tuples(st.just("compare_set"), KEYS, st.sampled_from([b"", b"x", b"y"]), st.just(b"x")),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("wait"), st.lists(KEYS, max_size=3)),
)


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with closing(Door()) as door:
        yield door


@pytest.fixture
def store(door: Door) -> Iterator[KeyedStore]:
    with closing(keyed_client((door.address, door.keys))) as store:
        yield store


def said(store: Any, call: tuple[Any, ...]) -> Any:
    """What a store answers; nothing of what is not there, for which it would wait."""
    name, *arguments = call
    if name in ("get", "wait"):
        keys = arguments[0] if name == "wait" else [arguments[0]]
        if not all(store.check([key]) for key in keys):
            return "not there"
    return getattr(store, name)(*arguments)


@settings(max_examples=example_count(60), deadline=None)
@given(calls=st.lists(CALLS, max_size=25))
def test_it_answers_as_the_stores_of_torch_do(door: Door, calls: list[tuple[Any, ...]]) -> None:
    with closing(keyed_client((door.address, door.keys))) as keyed:
        ours, theirs = PrefixStore(os.urandom(8).hex(), keyed), HashStore()
        for call in calls:
            assert said(ours, call) == said(theirs, call), call


def test_whoever_waits_is_answered_once_all_is_there(door: Door, store: KeyedStore) -> None:
    found: list[Any] = []
    with closing(store.clone()) as other:
        threads = [
            threading.Thread(target=lambda: found.append(store.get("late"))),
            threading.Thread(target=lambda: found.append(other.wait(["late", "later"]))),
        ]
        for thread in threads:
            thread.start()
        with closing(keyed_client((door.address, door.keys))) as third:
            third.set("late", "1")
            threads[0].join()
            assert found == [b"1"]
            assert third.add("later", 2) == 2
            threads[1].join()
    assert found == [b"1", None]


def test_a_value_that_does_not_come_is_named(store: KeyedStore) -> None:
    with pytest.raises(RunError, match=r"rank 0: wait: expected never within 0\.2 s.*Fix: "):
        store.wait(["never"], timedelta(seconds=0.2))
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RunError, match=r"rank 0: get: expected no/never within 0\.2 s"):
        PrefixStore("no", store).get("never")
    assert store.add("after it", 1) == 1, "it goes on"


def frames_of_strangers() -> list[bytes]:
    """What would change the store if anybody heard it, and what is no message."""
    request = StoreRequest(b"stranger", 1, "set", ["taken"], [b"1"])
    return [encoded(request), pickle.dumps(PickleBomb("x")), b"", b"\x94\xc4\x00" * 9]


def meeting(allowed: Mapping[bytes, str] | PeerKeys) -> tuple[MeetingServer, Address]:
    """A server with keys of its own, for rank t1, and its address."""
    keys = CurveKeyPair.make()
    server = MeetingServer("t0", ["t1"], bind="tcp://127.0.0.1:*", keys=keys, allowed=allowed)
    return server, Address(endpoint=server.endpoint, key=keys.public)


@pytest.mark.parametrize("kind", ["no key", "plain", "another key", "no rank's key"])
def test_strangers_get_nothing(kind: str) -> None:
    rank, other = CurveKeyPair.make(), CurveKeyPair.make()
    server, address = meeting({rank.public: "t1", other.public: "rollout"})
    keys = other if kind == "no rank's key" else None
    with closing(server), stranger(address, kind, keys) as asks:
        for frame in frames_of_strangers():
            with contextlib.suppress(zmq.Again):  # there is no connection to send it over
                asks.send(frame, zmq.NOBLOCK)
        assert not asks.poll(1000), "somebody answered"
        with closing(keyed_client((address, rank))) as store:
            assert not store.check(["taken"])
        assert server.refused.total() >= 1


RANKS_KEY = "a rank's key"


def test_what_is_no_request_is_refused_and_disturbs_nobody(door: Door, store: KeyedStore) -> None:
    before = door.refused
    store.set("text", "no number")
    wrong = [
        StoreRequest(b"x", 1, "set", ["taken"]),
        StoreRequest(b"x", 1, "get", ["a", "b"]),
        StoreRequest(b"x", 1, "add", ["text"], amount=1),
    ]
    with stranger(door.address, RANKS_KEY, door.keys) as asks:
        for frame in (pickle.dumps(PickleBomb("x")), b"", *map(encoded, wrong)):
            asks.send(frame)
        asks.send_multipart([encoded(StoreRequest(b"x", 1, "set", ["taken"], [b"1"]))] * 2)
        asks.send(encoded(StoreRequest(b"x", 1, "set", ["last"], [b"1"])))
        store.wait(["last"])
    assert not store.check(["taken"])
    assert door.refused - before == len(wrong) + 3


def test_a_rank_that_is_not_known_yet_asks_again() -> None:
    """Its handshake is refused; it waits for news of addresses, and comes in when it is known."""
    rank, known = CurveKeyPair.make(), PeerKeys()
    server, address = meeting(known)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        known.put("t1", rank.public)

    with closing(server), closing(keyed_client((address, rank), pause)) as store:
        assert store.add("n", 1) == 1
        assert len(pauses) == 1
        assert server.refused.total() == 1


def test_a_first_rank_that_is_gone_ends_the_waiting_of_the_others() -> None:
    rank, gone = CurveKeyPair.make(), threading.Event()
    server, address = meeting({rank.public: "t1"})

    def find() -> Address:
        if gone.is_set():
            raise PeerLost("t0", "its process is gone")
        return address

    store = KeyedStore(MeetingClient("t0", find, lambda _: gone.set(), rank), timeout=60.0)
    with closing(store):
        store.set("there", "1")
        server.close()
        with pytest.raises(PeerLost, match="its process is gone"):
            store.get("never")


def test_what_was_carried_out_is_not_done_again_when_a_connection_broke(door: Door) -> None:
    """The same request over a second connection: the answer of the first."""
    request = encoded(StoreRequest(b"one client", 1, "add", ["once"], amount=5))
    for _ in range(2):
        with stranger(door.address, RANKS_KEY, door.keys) as asks:
            asks.send(request)
            assert asks.recv().endswith(b"5")


def test_without_keys_only_in_a_private_network_or_on_the_loopback() -> None:
    how: dict[str, Any] = {"bind": "tcp://0.0.0.0:*", "keys": None, "allowed": PeerKeys()}
    with pytest.raises(RunError, match=r"expected keys for tcp://0\.0\.0\.0"):
        MeetingServer("t0", ["t1"], **how)
    server = MeetingServer("t0", ["t1"], **how, private=True)
    address = Address(endpoint=server.endpoint.replace("0.0.0.0", "127.0.0.1"))
    client = MeetingClient("t0", lambda: address, lambda _: None, None)
    with closing(server), closing(KeyedStore(client)) as store:
        assert store.add("n", 3) == 3


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.2") == "lo"
    told = r"interface with 192\.0\.2\.1, found .*lo 127\.0\.0\.1.*Fix"
    with pytest.raises(RunError, match=told):
        interface_of("192.0.2.1")
