"""Several pools as one: rows go to the environment that they name, and all are waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dataflow.errors import DataError
from operators.environments import environments_by, tools
from operators.kernels.environments.in_process import InProcessPool
from operators.kernels.environments.pool import ProcessPool
from operators.kernels.environments.replies import EnvironmentPool, EnvironmentReply
from operators.kernels.environments.routing import RoutedPool

SECONDS = 60.0


class Teller:
    """Tells the columns that it gets."""

    def reset(self, **row: Any) -> str:
        return ", ".join(f"{name}={cell}" for name, cell in sorted(row.items()))


class NamedTeller(Teller):
    """It takes the column that names it, too."""

    def reset(self, task: str) -> str:
        return task


class Faulty:
    """Cannot begin."""

    def reset(self) -> None:
        raise ValueError("no start")


def add(first: int, second: int) -> int:
    """Adds."""
    return first + second


@pytest.fixture
def pool() -> Iterator[RoutedPool]:
    kinds = {"tells": Teller, "named": NamedTeller, "faulty": Faulty, "adds": tools(add)}
    environment = environments_by("task", kinds)
    pools: dict[str, EnvironmentPool] = {}
    for name, kind in environment.kinds.items():
        pools[name] = ProcessPool(kind, name=name, reset_timeout=SECONDS, step_timeout=SECONDS)
    pools["named"].close()
    pools["named"] = InProcessPool(environment.kinds["named"], name="named")
    routed = RoutedPool(environment, pools, name="tested")
    yield routed
    routed.close()
    routed.close()


def wait_for(pool: RoutedPool, count: int) -> dict[int, EnvironmentReply]:
    """So many replies, by their episodes."""
    replies: dict[int, EnvironmentReply] = {}
    while len(replies) < count:
        new = pool.wait(SECONDS)
        assert new, f"expected {count} replies, found {len(replies)}"
        replies.update({reply.episode: reply for reply in new})
    return replies


def test_rows_go_to_the_environment_that_they_name(pool: RoutedPool) -> None:
    for number, task in enumerate(("tells", "named", "faulty", "adds", "tells")):
        pool.reset(number, 1, {"task": task, "size": number})
    replies = wait_for(pool, 5)
    # The column that names the kind is no column of an environment that does not ask for it.
    assert replies[0].text == "size=0"
    assert replies[1].text == "named"
    fault = replies[2].fault
    assert fault is not None
    assert "no start" in fault.text
    assert replies[3].tools[0]["function"]["name"] == "add"
    assert replies[4].text == "size=4"
    call = {"type": "function", "function": {"name": "add", "arguments": {"first": 1, "second": 2}}}
    pool.step(3, {"role": "assistant", "content": "", "tool_calls": [call]})
    assert wait_for(pool, 1)[3].messages[0]["content"] == "3"
    for number in (0, 1, 3):
        pool.finish(number, "stop")
    assert {reply.call for reply in wait_for(pool, 3).values()} == {"finish"}
    assert pool.wait(None) == []


class Stuck:
    """Never begins."""

    def reset(self) -> None:
        threading.Event().wait()


@pytest.mark.timeout(60)
def test_limits_of_time_are_those_of_each_kind() -> None:
    environment = environments_by("task", {"tells": Teller, "stuck": Stuck})
    pools: dict[str, EnvironmentPool] = {}
    for name, kind in environment.kinds.items():
        pools[name] = ProcessPool(kind, name=name, reset_timeout=1.0, step_timeout=SECONDS)
    routed = RoutedPool(environment, pools, name="tested")
    try:
        routed.reset(1, 1, {"task": "stuck"})
        [reply] = routed.wait(20.0)
    finally:
        routed.close()
    assert reply.fault is not None
    assert reply.fault.text == "timed out: its reset took longer than 1 s"


def test_an_episode_that_is_given_up_is_not_waited_for(pool: RoutedPool) -> None:
    pool.reset(1, 1, {"task": "tells"})
    pool.abandon(1)
    pool.abandon(2)
    assert pool.wait(None) == []
    pool.reset(1, 1, {"task": "adds"})
    assert wait_for(pool, 1)[1].fault is None


def test_a_row_that_names_no_kind_is_refused(pool: RoutedPool) -> None:
    with pytest.raises(DataError, match="one of tells, named, faulty, adds, found 'chess'"):
        pool.reset(0, 1, {"task": "chess"})
    with pytest.raises(DataError, match="found None"):
        pool.reset(0, 1, {})
    assert pool.wait(None) == []
