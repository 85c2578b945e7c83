"""Versions fetched beside a Worker's kernels: one ahead, in order, each Load answered once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from engine.channels.contract import PeerLost
from engine.protocol import messages as m
from engine.run.worker.fetched_versions import FetchedVersions
from engine.run.worker.version_pieces import FetchedPieces

SOON = 20.0
"""Seconds within which a thread has done what it was told."""


def load(number: int, version: int, reader: str = "rollout", leader: str = "") -> m.Load:
    return m.Load(
        id=number,
        model="policy",
        writer="train",
        reader=reader,
        version=version,
        worker="gen",
        source="t0",
        block=version,
        leader=leader,
    )


class Fetches:
    """Fetches that end when they are let."""

    def __init__(self, module_of: Callable[[m.Load], str]) -> None:
        self.begun: SimpleQueue[m.Load] = SimpleQueue()
        self.passed: SimpleQueue[m.Load] = SimpleQueue()
        self.error: Exception | None = None
        self.may_end = threading.Semaphore(0)
        self.versions = FetchedVersions(self._fetch, module_of)

    def _fetch(self, asked: m.Load) -> FetchedPieces:
        self.begun.put(asked)
        assert self.may_end.acquire(timeout=SOON)
        if self.error is not None:
            raise self.error
        return FetchedPieces(pieces=(), start=1.0, end=3.0)

    def add(self, *loads: m.Load) -> None:
        for each in loads:
            self.versions.add(each, self.passed.put)

    def end_one(self) -> int:
        """Let the one under way end; returns the id of what is passed on then."""
        self.may_end.release()
        return self.passed.get(timeout=SOON).id


def one_module(asked: m.Load) -> str:
    return "policy"


def test_one_version_is_fetched_ahead_and_no_second_until_that_is_taken() -> None:
    fetches = Fetches(one_module)
    fetches.add(load(1, 1))
    assert fetches.begun.get(timeout=SOON).id == 1
    fetches.add(load(2, 2))
    assert fetches.end_one() == 1
    assert fetches.begun.empty(), "the second buffer is full"
    future = fetches.versions.take(load(1, 1))
    assert future is not None
    assert future.result().seconds == 2.0
    assert fetches.begun.get(timeout=SOON).id == 2
    assert fetches.end_one() == 2


def test_other_modules_have_a_buffer_of_their_own() -> None:
    fetches = Fetches(lambda asked: asked.reader)
    fetches.add(load(1, 1, "rollout"), load(2, 1, "values"))
    assert [fetches.end_one(), fetches.end_one()] == [1, 2]


def test_a_newer_version_takes_the_place_of_one_that_waits_and_both_are_passed_on() -> None:
    fetches = Fetches(one_module)
    fetches.add(load(1, 1), load(2, 2), load(3, 3))
    assert fetches.passed.get(timeout=SOON).id == 2
    assert fetches.versions.take_superseded(load(2, 2))
    assert not fetches.versions.take_superseded(load(1, 1))
    assert fetches.end_one() == 1
    fetches.versions.take(load(1, 1))
    assert fetches.end_one() == 3


def test_a_follower_moves_with_every_version() -> None:
    fetches = Fetches(one_module)
    fetches.add(*(load(number, number, "target", leader="policy") for number in (1, 2, 3)))
    for number in (1, 2, 3):
        assert fetches.end_one() == number
        assert fetches.versions.take(load(number, number)) is not None


def test_what_a_module_has_been_given_is_not_fetched_for_its_next_reader() -> None:
    fetches = Fetches(one_module)
    fetches.add(load(1, 1), load(2, 1, "sampled"))
    assert fetches.end_one() == 1
    assert fetches.passed.get(timeout=SOON).id == 2
    assert fetches.versions.take(load(2, 1)) is None


def test_who_takes_a_failed_fetch_hears_of_it_and_the_next_one_goes_on() -> None:
    fetches = Fetches(one_module)
    fetches.error = PeerLost("t0", "is gone")
    fetches.add(load(1, 1))
    assert fetches.end_one() == 1
    future = fetches.versions.take(load(1, 1))
    assert future is not None
    with pytest.raises(PeerLost, match="t0: is gone"):
        future.result()
    fetches.error = None
    fetches.add(load(2, 2))
    assert fetches.end_one() == 2


def test_what_is_forgotten_is_never_passed_on() -> None:
    fetches = Fetches(one_module)
    fetches.add(load(1, 1), load(2, 1, "other", leader="x"))
    fetches.begun.get(timeout=SOON)
    assert fetches.versions.forget() == 2
    fetches.add(load(3, 3))
    fetches.may_end.release()
    assert fetches.end_one() == 3
    assert fetches.passed.empty()


def test_a_newer_version_of_another_reader_supersedes_none() -> None:
    fetches = Fetches(one_module)
    fetches.add(load(1, 1), load(2, 2), load(3, 3, reader="reference"))
    fetches.end_one()
    assert not fetches.versions.take_superseded(load(2, 2))
    fetches.versions.forget()


def test_a_follower_gets_the_pieces_that_its_modules_reader_has_had() -> None:
    fetches = Fetches(one_module)
    fetches.add(load(1, 1))
    fetches.end_one()
    fetches.versions.take(load(1, 1))
    fetches.add(load(2, 1, reader="reference", leader="policy"))
    assert fetches.end_one() == 2
    assert fetches.versions.take(load(2, 1)) is not None
