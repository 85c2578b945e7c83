"""Episodes that share a process: awaited together, given up one by one, lost together."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.kit.environment_classes import AsyncObedient, Obedient, message
from tests.kit.environment_pools import (
    begin,
    contents,
    fault_of,
    finish,
    opened,
    opened_here,
    replies,
    step,
)
from tests.kit.processes import ended

pytestmark = pytest.mark.timeout(180)


def test_all_episodes_of_a_template_run_in_it() -> None:
    with opened(isolation="shared", processes=2) as pool:
        begin(pool, 1, 2, 3, 4)
        pids = [contents(step(pool, episode, "pid"))[0] for episode in (1, 2, 3, 4)]
        assert len(set(pids)) == 2
        assert len(pool.pids()) == 4, "keepers and templates"
        last = finish(pool, 1)
        assert (last.reward, last.state["steps"]) == (2.5, 1)
        begin(pool, 1)


def test_coroutines_are_awaited_together() -> None:
    with opened(AsyncObedient, isolation="shared") as pool:
        begin(pool, 1, 2)
        pool.step(1, message("wait"))
        pool.step(2, message("meet"))
        met = replies(pool, 2)
        assert [contents(met[episode]) for episode in (1, 2)] == [["met"], ["set"]]


def test_a_method_that_blocks_holds_nobody_up_and_is_given_up_alone() -> None:
    with opened(isolation="shared", step_timeout=1.0) as pool:
        begin(pool, 1, 2)
        pool.step(1, message("hang"))
        assert contents(step(pool, 2, "say fine")) == ["fine"]
        fault = fault_of(replies(pool, 1)[1])
        assert (fault.kind, fault.text) == ("timeout", "timed out: its step took longer than 1 s")
        assert "in do_hang" in fault.detail
        assert contents(step(pool, 2, "say still fine")) == ["still fine"]
        begin(pool, 1)


def test_a_coroutine_that_is_late_says_where_it_stood() -> None:
    with opened(AsyncObedient, isolation="shared", step_timeout=0.5) as pool:
        begin(pool, 1)
        fault = fault_of(step(pool, 1, "wait"))
        assert fault.kind == "timeout"
        assert "in do_wait" in fault.detail


@pytest.mark.parametrize("content,kind", [("raise boom", "raised"), ("return set", "answer")])
def test_a_fault_is_that_of_its_episode_alone(content: str, kind: str) -> None:
    with opened(AsyncObedient, isolation="shared") as pool:
        begin(pool, 1, 2)
        assert fault_of(step(pool, 1, content)).kind == kind
        assert contents(step(pool, 2, "say fine")) == ["fine"]


def test_a_coroutine_that_blocks_the_loop_ends_the_process_which_is_started_again() -> None:
    with opened(AsyncObedient, isolation="shared", step_timeout=0.5) as pool:
        begin(pool, 1, 2)
        before = pool.pids()
        pool.step(1, message("hang"))
        fault = fault_of(replies(pool, 1)[1])
        assert fault.kind == "timeout"
        assert fault_of(step(pool, 2, "say x")).kind == "died"
        assert all(ended(pid, 20) for pid in before)
        begin(pool, 1)


def test_a_process_that_ends_is_the_fault_of_all_its_episodes() -> None:
    with opened(isolation="shared") as pool:
        begin(pool, 1, 2)
        pool.step(2, message("hang"))
        pool.step(1, message("abort"))
        for reply in replies(pool, 2).values():
            fault = fault_of(reply)
            assert fault.text == "lost its process, which was killed by SIGABRT"
            assert "  | the last words\n" in fault.detail
        begin(pool, 1)


def test_an_abandoned_episode_leaves_the_others() -> None:
    with opened(AsyncObedient, isolation="shared") as pool:
        begin(pool, 1, 2)
        pool.step(1, message("wait"))
        pool.abandon(1)
        assert contents(step(pool, 2, "say fine")) == ["fine"]
        begin(pool, 1)


class Cancelled(AsyncObedient):
    """Says that its call was cancelled."""

    async def do_last(self, rest: str) -> Any:
        await AsyncObedient.do_meet(self, rest)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            print("cancelled")
            raise


def test_the_call_of_an_abandoned_episode_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    with opened(Cancelled, isolation="shared") as pool:
        begin(pool, 1, 2)
        pool.step(1, message("last"))
        assert contents(step(pool, 2, "wait")) == ["met"]
        pool.abandon(1)
        # The process answers in order, and prints before it does.
        begin(pool, 3)
        step(pool, 3, "say on")
    assert "environment 'played' printed: cancelled" in caplog.text


@pytest.mark.parametrize("isolation", ["process", "shared"])
def test_an_environment_is_closed_when_its_pool_is(
    isolation: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(AsyncObedient, isolation=isolation) as pool:
        begin(pool, 1)
        finish(pool, 1)
    # Of what is printed at the end nothing is promised; but everything has ended.
    assert pool.pids() == []


def test_coroutines_run_in_the_kernels_own_process_too(caplog: pytest.LogCaptureFixture) -> None:
    with opened_here(AsyncObedient) as here, opened(AsyncObedient) as pool:
        for each in (here, pool):
            begin(each, 1)
            assert contents(step(each, 1, "say hi")) == ["hi"]
            assert finish(each, 1).reward == 2.5
    assert "environment 'played' printed: closed" in caplog.text


def test_methods_of_one_episode_have_one_thread() -> None:
    with opened(Threaded, isolation="shared") as pool:
        begin(pool, 1, 2)
        assert [contents(step(pool, episode, "x")) for episode in (1, 2)] == [["same"], ["same"]]


class Threaded(Obedient):
    """Has what may be used only in the thread that made it, as connections of sqlite3."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def step(self, message: dict[str, object]) -> object:
        is_same = threading.get_ident() == self._thread
        return "same" if is_same else "another", None, False
