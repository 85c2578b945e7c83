"""The channel of a Worker with peers on other hosts: which requests are repeated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest

from dataflow.errors import RunError
from engine.channels.frames import checksums
from engine.channels.routed_channel import REFUSALS, AddressBook, AddressEntry, RoutedChannel
from engine.channels.shm.channel import ShmChannel
from engine.channels.zmq.channel import ZmqChannel
from tests.contracts.pull_rows import rollouts
from tests.contracts.pull_worlds import of_a

pytestmark = pytest.mark.timeout(60)


def _nobody(peer: str) -> None:
    raise AssertionError(f"{peer} is on another host")


def _alone(name: str, folder: Path, book: AddressBook, epoch: int = 0) -> RoutedChannel:
    shm = ShmChannel(name, epoch, _nobody)
    bind = f"ipc://{folder}/{name}{epoch}"
    far = ZmqChannel(name, epoch, book.address, bind=bind, outbox=shm)
    return RoutedChannel(shm, near=frozenset(), far=far, book=book, lease=20.0)


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[RoutedChannel, RoutedChannel]]:
    """Workers a and b, each alone on its host."""
    book = AddressBook()
    a, b = (_alone(name, folder, book) for name in "ab")
    book.write("a", AddressEntry(endpoint=a.endpoint, epoch=0))
    yield a, b
    for channel in (a, b):
        channel.close()


def test_a_process_that_outlives_its_successor_is_asked_no_more(tmp_path: Path) -> None:
    """One on a host that hangs, say. It knows no block of the next one."""
    book = AddressBook()
    with contextlib.ExitStack() as after:
        old, b, new = (
            after.enter_context(contextlib.closing(_alone(name, tmp_path, book, epoch)))
            for name, epoch in (("a", 0), ("b", 0), ("a", 1))
        )
        for epoch, a in enumerate((old, new)):
            rows = rollouts(20, 30)
            block = a.keep(rows)
            book.write("a", AddressEntry(endpoint=a.endpoint, epoch=epoch))
            (found,) = b.fetch(of_a(block))
            assert found.equals(rows.records)


@contextmanager
def changed(answers: int) -> Iterator[None]:
    """The content of this many answers does not match their checksums."""
    left = [answers]

    def sums(buffers: Sequence[pa.Buffer | None]) -> list[int]:
        left[0] -= 1
        return [n ^ (left[0] >= 0) for n in checksums(buffers)]

    with mock.patch("engine.channels.multipart.checksums", sums):
        yield


def test_an_answer_that_was_changed_on_its_way_is_asked_for_again(tmp_path: Path) -> None:
    rows = rollouts(20, 30)
    with two_hosts(tmp_path) as (a, b):
        block = a.keep(rows)
        with changed(REFUSALS - 1):
            (found,) = b.fetch(of_a(block))
        assert found.equals(rows.records)
        assert b.refusals == {"a": REFUSALS - 1}
        assert b.take_moved_bytes() == {"zmq": found.nbytes}, "what is refused is no payload"


def test_what_is_always_wrong_fails(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as (a, b):
        block = a.keep(rollouts(20, 30))
        with changed(REFUSALS), pytest.raises(RunError, match=r"a: refused: .* changed on its way"):
            b.fetch(of_a(block))
        assert b.refusals == {"a": REFUSALS}
        with pytest.raises(KeyError):  # not a refusal: it is raised at once
            b.fetch(of_a(block + 1))
