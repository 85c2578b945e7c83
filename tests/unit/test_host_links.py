"""Both ends of the conversation with a host, in one process over calls that fail: nothing is lost,
and the host's lease ends before the run counts the host as lost.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.errors import RunError
from engine.run.control import host_messages as hm
from engine.run.control.control import Quit
from engine.run.control.wire import encode_message
from engine.run.hosts import desk as desk_module
from engine.run.hosts import link as link_module
from engine.run.hosts.desk import Desk, Heard
from engine.run.hosts.link import Gone, HostLink, HostLost, Unreachable
from engine.run.hosts.numbered_messages import FRAME

pytestmark = pytest.mark.timeout(120)
SOON = 30.0
INLINE = 100 * 1024


class LossyCalls:
    """Calls of a Desk of this process. lost: how likely a call is to fail, before or after it ran;
    then, with `failing`, every one fails with that error.
    """

    def __init__(self, desk: Desk, seed: int = 0, lost: float = 0.0) -> None:
        self.failing: RunError | None = None
        self.ended = False
        self.largest = 0
        self._desk, self._lost, self._dice = desk, lost, random.Random(seed)
        self._pool = ThreadPoolExecutor(1)

    def say(self, first: int, frames: list[bytes]) -> None:
        self._measure((first, frames))
        if self.failing is None:
            for _ in range(self._dice.choices((0, 1, 2), (self._lost, 1.0, 0.3))[0]):
                self._desk.accept(first, frames)

    def hear(self, count: int, known: float) -> Future[Heard]:
        return self._pool.submit(self._heard, count, known, self._dice.random())

    def meaning(self, error: BaseException) -> RunError:
        assert isinstance(error, RunError)
        return error

    def end(self) -> None:
        self.ended = True
        self._pool.shutdown(wait=False)

    def _heard(self, count: int, known: float, luck: float) -> Heard:
        error = self.failing or Unreachable("it cannot be reached")
        if self.failing is not None or luck < self._lost / 2:
            raise error
        found = self._desk.answer(count, known)
        self._measure(found)
        if luck < self._lost:
            raise error
        return found

    def _measure(self, call: Any) -> None:
        self.largest = max(self.largest, len(pickle.dumps(call, protocol=5)))


@dataclass
class Conversation:
    """A link, the calls, and a desk; `heard` waits for so many messages of the host."""

    desk: Desk
    calls: LossyCalls
    link: HostLink
    more: threading.Event

    def heard(self, count: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < count:
            self.more.clear()
            if not (came := self.link.hear()):
                assert self.more.wait(SOON), f"{found} came, and no more"
            found += came
        return found

    def failure(self) -> RunError:
        """What `hear` raises, once it does."""
        while True:
            self.more.clear()
            try:
                self.link.hear()
            except RunError as error:
                return error
            assert self.more.wait(SOON), "nothing failed"


@contextlib.contextmanager
def conversation(seed: int = 0, lost: float = 0.0, lease: float = 60.0) -> Iterator[Conversation]:
    desk, more = Desk(), threading.Event()
    calls = LossyCalls(desk, seed, lost)
    link = HostLink("b", lambda _: calls, lease, more.set)
    try:
        yield Conversation(desk, calls, link, more)
    finally:
        link.close()
        desk.close()
        assert calls.ended, "the link ends the process of the host"


@pytest.fixture(autouse=True, scope="module")
def hurried() -> Iterator[None]:
    """Waits of milliseconds in the place of those that suit a network."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (desk_module, link_module):
            patch.setattr(module, "BEAT", 0.004)
        patch.setattr(link_module, "_PATIENCE", 0.01)
        yield


def begin(lease: float) -> hm.Begin:
    """The first message of a run, of which a desk looks at the lease."""
    where = Path("/")
    texts = {"plan": b"", "planned": "", "options": ""}
    folders = {"folder": where, "directory": where, "path": ()}
    return hm.Begin(networks=(), absent={}, lease=lease, **texts, **folders)  # type: ignore[arg-type]


def instruction(number: int, size: int) -> hm.RespawnThere:
    return hm.RespawnThere(workers=(f"{number}", "w" * size))


def reply(number: int, size: int) -> hm.HostReply:
    return hm.HostReply(number=number, problem="x" * size)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    lost=st.floats(0.0, 0.8),
    sizes=st.lists(st.sampled_from((0, 40, FRAME, 5 * FRAME)), min_size=1, max_size=8),
)
def test_whatever_calls_do_all_messages_come_once_and_in_order(
    seed: int, lost: float, sizes: list[int]
) -> None:
    to_host = [instruction(i, size) for i, size in enumerate(sizes)]
    to_run = [reply(i, size) for i, size in enumerate(reversed(sizes))]
    with conversation(seed, lost) as both:
        for message, answer in zip(to_host, to_run, strict=True):
            both.link.say(message)
            both.desk.say(answer)
        assert [both.desk.take() for _ in to_host] == to_host
        assert both.heard(len(to_run)) == to_run
        both.desk.settle(SOON)
        assert both.desk._to_send.is_settled
        assert both.calls.largest < INLINE


# --- the lease ------------------------------------------------------------------------------------


class BothClock:
    """In the place of `time`, for both ends."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Ended:
    """Both ends without their threads, by one clock: how long each waits for the other."""

    def __init__(self, clock: BothClock, lease: float) -> None:
        self.desk = Desk()
        self.desk.close()
        self.link = HostLink("b", lambda _: None, lease, lambda: None)
        self.link._thread.join()
        self.link._calls = LossyCalls(self.desk)
        self.link._to_send.add(encode_message(begin(lease)))
        self.desk.accept(*self.link._to_send.take())
        self.link._heard = clock.now
        self.lease = lease

    def require_order(self) -> None:
        """The host gives up before the run does."""
        assert self.desk._known + self.desk._lease <= self.link._heard + self.lease


Fate = st.sampled_from(("comes back", "lost on the way", "lost on the way back", "late"))


@given(
    lease=st.floats(1.0, 60.0),
    calls=st.lists(st.tuples(st.floats(0, 40), st.floats(0, 40), Fate), min_size=1, max_size=15),
)
def test_the_lease_of_the_host_ends_first_whatever_delays(
    lease: float, calls: list[tuple[float, float, str]]
) -> None:
    clock, late = BothClock(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(desk_module, "time", clock)
        patch.setattr(link_module, "time", clock)
        ends = Ended(clock, lease)
        for out, back, fate in calls:
            asked, done = (ends.link._arrived.count, ends.link._known), Future[Heard]()
            clock.now += out
            found = None if fate in ("lost on the way", "late") else ends.desk.answer(*asked)
            late += [asked] if fate == "late" else []
            ends.require_order()
            clock.now += back
            if found is None or fate == "lost on the way back":
                done.set_exception(Unreachable("it cannot be reached"))
            else:
                done.set_result(found)
            ends.link._take(done)
            ends.require_order()
            if late and fate == "comes back":
                ends.desk.answer(*late.pop())
                ends.require_order()


def test_a_cut_ends_both_sides_with_the_lease() -> None:
    with conversation(lease=0.5) as both:
        told = threading.Event()
        both.desk.on_end = told.set
        both.link.say(begin(0.5))
        assert both.desk.take() == begin(0.5)
        both.calls.failing = Unreachable("it cannot be reached")
        with pytest.raises(HostLost, match=r"host b: not heard of for .*\(the lease is 0\.5 s\)"):
            raise both.failure()
        assert told.wait(SOON)
        assert both.desk.given_up
        assert both.desk.take() is None
        assert both.desk.take() is None, "the end does not pass"
        both.desk.say(reply(1, 10))
        assert not both.desk.answer(0, 0.0)[3], "a run that was only slow hears of no failure"


def test_a_cut_that_heals_within_the_lease_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with conversation() as both:
        both.link.say(begin(60.0))
        assert both.desk.take() == begin(60.0)
        both.calls.failing = Unreachable("it cannot be reached")
        both.desk.say(reply(1, 3 * FRAME))
        both.link.say(instruction(1, 3 * FRAME))
        while not caplog.records:
            assert both.link.hear() == []
        both.calls.failing = None
        assert both.heard(1) == [reply(1, 3 * FRAME)]
        assert both.desk.take() == instruction(1, 3 * FRAME)
        (warning,) = [record.getMessage() for record in caplog.records]
        assert warning.startswith("host b: it cannot be reached; it is given up in ")


# --- errors of calls ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "lease", "kind", "told"),
    [
        (Gone("its process died", ended=True), 60.0, HostLost, "host b: its process died"),
        (
            Gone("its node died", ended=False),
            0.4,
            HostLost,
            r"host b: not heard of for .* s \(the lease is 0\.4 s\)",
        ),
        (RunError("LookupError: nothing"), 60.0, RunError, "host b: LookupError: nothing"),
    ],
    ids=["gone for certain: at once", "perhaps there still: with the lease", "an error of the run"],
)
def test_an_error_of_a_call_is_a_lost_host_or_the_runs(
    error: RunError, lease: float, kind: type[RunError], told: str
) -> None:
    with conversation(lease=lease) as both:
        both.link.say(begin(lease))
        both.desk.take()
        both.calls.failing = error
        found = both.failure()
    assert type(found) is kind
    assert re.fullmatch(told, str(found))
    if isinstance(found, HostLost):
        assert found.ended == (lease == 60.0)


def test_a_host_that_is_never_there_fails_as_the_dial_says() -> None:
    more = threading.Event()

    def dial(_: threading.Event) -> None:
        raise RunError("no room within 3 s. Fix: more nodes.")

    link = HostLink("b", dial, 60.0, more.set)
    assert more.wait(SOON)
    with pytest.raises(RunError, match="no room within 3 s"):
        link.hear()
    assert not link.reached
    link.close()


def test_what_came_before_the_loss_is_heard_before_it() -> None:
    with conversation() as both:
        both.desk.say(reply(1, 0))
        while not both.link._came:
            assert both.more.wait(SOON)
        both.calls.failing = Gone("its process died", ended=True)
        while both.link._failure is None:
            both.more.clear()
            assert both.link._failure is not None or both.more.wait(SOON)
        assert both.link.hear() == [reply(1, 0)]
        with pytest.raises(HostLost):
            both.link.hear()


def test_quit_ends_the_part_of_the_host_and_what_it_says_last_arrives() -> None:
    with conversation(lost=0.3) as both:
        told = threading.Event()
        both.desk.on_end = told.set
        both.link.say(begin(60.0))
        both.link.say(Quit())
        assert told.wait(SOON)
        assert both.desk.take() == begin(60.0)
        assert both.desk.take() is None
        assert not both.desk.given_up
        both.desk.say(hm.HostEnded())
        assert both.heard(1) == [hm.HostEnded()]


def test_changes_of_a_host_are_one_until_it_looks() -> None:
    desk = Desk()
    for _ in range(3):
        desk.note_change()
    assert desk.take() is desk_module.CHANGED
    desk.note_change()
    desk.accept(0, [b"l" + encode_message(begin(9.0))])
    assert [desk.take() for _ in range(2)] == [desk_module.CHANGED, begin(9.0)]
    desk.close()
