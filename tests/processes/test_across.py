"""Runs in several processes: the same numbers as in one, errors with their names."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import DataError, KernelError, RunError
from dataflow.graph import Graph
from engine.api import resume
from engine.launch.supervisor import Supervisor
from engine.observe.trace import read_trace
from tests.kit import run_graphs as graphs
from tests.kit import runs
from tests.kit.killable_run import killable_run, require_stopped
from tests.kit.nothing_left import require_ended
from tests.kit.processes import KillWorkers, descendants, wait_for, wait_for_error
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)
APART = {"rollout": "gen", "train_policy": "train"}


# the same bits wherever it runs


FOLLOWERS = {"train_policy": "train", "train_critic": "train", "past": "slow", "values": "slow"}
THREE = {"chunks": {"rollout": 3}}
SPREAD = {
    "three processes": (
        partial(graphs.evaluated, keep_best=1),
        {"pin": APART | {"greedy_rollout": "gen", "sampled_rollout": "train"}},
        {},
    ),
    "followers elsewhere": (graphs.followed, {"pin": FOLLOWERS}, {}),
    "replicas": (graphs.small, {"replicas": {"rollout": 2}} | THREE, THREE),
    "every node apart": (graphs.small, {"workers": "apart"}, {}),
    "three replicas": (graphs.small, {"replicas": {"rollout": 3}}, THREE),
}
FAST = "replicas"
"""The case that is not marked long: a process with tensors takes three seconds to start."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == FAST else [pytest.mark.long]) for n in SPREAD]
)
def test_the_bits_of_one_process(tiny: TinyRuns, name: str) -> None:
    make, spread, alone = SPREAD[name]
    one = tiny.run(make, 4, name="one", checkpoint_every=2, **alone)
    several = tiny.run(make, 4, name="several", checkpoint_every=2, **spread)
    runs.require_same_runs(several, one)
    assert runs.best_names(several) == runs.best_names(one)


@pytest.mark.long
def test_two_ranks_train_as_one_does(tiny: TinyRuns) -> None:
    one = tiny.run(graphs.small, name="one")
    two = tiny.run(graphs.small, name="two", ranks={"train_policy": 2})
    runs.require_alike(two, one, rel=1e-5)


def test_with_lag_generation_and_training_overlap_and_the_bound_holds(tiny: TinyRuns) -> None:
    graph = graphs.small(tiny.folder, max_lag=1)
    result = tiny.run(graph, 6, workers="auto", checkpoint_every=3)
    rows = runs.metrics(result)
    assert max(runs.column(result, "policy/lag/max")) <= 1
    runs.require_each_row_once(result, 24, 4)
    busy = [name for name in rows[0] if name.startswith("worker/")]
    assert len(busy) >= 2
    shares = [row[name] for row in rows for name in busy]
    assert all(0.0 <= share <= 1.0 and math.isfinite(share) for share in shares)
    assert "time/engine" not in rows[0]
    assert (result.folder / "logs" / "coordinator.log").read_text().count("ended at step 6") == 1
    (trace,) = (result.folder / "trace").iterdir()
    named = [e for e in read_trace(trace) if e["ph"] == "M" and e["name"] == "process_name"]
    assert {name.split("/")[1] for name in busy} <= {e["args"]["name"] for e in named}


@pytest.mark.long
def test_a_run_goes_on_in_other_places(tiny: TinyRuns) -> None:
    whole = tiny.run(graphs.followed, 6, name="whole")
    part = tiny.run(graphs.followed, 2, name="part")
    pin = {"train_policy": "train", "train_critic": "train", "values": "values"}
    resume(part.folder, steps=4, pin=pin)
    runs.require_same_runs(resume(part.folder, steps=6, pin={}), whole)


# stopped


@pytest.mark.long
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_reaches_every_process_and_the_run_decides_what_it_means(
    tiny: TinyRuns, presses: int
) -> None:
    options = tiny.options(100_000, name="killed", workers="auto", checkpoint_every=2)
    with killable_run("lagging", tiny.folder, options) as process:
        wait_for(process, "step 3")
        there = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        wait_for_error(process, "Ctrl-C again")
        if presses == 2:
            os.killpg(process.pid, signal.SIGINT)
            process.communicate()
            assert process.returncode != 0
        else:
            require_stopped(process, tiny.runs / "killed", "Ctrl-C", 130)
    assert len(there) >= 2
    require_ended(there)
    if presses == 1:
        for log in (tiny.runs / "killed" / "logs").iterdir():
            assert "KeyboardInterrupt" not in log.read_text(), log.name


# killed


@pytest.mark.long
def test_workers_that_are_killed_change_nothing(
    tiny: TinyRuns, caplog: pytest.LogCaptureFixture
) -> None:
    graph = partial(graphs.evaluated, keep_best=1)
    pin = APART | {"greedy_rollout": "gen"}
    deaths = KillWorkers({2: "gen", 3: "train"})
    whole = tiny.run(graph, 6, name="whole", checkpoint_every=2)
    killed = tiny.run(graph, 6, name="killed", checkpoint_every=2, pin=pin, on_step=[deaths])
    runs.require_same_runs(killed, whole)
    assert runs.best_names(killed) == runs.best_names(whole)
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    began_anew = [line for line in told if "Worker gen was lost" in line and "SIGKILL" in line]
    assert len(began_anew) == 1
    back = "going back to the last checkpoint, as Worker train was lost"
    assert sum(back in line for line in told) == 1


@pytest.mark.long
def test_with_lag_a_generator_that_is_killed_loses_no_row(tiny: TinyRuns) -> None:
    deaths = KillWorkers({2: "rollout", 5: "rollout"})
    result = tiny.run(graphs.small(tiny.folder, max_lag=1), 8, workers="auto", on_step=[deaths])
    runs.require_each_row_once(result, 32, 4)
    assert max(runs.column(result, "policy/lag/max")) <= 1


# what goes wrong


def overlong(folder: Path) -> Graph:
    """Prompts that its generate refuses."""
    return graphs.small(folder).replace(
        rollout=graphs.rolled_out(folder, 4, max_prompt_tokens=1)[1]
    )


ERRORS = {
    "operator": (
        partial(graphs.with_score, change=graphs.breaks),
        ("breaks", KernelError, ["breaks: ", "(0, 0, 0)", "out of luck", "run_graphs.py"]),
    ),
    "train": (
        partial(graphs.with_score, loss_of=graphs.not_a_number),
        ("score", KernelError, ["train_policy: step 1", "found nan"]),
    ),
    "reward": (
        partial(graphs.small, fn=graphs.raises),
        ("score", KernelError, ["'score'", "row 0/0", "ZeroDivisionError"]),
    ),
    "generate": (
        overlong,
        ("rollout", DataError, ["rollout: row (0, 0, 0)", "at most 1 prompt tokens"]),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "operator" else [pytest.mark.long]) for n in ERRORS]
)
def test_an_error_arrives_with_its_names(tiny: TinyRuns, name: str) -> None:
    make, (worker, kind, told) = ERRORS[name]
    with pytest.raises(kind) as caught:
        tiny.run(make, 2, pin={worker: "elsewhere"})
    assert [part for part in told if part not in str(caught.value)] == []


@pytest.fixture
def watched_once_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog counts from when all Workers are open, however long their imports take."""
    opened, open_all, doing = threading.Event(), Supervisor.opened, Supervisor.doing

    def told(supervisor: Supervisor, timeout: float | None = 0.0) -> Any:
        events = open_all(supervisor, timeout)
        if events is not None:
            opened.set()
        return events

    monkeypatch.setattr(Supervisor, "opened", told)
    monkeypatch.setattr(
        Supervisor, "doing", lambda self: doing(self) if opened.is_set() else object()
    )


@pytest.mark.long
@pytest.mark.usefixtures("watched_once_open")
def test_a_node_that_hangs_is_named(tiny: TinyRuns, capfd: pytest.CaptureFixture[str]) -> None:
    named = r"nothing has moved for 10 s; ops is in run_graphs.py:\d+ hangs \(chunk \d+, 8 rows\)"
    with pytest.raises(RunError, match=named) as caught:
        tiny.run(
            graphs.with_score(tiny.folder, graphs.hangs), 2, watchdog=10.0, pin={"hangs": "ops"}
        )
    stood = r"ops, process \d+, stood at:(\n.*)*/run_graphs.py\", line \d+ in hangs\n"
    assert re.search(stood, str(caught.value))
    assert "advantage: " in capfd.readouterr().err, "who waits for it"
