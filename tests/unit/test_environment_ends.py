"""How environments end whose episodes came to nothing: told, closed, and killed if stuck."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from operators.environment_kinds import trl_environment
from operators.environments import Environment
from operators.kernels.environments.pool import ProcessPool
from operators.kernels.environments.replies import EnvironmentPool
from tests.kit.environment_classes import NotingEnds, message
from tests.kit.environment_pools import (
    SECONDS,
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

PLACES = ("process", "shared", "here")


class CallRecord:
    """What the environments of a pool were asked, and the pool."""

    def __init__(self, pool: EnvironmentPool, path: Path) -> None:
        self.pool = pool
        self._path = path

    def lines(self) -> list[str]:
        return self._path.read_text().splitlines() if self._path.exists() else []

    def process_count(self) -> int:
        assert isinstance(self.pool, ProcessPool)
        return len(self.pool.pids())

    def after(self, count: int) -> list[str]:
        """The lines, once there are so many; the pool is looked at meanwhile."""
        end = time.monotonic() + SECONDS
        while len(self.lines()) < count:
            assert time.monotonic() < end, self.lines()
            self.pool.wait(0.02)
        return self.lines()


@contextmanager
def recorded(place: str, folder: Path, step_timeout: float = 60.0) -> Iterator[CallRecord]:
    """A pool of NotingEnds in this place."""
    path = folder / "record"
    environment = Environment(adapter="native", target=NotingEnds, arguments={"record": str(path)})
    if place == "here":
        with opened_here(environment) as here:
            yield CallRecord(here, path)
    else:
        with opened(environment, isolation=place, step_timeout=step_timeout) as pool:
            yield CallRecord(pool, path)


@pytest.mark.parametrize("content", ["raise boom", "return set", "return role"])
@pytest.mark.parametrize("place", PLACES)
def test_an_environment_that_fails_is_told_and_closed(
    place: str, content: str, tmp_path: Path
) -> None:
    with recorded(place, tmp_path) as record:
        begin(record.pool, 1)
        assert step(record.pool, 1, content).fault is not None
        word = content.partition(" ")[0]
        expected = ["reset", f"step {word}", "finish error", "close"]
        assert record.after(4) == expected
    assert record.lines() == expected


@pytest.mark.parametrize("place", PLACES)
def test_an_episode_that_is_given_up_is_closed_and_told_the_reason_if_there_is_one(
    place: str, tmp_path: Path
) -> None:
    with recorded(place, tmp_path) as record:
        begin(record.pool, 1)
        record.pool.abandon(1, "error")
        assert record.after(3) == ["reset", "finish error", "close"]
        begin(record.pool, 1)
        record.pool.abandon(1)
        assert record.after(5)[3:] == ["reset", "close"]
        assert record.pool.wait(None) == [], "no reply comes"
    assert len(record.lines()) == 5


@pytest.mark.parametrize("place", ["process", "shared"])
def test_one_that_is_given_up_in_a_call_ends_behind_it(place: str, tmp_path: Path) -> None:
    with recorded(place, tmp_path) as record:
        begin(record.pool, 1)
        record.pool.step(1, message(f"await {tmp_path}/go"))
        record.after(2)
        record.pool.abandon(1, "timeout")
        (tmp_path / "go").touch()
        assert record.after(4) == ["reset", "step await", "finish timeout", "close"]


def test_one_that_is_stuck_is_killed_and_holds_nobody_up(tmp_path: Path) -> None:
    with recorded("process", tmp_path, step_timeout=1.0) as record:
        begin(record.pool, 1, 2, 3)
        pids = [int(contents(step(record.pool, episode, "pid"))[0]) for episode in (1, 2)]
        step(record.pool, 1, "end hang")
        record.pool.abandon(1, "error")
        record.pool.step(2, message("hang"))
        record.pool.abandon(2, "error")
        assert contents(step(record.pool, 3, "say fine")) == ["fine"]
        end = time.monotonic() + SECONDS
        while not all(ended(pid, 0) for pid in pids):
            assert time.monotonic() < end
            record.pool.wait(0.02)
    assert record.lines().count("finish error") == 1
    assert record.lines().count("close") == 1, "that of the third, with the pool"


def test_nothing_is_left_of_those_that_ended(tmp_path: Path) -> None:
    with recorded("process", tmp_path) as record, opened() as other:
        begin(other, 1)  # whatever the first process opens once is open
        begin(record.pool, 0)
        files, processes = os.listdir("/proc/self/fd"), record.process_count()
        begin(record.pool, 1, 2, 3)
        step(record.pool, 1, "raise boom")
        step(record.pool, 2, "end raise")
        record.pool.abandon(2, "error")
        step(record.pool, 3, "children")  # one of them stays, and could still print
        record.pool.abandon(3)
        end = time.monotonic() + SECONDS
        while record.process_count() > processes:
            assert time.monotonic() < end
            record.pool.wait(0.02)
        assert record.lines().count("close") == 3
        assert len(os.listdir("/proc/self/fd")) == len(files)


@pytest.mark.parametrize("place", PLACES)
def test_what_a_last_finish_raises_is_noted_and_it_is_closed(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with recorded(place, tmp_path) as record:
        begin(record.pool, 1)
        step(record.pool, 1, "end raise")
        record.pool.abandon(1, "error")
        assert record.after(4)[2:] == ["finish error", "close"]
        end = time.monotonic() + SECONDS
        while "its finish raised ValueError: no end is good" not in caplog.text:
            assert time.monotonic() < end
            record.pool.wait(0.02)


@pytest.mark.parametrize("place", PLACES)
def test_what_did_not_begin_or_has_finished_is_not_told_again(place: str, tmp_path: Path) -> None:
    with recorded(place, tmp_path) as record:
        record.pool.reset(13, 7, {"question": "q13"})
        assert "unlucky" in fault_of(replies(record.pool, 1)[13]).text
        assert record.after(2) == ["reset", "close"]
        begin(record.pool, 1)
        step(record.pool, 1, "end raise")
        assert "no end is good" in fault_of(finish(record.pool, 1)).text
        assert record.after(6)[2:] == ["reset", "step end", "finish stop", "close"]


@pytest.mark.parametrize("place", PLACES)
def test_all_environments_of_a_pool_that_closes_are_closed(place: str, tmp_path: Path) -> None:
    with recorded(place, tmp_path) as record:
        begin(record.pool, 1, 2, 3)
        finish(record.pool, 1)
        if place != "here":
            record.pool.step(2, message(f"await {tmp_path}/go"))
            record.after(5)
            (tmp_path / "go").touch()
    lines = record.lines()
    assert lines.count("close") == 3
    assert [line for line in lines if line.startswith("finish")] == ["finish stop"]


class Ringing:
    """In TRL's form, with an end of its own."""

    def __init__(self) -> None:
        self._is_open = False

    def reset(self) -> None:
        self._is_open = True

    def ring(self) -> str:
        """Ring the bell."""
        return "rings"

    def close(self) -> None:
        """Take the bell down."""
        print("the bell is down")


def test_an_environment_in_trls_form_is_closed_and_its_close_is_no_tool(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with opened_here(trl_environment(Ringing)) as here:
        here.reset(1, 7, {})
        tools = replies(here, 1)[1].tools
        assert [tool["function"]["name"] for tool in tools] == ["ring"]
        here.abandon(1)
    assert "the bell is down" in caplog.text
