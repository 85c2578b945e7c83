"""Faults of a peer that do not harm a Worker: wrong or no messages, wrong keys, sudden death."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zmq as pyzmq
from pull_liars import (
    Asked,
    Owner,
    answered,
    changed_messages,
    liar,
    noted,
    noted_wrongly,
    outcome,
    reading,
    resident,
)
from pull_mutants import bytes_mutated, value_mutated
from pull_rows import batch, rollouts
from pull_worlds import fetched, of_a, shm, zmq

from dataflow.batch import Batch, Keys
from dataflow.errors import RunError
from dataflow.schema import Rollout
from engine.channels.block_requests import FetchRequest, Wanted, encode
from engine.channels.contract import PeerLost
from engine.channels.multipart import seal_message
from engine.channels.shm.block_index import ROOM
from engine.channels.shm.block_index import read_note as read_note
from engine.channels.shm.channel import ShmChannel
from engine.channels.shm.fd_socket import LARGEST, FdSocket
from engine.channels.shm.messages import SchemaHere
from engine.channels.shm.reader import SlabReader
from engine.channels.shm.slabs import POISON
from engine.channels.zmq.channel import ZmqChannel
from engine.channels.zmq.curve_keys import Address, CurveKeyPair

pytestmark = pytest.mark.timeout(60)


ROWS = batch(Rollout, 7, 1, skipped=1)


@pytest.fixture
def owner() -> Iterator[Owner]:
    """Of ROWS."""
    owner = Owner(ROWS)
    yield owner
    owner.outbox.close()


def fuzzed(
    count: int, attempt: Callable[[], Asked], is_right: Callable[[pa.RecordBatch], bool]
) -> Counter[str]:
    """How often a reader got rows, a clear error, or had to ask; nothing is left of it."""
    descriptors, memory = len(os.listdir("/proc/self/fd")), resident()
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        found = attempt()
        if isinstance(found, pa.RecordBatch):
            found.validate(full=True)
            assert is_right(found)
            outcomes["rows"] += 1
        else:
            outcomes["asked" if found is None else "refused"] += 1
    end = time.monotonic() + 10.0
    while len(os.listdir("/proc/self/fd")) > descriptors and time.monotonic() < end:
        os.sched_yield()  # ZeroMQ closes the sockets of broken connections in a thread of its own
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert resident() - memory < 64 << 20
    return outcomes


@pytest.mark.parametrize("content", [True, False])
def test_a_thousand_mutated_descriptors(owner: Owner, content: bool) -> None:
    rng = np.random.default_rng(7)
    change = lambda honest: changed_messages(honest, rng)
    is_right = lambda rows: not content or rows.equals(ROWS.records)
    outcomes = fuzzed(1000, lambda: answered(owner, content, change), is_right)
    assert outcomes["refused"] > 500
    assert not outcomes["asked"]


@pytest.mark.parametrize("content", [False, True])
def test_mutated_notes_of_the_board(owner: Owner, content: bool) -> None:
    rng = np.random.default_rng(8)
    is_right = lambda rows: not content or rows.equals(ROWS.records)
    outcomes = fuzzed(600, lambda: noted_wrongly(owner, content, rng), is_right)
    assert outcomes["refused"] > 100
    assert outcomes["asked"] > 100


@pytest.mark.parametrize("content", [False, True])
def test_what_the_board_says_is_what_an_answer_says(owner: Owner, content: bool) -> None:
    owner.described(content=content)
    same = lambda there: there
    assert noted(owner, content, same, same) == ROWS.records
    assert noted(owner, content, lambda text: text + bytes(ROOM), same) is None
    owner.outbox.release(owner.block)
    assert read_note(pa.py_buffer(owner.outbox.index._memory), owner.block) is None


def test_slabs_that_could_be_taken_away_are_not_mapped(owner: Owner) -> None:
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 8 << 20)
    with contextlib.closing(socket.socketpair()[0]) as other:
        for descriptor in (unsealed, other.fileno(), None):

            def change(messages, descriptor=descriptor):
                return [(messages[0][0], descriptor), *messages[1:]]

            assert answered(owner, False, change) is RunError
    os.close(unsealed)


def test_a_length_without_end_is_refused_before_anything_is_read() -> None:
    mine, its = socket.socketpair()
    reader = SlabReader("a", mine, content=False)
    reader.ask(of_a(0))
    its.sendall((LARGEST + 1).to_bytes(4, "little") + b"x" * 100)
    with pytest.raises(RunError, match="at most"):
        reader.answer(1, of_a(0), time.monotonic() + 5.0)
    reader.close()
    its.close()


def test_an_answer_that_comes_late_or_twice_is_not_taken_for_another(owner: Owner) -> None:
    rows = rollouts(3, 4, seed=1)
    other = owner.outbox.keep(rows)
    with reading(content=False) as (reader, sender):
        first = reader.ask(of_a(owner.block))
        with pytest.raises(PeerLost, match="in time"):
            reader.answer(first, of_a(owner.block), time.monotonic() + 0.01)
        owner.block, late = other, owner.says(first, content=False)
        second = reader.ask(of_a(other))
        for message, descriptor in [*late, *late, *owner.says(second, content=False)]:
            sender.send(message, descriptor)
        (answer,) = reader.answer(second, of_a(other), time.monotonic() + 5.0)
        assert answer.equals(rows.records)


def test_a_refused_answer_is_counted_with_its_peer() -> None:
    mine, its = socket.socketpair()
    channel = ShmChannel("b", 0, lambda _: mine)
    its.sendall(b"\x03\x00\x00\x00abc")
    with pytest.raises(RunError, match="data plane"):
        channel.fetch(of_a(0))
    assert channel.refusals == {"a": 1}
    channel.close()
    its.close()


def test_mutated_requests_close_their_connection_and_nothing_else() -> None:
    world, rng = shm(), np.random.default_rng(3)
    block = world["a"].keep(rollouts(3, 4))
    honest = encode(FetchRequest(1, (Wanted(block, ("reward", "mask")),)))
    for number in range(500):
        mine, its = socket.socketpair()
        world["a"].serve("wicked", its)
        packets = FdSocket(mine)
        message = bytes_mutated(honest, rng) if number % 2 else value_mutated(honest, rng)
        packets.send(message)
        packets.wait(time.monotonic() + 5.0)  # an answer, or the end
        packets.close()
    assert world["a"].refusals["wicked"] > 100
    assert fetched(world, block).num_rows == 3
    world.close()


def test_a_peer_that_asks_and_never_reads_keeps_nobody_waiting() -> None:
    world = shm()
    block = world["a"].keep(rollouts(3, 4))
    mine, its = socket.socketpair()
    world["a"].serve("slow", its)
    slow = FdSocket(mine)
    many = encode(FetchRequest(1, (Wanted(block),) * 500))
    for _ in range(200):
        slow.send(many)
    for _ in range(20):
        assert fetched(world, block).num_rows == 3
    waiting = [p.socket.waiting for p in world["a"]._server._served if p.peer == "slow"]
    assert waiting
    assert waiting[0] < 8 << 20  # not all of the 200 answers
    slow.close()
    world.close()


def test_a_view_that_is_kept_too_long_sees_poison() -> None:
    world = shm()
    rows = rollouts(4, 50)
    block = world["a"].keep(rows)
    (found,) = world["b"].fetch(of_a(block))
    (copied,) = world["b"].fetch(of_a(block, rows=np.array([3, 1])))
    assert found.equals(rows.records)
    world["a"].release(block)
    view = np.frombuffer(found.column("completion_ids").values.buffers()[1], np.uint8)
    assert (view == POISON).all()
    assert copied.equals(rows.records.take(pa.array([3, 1])))
    world.close()


def test_death_in_the_middle_of_an_answer() -> None:
    mine, its = socket.socketpair()
    channel = ShmChannel("b", 0, lambda _: mine)

    def die() -> None:
        its.recv(1)
        its.sendall(b"\x40\x00\x00\x00half")
        its.close()

    thread = threading.Thread(target=die)
    thread.start()
    with pytest.raises(PeerLost) as lost:
        channel.fetch(of_a(0))
    assert lost.value.peer == "a"
    thread.join()
    channel.close()


_PRODUCER = """
import socket, sys
sys.path[:0] = sys.argv[2:]
from pull_rows import rollouts
from engine.channels.shm.channel import ShmChannel
link = socket.socket(fileno=int(sys.argv[1]))
_, (rows,), *_ = socket.recv_fds(link, 1, 1)
channel = ShmChannel("a", 0, None)
channel.serve("b", socket.socket(fileno=rows))
blocks = [channel.keep(rollouts(100, 50, seed)) for seed in range(3)]
link.sendall(b"ready")
link.recv(1)
"""


@pytest.fixture
def producer() -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A process that keeps blocks 0 to 2, and a socket to its channel."""
    control, its_control = socket.socketpair()
    rows, its_rows = socket.socketpair()
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    arguments = [sys.executable, "-c", _PRODUCER, str(its_control.fileno()), *paths]
    process = subprocess.Popen(arguments, pass_fds=[its_control.fileno()])
    its_control.close()
    socket.send_fds(control, [b"x"], [its_rows.fileno()])
    its_rows.close()
    assert control.recv(5) == b"ready"
    yield process, rows
    process.kill()
    process.wait()
    control.close()


def test_a_killed_process_is_lost_and_what_was_read_of_it_stays(producer) -> None:
    process, rows = producer
    channel = ShmChannel("b", 0, lambda _: rows, patience=0.3)
    (found,) = channel.fetch(of_a(0))
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    # Its block index says where: nobody is asked.
    (again,) = channel.fetch(of_a(1))
    assert again.equals(rollouts(100, 50, 1).records)
    with pytest.raises(PeerLost, match="in time"):
        channel.fetch(of_a(99))
    process.kill()
    process.wait()
    assert found.equals(rollouts(100, 50, 0).records)
    channel.close()


def test_mutated_frames_between_hosts() -> None:
    rng = np.random.default_rng(5)
    with liar(batch(Rollout, 6, 2).records, rng) as endpoint:
        channel = ZmqChannel("b", 0, lambda _: Address(endpoint=endpoint), patience=5.0)
        outcome(lambda: channel.fetch(of_a(0))[0])  # opens what a channel keeps open
        attempt = lambda: outcome(lambda: channel.fetch(of_a(0))[0])
        assert fuzzed(500, attempt, lambda found: found.num_rows == 6)["refused"] > 300
        channel.close()


def test_what_was_left_unread_of_an_answer_is_not_taken_for_the_next() -> None:
    world = zmq()
    large = rollouts(3, 200_000)
    block, gone = world["a"].keep(large), world["a"].keep(rollouts(1, 1))
    world["a"].release(gone)
    for _ in range(3):
        with pytest.raises(KeyError):
            world["b"].fetch([*of_a(gone), *of_a(block)])
        assert fetched(world, block).equals(large.records)
    world.close()


def test_pickles_and_mutants_sent_to_a_data_port_are_refused() -> None:
    world, rng = zmq(), np.random.default_rng(11)
    block = world["a"].keep(rollouts(3, 4))
    (request,) = of_a(block, rows=np.array([1]))
    honest = seal_message(FetchRequest(1, (Wanted.of(request),)))
    context = pyzmq.Context()
    dealer = context.socket(pyzmq.DEALER)
    dealer.connect(world["a"].address.endpoint)
    dealer.send(b"\x80\x04\x95")  # a pickle
    dealer.send_multipart([honest, honest])
    beyond = Wanted(block, (), (99).to_bytes(8, "little"))
    dealer.send(seal_message(FetchRequest(1, (beyond,))))
    for _ in range(300):
        dealer.send(seal_message(value_mutated(honest[8:], rng)))
    dealer.send(honest)
    assert fetched(world, block).num_rows == 3
    deadline = time.monotonic() + 10.0
    while sum(world["a"].refusals.values()) < 100 and time.monotonic() < deadline:
        dealer.poll(10)
        with contextlib.suppress(pyzmq.Again):
            dealer.recv_multipart(pyzmq.NOBLOCK)
    assert sum(world["a"].refusals.values()) >= 100
    dealer.close(0)
    context.destroy(linger=0)
    world.close()


@pytest.mark.parametrize("keys", ["none", "unknown"])
def test_without_a_key_of_the_run_nothing_is_told(keys) -> None:
    world = zmq(curve=True)
    block = world["a"].keep(rollouts(3, 4))
    own = None if keys == "none" else CurveKeyPair.make()
    stranger = ZmqChannel(
        "b", 0, lambda _: world["a"].address, keys=own, patience=5.0, heartbeat=1.0
    )
    with pytest.raises(PeerLost):
        stranger.fetch(of_a(block))
    assert fetched(world, block).num_rows == 3
    stranger.close()
    world.close()


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://*:*", "tcp://0.0.0.0:*", "tcp://[::]:*", "tcp://192.0.2.1:*", "tcp://host:1"],
)
def test_other_hosts_are_only_spoken_with_under_keys(endpoint) -> None:
    with pytest.raises(RunError, match=r"expected keys for .*Fix: "):
        ZmqChannel("a", 0, lambda _: Address(endpoint=""), bind=endpoint)


def test_an_address_with_keys_or_of_a_file_may_be_open(tmp_path: Path) -> None:
    for world in (zmq(curve=True, bind="tcp://0.0.0.0:*"), zmq(bind=f"ipc://{tmp_path}/rows")):
        assert world["a"].address.endpoint
        world.close()


def test_a_peer_that_dies_while_it_is_asked() -> None:
    context = pyzmq.Context()
    router = context.socket(pyzmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    channel = ZmqChannel(
        "b", 0, lambda _: Address(endpoint=f"tcp://127.0.0.1:{port}"), patience=20.0
    )

    def die() -> None:
        router.recv_multipart()
        router.close(0)

    thread = threading.Thread(target=die)
    thread.start()
    with pytest.raises(PeerLost, match="connection is lost"):
        channel.fetch(of_a(0))
    thread.join()
    context.destroy(linger=0)
    channel.close()


def test_a_schema_is_told_once_and_cannot_be_changed() -> None:
    owner = Owner(Batch(Keys.of([0]), pa.RecordBatch.from_pydict({"x": pa.array([1.5])})))
    other = Owner(Batch(Keys.of([0]), pa.RecordBatch.from_pydict({"y": pa.array([1.5])})))
    _, _, told = owner.described(content=False)
    _, _, another = other.described(content=False)

    def change(messages):
        return [messages[0], (encode(SchemaHere(told.hash, another.encoded)), None), *messages[2:]]

    assert answered(owner, False, change) is RunError
    owner.outbox.close()
    other.outbox.close()
