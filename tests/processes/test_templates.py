"""Workers that are forked from a template: what they have of it, how they end, what ends them."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from dataflow.errors import RunError
from dataflow.schema import Prompt, Reward
from dataflow.user import Columns, operator
from engine.protocol import messages as m
from engine.run.launch import template
from engine.run.launch.starter import Starter
from engine.run.launch.supervisor import Supervisor
from tests.kit import host_plans
from tests.kit.processes import children, command_of, ended, parent_of, workers
from tests.kit.supervisors import Start

pytestmark = pytest.mark.timeout(180)
SOON = 20.0


def templates() -> list[int]:
    """The templates that this process has started."""
    return [
        pid for pid in children() if "engine.run.worker_process.template_process" in command_of(pid)
    ]


def test_workers_with_one_environment_come_of_one_template(start: Start) -> None:
    with start(host_plans.plan()) as supervisor:
        (pid,) = templates()
        assert workers() == supervisor.pids()
        assert {parent_of(worker) for worker in workers().values()} == {pid}
        for name, worker in workers().items():
            assert Path(os.readlink(f"/proc/{worker}/fd/1")).stem == name
        supervisor.respawn(["host"])
        host_plans.until(supervisor, m.WorkerOpened)
        assert templates() == [pid]
        assert workers() == supervisor.pids()


def test_a_forked_worker_has_nothing_open_of_another(start: Start) -> None:
    """Else the end of one would be noticed only after that of all."""
    with start(host_plans.plan()) as supervisor:
        first, second = (sockets(pid) for pid in supervisor.pids().values())
        assert first
        assert not first & second
        assert not (first | second) & sockets(templates()[0])


def sockets(pid: int) -> set[str]:
    """The sockets, pipes and polls that a process has open."""
    found = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
    return {each for each in found if each.startswith(("socket:", "pipe:"))}


@operator()
def draws(prompt: Columns[Prompt]) -> Columns[Reward]:
    """Prints a number of the generator that Python has for all, and one of NumPy's."""
    print(f"drew {random.random()} and {np.random.random()}")
    return host_plans.doubled.fn(prompt)


@pytest.mark.long
def test_forked_workers_draw_different_numbers(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of generators that nobody has seeded, as in interpreters of their own."""
    monkeypatch.setattr(Starter, "_modules", lambda *_: ["numpy.random"])
    with start(host_plans.plan(draws)) as supervisor:
        for number in range(3):
            if number:
                supervisor.respawn(["host"])
                host_plans.until(supervisor, m.WorkerOpened)
            ref = host_plans.produced_block(supervisor, number=number)
            supervisor.tell(host_plans.chunk_of(1, ref, node="draws"))
            host_plans.until(supervisor, m.ChunkDone)
        drawn = re.findall(r"drew (\S+) and (\S+)", supervisor._folder.log("host").read_text())
    assert [len(set(each)) for each in zip(*drawn, strict=True)] == [3, 3]


@pytest.mark.long
def test_with_a_template_its_workers_end_and_others_come_of_a_new_one(start: Start) -> None:
    with start(host_plans.plan()) as supervisor:
        before, (pid,) = supervisor.pids(), templates()
        os.kill(pid, signal.SIGKILL)
        assert all(child.over.wait(SOON) for child in supervisor._io.children.values())
        heard = [host_plans.until(supervisor, m.WorkerLost)[-1] for _ in before]
        assert {death.worker for death in heard} == set(before)
        assert all(ended(worker, SOON) for worker in before.values())
        supervisor.respawn(list(before))
        for _ in before:
            host_plans.until(supervisor, m.WorkerOpened)
        assert pid not in templates()
        assert workers() == supervisor.pids()
        assert len(host_plans.produced_block(supervisor).keys) == 4


def test_the_end_of_a_worker_is_seen_while_its_template_is_stopped(start: Start) -> None:
    with start(host_plans.plan()) as supervisor:
        (pid,) = templates()
        os.kill(pid, signal.SIGSTOP)
        child = supervisor._io.children["host"]
        os.kill(child.process.pid, signal.SIGKILL)
        assert child.over.wait(SOON)
        death = host_plans.until(supervisor, m.WorkerLost)[-1]
        os.kill(pid, signal.SIGCONT)
        assert death.worker == "host"
        assert "was killed by SIGKILL" in death.error


@pytest.mark.long
def test_of_a_template_that_stays_stopped_no_worker_is_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "_ANSWER", 0.5)
    with start(host_plans.plan()) as supervisor:
        (pid,) = templates()
        os.kill(pid, signal.SIGSTOP)
        supervisor.respawn(["host"])
        opened = [host_plans.until(supervisor, m.WorkerOpened)[-1]]
        assert {each.worker for each in opened} == {"host"}
        assert pid not in templates()


@pytest.mark.long
def test_another_environment_or_folder_is_another_template(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that is started later has what this one has then."""

    def begun_again(supervisor: Supervisor, worker: str) -> Path:
        supervisor.respawn([worker])
        host_plans.until(supervisor, m.WorkerOpened)
        return Path("/proc", str(supervisor.pids()[worker]))

    with start(host_plans.plan()) as supervisor:
        monkeypatch.setenv("SET_LATER", "1")
        first = begun_again(supervisor, "host")
        assert b"SET_LATER=1" in (first / "environ").read_bytes().split(b"\0")
        monkeypatch.chdir(tmp_path)
        second = begun_again(supervisor, "source")
        assert os.readlink(second / "cwd") == str(tmp_path) != os.readlink(first / "cwd")
        assert len(templates()) == 3


def test_a_template_that_cannot_import_is_told_of(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "_BOOTSTRAP", "raise SystemExit('no interpreter today')")
    told = "worker source: expected a process that imports for it and others, found that it ended"
    with pytest.raises(RunError, match=told) as caught, start(host_plans.plan()):
        pass
    log = str(caught.value).rpartition("see the end of ")[2].rstrip(".")
    assert Path(log).read_text() == "no interpreter today\n" * 2
