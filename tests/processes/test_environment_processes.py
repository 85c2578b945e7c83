"""What environments leave: nothing, however their pool ends; and many of them at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from operators.kernels.environments.pool import ProcessPool
from operators.kernels.environments.replies import EnvironmentFault
from tests.kit.environment_classes import AsyncObedient, Obedient, Reluctant, message
from tests.kit.environment_pools import begin, contents, fault_of, opened, replies, step
from tests.kit.nothing_left import descriptors
from tests.kit.processes import ended, limited, start_python

pytestmark = pytest.mark.timeout(180)

KINDS = [(Obedient, "process"), (Obedient, "shared"), (AsyncObedient, "shared")]


def pids_of(pool: Any) -> list[int]:
    """The processes of a pool in which an episode has started children."""
    pids: list[int] = json.loads(contents(step(pool, 1, "children"))[0])
    return [*pool.pids(), *pids]


@pytest.mark.parametrize("target,isolation", KINDS)
def test_nothing_is_left_when_the_pool_is_closed(target: Any, isolation: str) -> None:
    before = descriptors()
    with opened(target, isolation=isolation) as pool:
        begin(pool, 1, 2)
        pids = pids_of(pool)
        pool.step(2, message("hang"))
    assert len(pids) >= 5
    assert all(ended(pid, 0) for pid in pids)
    assert descriptors() == before


@pytest.mark.parametrize("target,isolation", KINDS)
def test_nothing_is_left_when_an_error_passes(target: Any, isolation: str) -> None:
    pids: list[int] = []
    with pytest.raises(ZeroDivisionError):
        fail_inside(target, isolation, pids)
    assert len(pids) >= 5
    assert all(ended(pid, 0) for pid in pids)


def test_a_call_whose_time_is_up_as_its_pool_closes_holds_nothing_up() -> None:
    with opened(Reluctant, step_timeout=0.2) as pool:
        begin(pool, 1, 2)
        pids = pool.pids()
        pool.step(1, message("hang"))
    assert all(ended(pid, 0) for pid in pids)


def fail_inside(target: Any, isolation: str, pids: list[int]) -> None:
    with opened(target, isolation=isolation) as pool:
        begin(pool, 1)
        pids += pids_of(pool)
        1 / 0


PARENT = """
import sys
from tests.kit import environment_classes
from tests.kit.environment_pools import begin, opened, step
from tests.processes.test_environment_processes import message, pids_of

target = getattr(environment_classes, sys.argv[1])
with opened(target, isolation=sys.argv[2]) as pool:
    begin(pool, 1, 2)
    pids = pids_of(pool)
    pool.step(2, message("hang"))
    print(*pids, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("target,isolation", KINDS)
def test_nothing_is_left_when_the_pools_process_is_killed(
    target: Any, isolation: str, is_stopped: bool
) -> None:
    """Also where somebody has stopped the keeper and everything below it."""
    how: Any = {"stdin": subprocess.PIPE, "stderr": None}
    with limited(start_python("-c", PARENT, target.__name__, isolation, **how)) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) >= 5
        for pid in pids if is_stopped else ():
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
        assert parent.stdout.read() == "", "nobody below it has its standard output"
    assert all(ended(pid, 20) for pid in pids)


def test_a_keeper_that_is_killed_takes_everything_along() -> None:
    with opened() as pool:
        begin(pool, 1)
        pids = pids_of(pool)
        pool.step(1, message("hang"))
        os.kill(pids[0], signal.SIGKILL)
        fault = fault_of(replies(pool, 1)[1])
        assert fault.text == "lost its process, as the one that watches over it was killed"
        assert all(ended(pid, 0) for pid in pids)


def test_processes_above_a_small_idle_set_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operators.kernels.environments.pool._IDLE", 64)
    count = 70
    with opened() as pool:
        begin(pool, *range(count))
        for episode in range(count):
            pool.finish(episode, "stop")
        replies(pool, count)
        begin(pool, *range(64))
        pids = [int(contents(step(pool, episode, "pid"))[0]) for episode in range(64)]
        others = set(pool.pids()[2:]) - set(pids)
        assert all(ended(pid, 20) for pid in others)


@pytest.mark.parametrize("count", [12, pytest.param(256, marks=pytest.mark.long)])
def test_one_that_hangs_and_one_that_aborts_are_named_and_all_others_finish(count: int) -> None:
    with opened(processes=2, step_timeout=2.0) as pool:
        begin(pool, *range(count))
        faults, finished = played(pool, range(count))
        assert sorted(faults) == [1, 3]
        assert faults[1].text == "timed out: its step took longer than 2 s"
        assert faults[3].text == "lost its process, which was killed by SIGABRT"
        assert len(finished) == count - 2


@pytest.mark.parametrize("count", [12, pytest.param(256, marks=pytest.mark.long)])
def test_of_shared_processes_those_with_the_one_that_aborts_are_lost(count: int) -> None:
    with opened(AsyncObedient, processes=2, isolation="shared") as pool:
        begin(pool, *range(count))
        pool.step(3, message("abort"))
        assert fault_of(replies(pool, 1)[3]).kind == "died"
        faults, finished = played(pool, [episode for episode in range(count) if episode != 3])
        assert sorted(faults) == [episode for episode in range(1, count, 2) if episode != 3]
        assert finished == list(range(0, count, 2))


def played(
    pool: ProcessPool, episodes: Sequence[int]
) -> tuple[dict[int, EnvironmentFault], list[int]]:
    """The faults of a turn, and the episodes that finished after it."""
    for episode in episodes:
        pool.step(episode, message({1: "hang", 3: "abort"}.get(episode, "say x")))
    faults: dict[int, EnvironmentFault] = {}
    for episode, reply in replies(pool, len(episodes)).items():
        if reply.fault is not None:
            faults[episode] = reply.fault
    others = [episode for episode in episodes if episode not in faults]
    for episode in others:
        pool.finish(episode, "stop")
    finished = replies(pool, len(others))
    return faults, sorted(episode for episode in finished if finished[episode].fault is None)
