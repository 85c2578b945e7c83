"""Runs in several processes: the same numbers as in one, errors with their names."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from typing import Any

import pytest

from dataflow.errors import RunError
from engine.run.launch.supervisor import Supervisor
from tests.kit import run_graphs as graphs
from tests.kit import runs
from tests.kit.killable_run import killable_run, require_stopped
from tests.kit.nothing_left import require_ended
from tests.kit.processes import KillWorkers, descendants, wait_for
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)
APART = {"rollout": "gen", "train_policy": "train"}


# the same bits wherever it runs


FOLLOWERS = {"train_policy": "train", "train_critic": "train", "past": "slow", "values": "slow"}
EVALUATIONS = {"greedy_rollout": "gen", "sampled_rollout": "train"}


@pytest.mark.long
@pytest.mark.repeats
@pytest.mark.parametrize(("make", "spread"), [
    (partial(graphs.evaluated, keep_best=1), {"pin": APART | EVALUATIONS}),
    (graphs.followed, {"pin": FOLLOWERS}),
    (graphs.small, {"replicas": {"rollout": 2}}),
], ids=["three processes", "followers elsewhere", "replicas"])  # fmt: skip
def test_the_bits_of_one_process(tiny: TinyRuns, make: Any, spread: dict[str, Any]) -> None:
    how: dict[str, Any] = {"checkpoint_every": 2, "chunks": {"rollout": 3}}
    one = tiny.run(make, 4, name="one", **how)
    several = tiny.run(make, 4, name="several", **how, **spread)
    runs.require_same_runs(several, one)
    assert runs.best_names(several) == runs.best_names(one)


@pytest.mark.long
def test_with_lag_generation_and_training_overlap_and_the_bound_holds(tiny: TinyRuns) -> None:
    graph = graphs.small(tiny.folder, max_lag=1)
    result = tiny.run(graph, 6, workers="auto", checkpoint_every=3)
    assert max(runs.column(result, "policy/lag/max")) <= 1
    runs.require_each_row_once(result, 24, 4)
    busy = {k: v for k, v in runs.metrics(result)[-1].items() if k.startswith("worker/")}
    assert len(busy) >= 2
    assert all(0.0 <= share <= 1.0 for share in busy.values())


# stopped


@pytest.mark.long
def test_ctrl_c_reaches_every_process_and_the_run_decides_what_it_means(tiny: TinyRuns) -> None:
    options = tiny.options(100_000, name="killed", workers="auto", checkpoint_every=2)
    with killable_run("lagging", tiny.folder, options) as process:
        wait_for(process, "step 3")
        there = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        require_stopped(process, tiny.runs / "killed", "Ctrl-C", 130)
    assert len(there) >= 2
    require_ended(there)
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


# what goes wrong


@pytest.fixture
def watched_once_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog counts from when all Workers are open, however long their imports take."""
    doing = Supervisor.doing

    def seen(supervisor: Supervisor) -> Any:
        are_open = all(child.opened for child in supervisor._io.children.values())
        return doing(supervisor) if are_open else object()  # another one each time: it moves

    monkeypatch.setattr(Supervisor, "doing", seen)


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
