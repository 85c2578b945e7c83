"""Runs that are killed, stopped and resumed: the same numbers as if nothing had happened, and
nothing left behind.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_graphs import evaluated, followed, small, vowels
from run_processes import ENVIRONMENT, end_of_children, go_on, process, wait_for, wait_for_error

from dataflow.errors import CheckpointError, GraphError
from dataflow.graph import Graph
from engine.api import Result, resume, run
from engine.checkpoint.cut import Cut
from engine.observe.samples import read_samples
from graphs.grpo import grpo
from tests.kit.processes import children
from tests.kit.runs import metrics, timeless, weights

Options = Callable[..., Any]
pytestmark = pytest.mark.timeout(240)
STEPS = 8


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """The uninterrupted run of a graph, made once."""
    from run_script import MAKE

    from engine.options import RunOptions

    runs, made = tmp_path_factory.mktemp("whole"), {}

    def of(graph: str) -> Result:
        if graph not in made:
            options = RunOptions(
                steps=STEPS,
                name=graph,
                runs=runs,
                threads=1,
                progress=False,
                checkpoint_every=2,
                keep=10,
            )
            made[graph] = run(MAKE[graph](tiny), options)
        return made[graph]

    return of


def same_as(whole: Result, folder: Path) -> None:
    """Metrics, weights, samples and best versions of the two, to the bit."""
    assert timeless(metrics(folder)) == timeless(metrics(whole.folder))
    last = f"checkpoints/step_{STEPS}"
    assert weights(folder / last) == weights(whole.folder / last)
    assert read_samples(folder / "samples").equals(read_samples(whole.folder / "samples"))
    best = {
        p.relative_to(whole.folder): p.read_bytes()
        for p in whole.folder.glob("checkpoints/best_*/*/*.safetensors")
    }
    assert {
        p.relative_to(folder): p.read_bytes()
        for p in folder.glob("checkpoints/best_*/*/*.safetensors")
    } == best


# killed


@pytest.mark.long
@pytest.mark.parametrize("graph,seed", [("evaluated", 1), ("evaluated", 2), ("followed", 3)])
def test_killed_at_random_and_resumed(
    tiny: Path, tmp_path: Path, whole: Callable[[str], Result], graph: str, seed: int
) -> None:
    rng = random.Random(seed)
    how: list[str] = []
    for _ in range(2):  # the resumed run is killed as well
        step = rng.randint(1, 3) if not how else rng.randint(5, 7)
        with process(tiny, tmp_path, graph, STEPS, *how, f"hold={step}") as made:
            kill_after(made, step, rng.uniform(0.0, 0.15))
        how = ["resume"]
    result = resume(tmp_path / "killed")
    assert result.step == STEPS
    same_as(whole(graph), tmp_path / "killed")


def kill_after(made: subprocess.Popen[str], step: int, seconds: float) -> None:
    """SIGKILL so long after it has held at a Step, and then see that the kernel has taken the
    reward processes too.
    """
    wait_for(made, f"step {step}")
    there = children(made.pid)
    go_on(made)
    try:
        made.wait(seconds)
    except subprocess.TimeoutExpired:
        made.send_signal(signal.SIGKILL)
    made.wait()
    assert there, "the run had no reward process, so this tests nothing"
    end_of_children(there)


@pytest.mark.parametrize("pattern", [
    "checkpoints/.tmp-step_4/train_policy/model.safetensors",
    pytest.param("checkpoints/.tmp-step_4", marks=pytest.mark.long),
    pytest.param("checkpoints/.tmp-step_4/manifest.json", marks=pytest.mark.long),
    pytest.param("checkpoints/step_4", marks=pytest.mark.long),
    pytest.param("checkpoints/best_evaluate/.tmp-*", marks=pytest.mark.long),
    pytest.param("samples/.step_000003.parquet.tmp", marks=pytest.mark.long),
])  # fmt: skip
def test_killed_while_a_file_is_written(
    tiny: Path, tmp_path: Path, whole: Callable[[str], Result], pattern: str
) -> None:
    with process(tiny, tmp_path, "evaluated", STEPS) as made:
        while not list((tmp_path / "killed").glob(pattern)) and made.poll() is None:
            os.sched_yield()
        made.send_signal(signal.SIGKILL)
        made.wait()
    resume(tmp_path / "killed")
    same_as(whole("evaluated"), tmp_path / "killed")


@pytest.mark.long
def test_killed_before_the_first_checkpoint_begins_anew(
    tiny: Path, tmp_path: Path, whole: Callable[[str], Result]
) -> None:
    with process(tiny, tmp_path, "evaluated", STEPS) as made:
        wait_for(made, "step 1")
        made.send_signal(signal.SIGKILL)
    assert not list((tmp_path / "killed" / "checkpoints").glob("step_*"))
    resume(tmp_path / "killed")
    same_as(whole("evaluated"), tmp_path / "killed")


@pytest.mark.parametrize("seed", [4, pytest.param(5, marks=pytest.mark.long)])
def test_with_lag_nothing_is_lost_or_trained_twice(tiny: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    step = rng.randint(2, 5)
    with process(tiny, tmp_path, "lagging", STEPS, f"hold={step}") as made:
        kill_after(made, step, rng.uniform(0.0, 0.1))
    assert resume(tmp_path / "killed").step == STEPS
    rows = metrics(tmp_path / "killed")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["policy/lag/max"] for row in rows) <= 1
    samples = read_samples(tmp_path / "killed" / "samples")
    keys = sorted(zip(samples["position"].to_pylist(), samples["sample"].to_pylist(), strict=True))
    assert keys == [(position, sample) for position in range(4 * STEPS) for sample in range(4)]


# Ctrl-C


def test_one_ctrl_c_ends_the_step_and_a_resume_goes_on(
    tiny: Path, tmp_path: Path, whole: Callable[[str], Result]
) -> None:
    with process(tiny, tmp_path, "followed", STEPS, "hold=3") as made:
        wait_for(made, "step 3")
        there = children(made.pid)
        made.send_signal(signal.SIGINT)
        out, err = made.communicate()
    assert made.returncode == 130, err
    assert "stopped by Ctrl-C" in out
    assert "Ctrl-C again" in err
    assert "Traceback" not in err
    end_of_children(there)
    last = metrics(tmp_path / "killed")[-1]["step"]
    assert (tmp_path / "killed" / "checkpoints" / f"step_{last}").is_dir()
    assert resume(tmp_path / "killed").step == STEPS
    same_as(whole("followed"), tmp_path / "killed")


@pytest.mark.long
def test_a_signal_to_all_processes_of_a_run_ends_the_step_and_a_resume_goes_on(
    tiny: Path, tmp_path: Path, whole: Callable[[str], Result]
) -> None:
    """SIGTERM from a batch system, as the processes start as well: nobody but the process of the
    run hears of it.
    """
    with process(tiny, tmp_path, "apart", STEPS, "hold=3") as made:
        wait_for(made, "step 3")
        there = [pid for child in children(made.pid) for pid in (child, *children(child))]
        for pid in (made.pid, *there):
            os.kill(pid, signal.SIGTERM)
        out, err = made.communicate()
    assert made.returncode == 143, err
    assert "stopped by SIGTERM" in out
    assert (
        "SIGTERM: stopping after this Step with a checkpoint, within 60 s; another signal to"
        " stop now" in err
    )
    assert "Traceback" not in err
    end_of_children(there)
    last = metrics(tmp_path / "killed")[-1]["step"]
    assert (tmp_path / "killed" / "checkpoints" / f"step_{last}").is_dir()
    assert resume(tmp_path / "killed").step == STEPS
    same_as(whole("evaluated"), tmp_path / "killed")


def test_two_ctrl_c_end_at_once(tiny: Path, tmp_path: Path) -> None:
    """In a Step that never ends, so that it is the second that ends the run."""
    with process(tiny, tmp_path, "stuck", 100_000) as made:
        wait_for_error(made, "reward 'says_and_hangs' printed: hangs")
        there = children(made.pid)
        os.kill(made.pid, signal.SIGINT)
        wait_for_error(made, "Ctrl-C again")
        os.kill(made.pid, signal.SIGINT)
        _, err = made.communicate()
    assert made.returncode != 0
    assert "Signalled: ended at once by Ctrl-C" in err
    end_of_children(there)


@pytest.mark.long
def test_the_command_line_says_how_to_go_on(tiny: Path, tmp_path: Path) -> None:
    code = "import sys; from engine.cli import main; sys.exit(main())"
    flags = [
        "--base",
        tiny / "model",
        "--data",
        tiny / "train.parquet",
        "--reward-fn",
        "run_graphs:vowels",
    ]
    flags += [
        "--n",
        2,
        "--batch",
        4,
        "--max-tokens",
        6,
        "--steps",
        100_000,
        "--runs",
        tmp_path,
        "--threads",
        1,
    ]
    command = [sys.executable, "-c", code, "run", "graphs.grpo:grpo", *map(str, flags)]
    made = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    late = threading.Timer(150, made.kill)
    late.start()
    try:
        assert made.stdout is not None
        while "step 3" not in made.stdout.readline():
            assert made.poll() is None
        made.send_signal(signal.SIGINT)
        out, err = made.communicate()
    finally:
        late.cancel()
        made.kill()
    assert made.returncode == 130, err
    assert f"dataflow resume {tmp_path / 'grpo'}" in out


# resumed


def test_resuming_a_finished_run_changes_nothing(tiny: Path, options: Options) -> None:
    first = run(evaluated(tiny), options(3))
    before = metrics(first.folder)
    again = resume(first.folder)
    assert again.step == 3
    assert timeless(metrics(first.folder)) == timeless(before)


def test_options_that_change_stay_changed(tiny: Path, options: Options) -> None:
    first = run(small(tiny), options(1))
    assert resume(first.folder, steps=2).step == 2
    assert resume(first.folder).step == 2
    assert [row["step"] for row in metrics(first.folder)] == [1, 2]
    assert len(list((first.folder / "trace").iterdir())) == 3


def test_a_run_with_a_lambda_goes_on_with_its_graph_made_anew(tiny: Path, options: Options) -> None:
    def graph() -> Graph:
        return small(tiny, lambda completions, **kwargs: [float(len(c)) for c in completions])

    first = run(graph(), options(steps=2))
    with pytest.raises(GraphError, match="no other process can import"):
        resume(first.folder, steps=4)
    assert resume(first.folder, graph=graph(), steps=4).step == 4


def test_another_graph_is_refused(tiny: Path, options: Options) -> None:
    first = run(small(tiny), options(1))
    other = grpo(
        str(tiny / "model"), str(tiny / "train.parquet"), vowels, n=2, batch=4, max_tokens=6
    )
    with pytest.raises(
        CheckpointError, match=r"node rollout: n: 4 -> 2\n  node train_policy: lr: 0.001 -> 1e-06\n"
    ):
        resume(first.folder, graph=other)
    before = (first.folder / "graph.json").read_text()
    assert resume(first.folder, graph=other, accept_changes=True, steps=2).step == 2
    assert (first.folder / "graph.json").read_text() != before
    assert resume(first.folder, steps=3).step == 3  # which is asked for once
    cut = Cut.from_json((first.folder / "checkpoints" / "step_3" / "cut.json").read_bytes())
    assert cut.record is not None
    assert [(c.step, c.what, c.new) for c in cut.record.changes] == [
        (2, "n", "2"),
        (2, "lr", "1e-06"),
    ]


# by the clock


def test_timed_checkpoints_change_no_bit_wherever_they_fall(
    tiny: Path, options: Options, whole: Callable[[str], Result]
) -> None:
    """At each Step, and at those that the clock says; each of them is one to go on from."""
    always = run(followed(tiny), options(STEPS, name="always", checkpoint_minutes=1e-9, keep=20))
    same_as(whole("followed"), always.folder)
    found = {
        int(p.name.removeprefix("step_")) for p in (always.folder / "checkpoints").glob("step_*")
    }
    assert found == set(range(1, STEPS + 1))
    for later in range(5, STEPS + 1):
        shutil.rmtree(always.folder / "checkpoints" / f"step_{later}")
    resume(always.folder, checkpoint_minutes=0.0005)
    same_as(whole("followed"), always.folder)


# the end of a run that turns out to have been the last Step's


def test_the_last_evaluation_is_made_up_for(tiny: Path, options: Options) -> None:
    graph = evaluated(tiny, every=4)
    wanted = run(graph, options(3, name="wanted"))
    stopped = run(graph, options(5, name="stopped"), until=lambda row: row["step"] == 3)
    assert "eval/vowels" not in metrics(stopped.folder)[-1]
    resume(stopped.folder, steps=3)
    last, expected = metrics(stopped.folder)[-1], metrics(wanted.folder)[-1]
    found = {name: value for name, value in expected.items() if name.startswith("eval/")}
    assert found
    assert {name: last.get(name) for name in found} == found


def test_a_damaged_checkpoint_is_passed_over(
    tiny: Path, options: Options, whole: Callable[[str], Result]
) -> None:
    first = run(followed(tiny), options(STEPS, checkpoint_every=2))
    damaged = first.folder / "checkpoints" / f"step_{STEPS}" / "train_policy" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    resume(first.folder)
    same_as(whole("followed"), first.folder)
