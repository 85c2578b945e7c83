"""How ranks on several hosts find the first of them, and what is said of one that does not come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dataflow.errors import RunError
from engine.channels.tensors.keyed_store import KeyedStore
from engine.run.control.control import Network, Open, PeerAddress, PeerAddresses, Seat
from engine.run.worker_process.worker_channel import WorkerChannel, worker_channel
from engine.run.worker_process.worker_ranks import far_store

pytestmark = pytest.mark.timeout(60)

NAMES = ["t0 on a", "t1 on b"]


@contextmanager
def rank(
    number: int, *, epoch: int = 0, private: bool = False
) -> Iterator[tuple[Open, WorkerChannel]]:
    """A rank of two, alone on its host."""
    name, seat = f"t{number}", Seat(rank=number, world=2, names=("t0", "t1"))
    address = f"127.0.0.{number + 1}"
    network = Network(worker=name, address=address, near=(name,), private=private, lease=5.0)
    opened = Open(worker=name, epoch=epoch, plan=b"", outbox=1 << 20, seat=seat, network=network)
    channel = worker_channel(opened)
    yield opened, channel
    if channel.meeting is not None:
        channel.meeting.close()
    channel.pairs.close()
    channel.channel.close()


def told(channel: WorkerChannel, opened: Open) -> PeerAddresses:
    """What others are told of a Worker."""
    bound = channel.bound
    return PeerAddresses(
        entries=(
            PeerAddress(
                worker=opened.worker,
                epoch=opened.epoch,
                endpoint=bound.endpoint,
                key=bound.key,
                meeting=bound.meeting,
            ),
        )
    )


@pytest.mark.parametrize("how", [{}, {"private": True, "epoch": 2}])
def test_ranks_meet_at_the_first_of_them_whoever_is_told_first(how: dict[str, Any]) -> None:
    with rank(0, **how) as (first, here), rank(1, **how) as (second, there):
        stores: list[KeyedStore] = []
        waits = threading.Thread(target=lambda: stores.append(far_store(second, there, NAMES)))
        waits.start()
        mine = far_store(first, here, NAMES)
        mine.set("here/0", "1")
        there.write(told(here, first))
        waits.join()
        asks = threading.Thread(target=lambda: stores[0].set("here/1", "1"))
        asks.start()  # its key is not known there yet
        here.write(told(there, second))
        mine.wait(["here/0", "here/1"])
        asks.join()
        for store in (mine, *stores):
            store.close()
        assert there.meeting is None
        assert here.meeting.endpoint.startswith("tcp://127.0.0.1:"), "its host's address"


def test_a_first_rank_that_does_not_come_is_named_with_its_host() -> None:
    expected = r"rank 1 of 2 \(t1 on b\): expected rank 0 \(t0 on a\) within 0\.2 s, found none"
    told = rf"{expected}: .*not said where its ranks meet.* Fix: "
    with rank(1) as (opened, channel), pytest.raises(RunError, match=told):
        far_store(opened, channel, NAMES, timeout=0.2)


@pytest.mark.parametrize(
    ("epoch", "mine", "error"),
    [(1, 2, r"within 0\.2 s, found none"), (1, 0, "its process is gone")],
    ids=["an earlier one is not waited at", "a later one means that this life is over"],
)
def test_the_first_rank_of_another_life_is_not_the_one(epoch: int, mine: int, error: str) -> None:
    with rank(0, epoch=epoch) as (first, here), rank(1, epoch=mine) as (second, there):
        there.write(told(here, first))
        with pytest.raises(RunError, match=error):
            far_store(second, there, NAMES, timeout=0.2)
