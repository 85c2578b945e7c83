"""Runs that are killed, stopped and resumed: the same numbers, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from dataflow.errors import CheckpointError, GraphError, RunError
from dataflow.graph import Graph
from engine.api import Result, resume
from engine.keep.checkpoint.cut import Cut
from engine.keep.end_record import RunEnd, end_of
from engine.keep.reader.run_state import NO_WORD
from engine.keep.reader.run_summary import read_summary
from graphs.grpo import grpo
from tests.kit import processes as kit
from tests.kit.killable_run import GRAPHS, killable_run, require_stopped
from tests.kit.nothing_left import require_ended
from tests.kit.run_graphs import evaluated, followed, small, vowels
from tests.kit.runs import (
    column,
    files_in,
    metrics,
    require_each_row_once,
    require_same_runs,
    samples,
    steps_stored,
)
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)
LONG = pytest.mark.long
STEPS = 8
NO_CHECKPOINT = "safe: no checkpoint had been made; `dataflow resume {}` begins again at step 1"
Whole = Callable[[str], Result]


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The uninterrupted run of a graph, made once."""
    tiny, runs = TinyRuns(folder=tiny_folder, runs=tmp_path_factory.mktemp("whole")), {}

    def of(graph: str) -> Result:
        if graph not in runs:
            stored = {"checkpoint_every": 2, "keep": 10}
            runs[graph] = tiny.run(GRAPHS[graph], STEPS, name=graph, **stored)
        return runs[graph]

    return of


@pytest.fixture
def killed(tiny: TinyRuns) -> Path:
    """The folder of the run that is killed or stopped."""
    return tiny.runs / "killed"


def killable(
    tiny: TinyRuns, graph: str, *flags: str, **options: object
) -> AbstractContextManager[subprocess.Popen[str]]:
    given = {"name": "killed", "checkpoint_every": 2, **options}
    return killable_run(graph, tiny.folder, tiny.options(STEPS, **given), *flags)


# killed


@LONG
@pytest.mark.repeats
@pytest.mark.parametrize("pattern,later", [
    ("checkpoints/.tmp-step_4/train_policy/model.safetensors", "checkpoints/step_4"),
    ("checkpoints/best_evaluate/.tmp-*", "checkpoints/best_evaluate/*"),
    ("samples/.step_000003.parquet.tmp", "samples/step_000003.parquet"),
])  # fmt: skip
def test_killed_as_a_file_is_written(
    tiny: TinyRuns, killed: Path, whole: Whole, pattern: str, later: str
) -> None:
    """Or soon after: who looks for a file may miss it. The run waits at Step 6 for the kill."""
    with killable(tiny, "evaluated", "hold=6") as process:
        while not (list(killed.glob(pattern)) or list(killed.glob(later))):
            assert process.poll() is None
            os.sched_yield()
        process.kill()
        process.wait()
    assert read_summary(killed).state == NO_WORD
    resume(killed)
    assert read_summary(killed).state == "finished"
    require_same_runs(killed, whole("evaluated"))


@pytest.mark.long
def test_with_lag_nothing_is_lost_or_trained_twice(tiny: TinyRuns, killed: Path) -> None:
    """And the kernel ends the reward processes with the process of the run."""
    with killable(tiny, "lagging", "hold=3") as process:
        kit.wait_for(process, "step 3")
        there = kit.descendants(process.pid)
        kit.go_on(process)
        kit.ended_within(process, 0.05)  # into a Step
        process.kill()
        process.wait()
    assert there, "the run had no reward process, so this tests nothing"
    require_ended(there)
    assert resume(killed).step == STEPS
    assert column(killed, "step") == list(range(1, STEPS + 1))
    assert max(column(killed, "policy/lag/max")) <= 1
    require_each_row_once(killed, 4 * STEPS, 4)


# Ctrl-C


@LONG
def test_one_ctrl_c_ends_the_step_and_a_resume_goes_on(
    tiny: TinyRuns, killed: Path, whole: Whole
) -> None:
    with killable(tiny, "followed", "hold=3") as process:
        kit.wait_for(process, "step 3")
        there = kit.descendants(process.pid)
        assert (read_summary(killed).state, read_summary(killed).step) == ("running", 3)
        process.send_signal(signal.SIGINT)
        assert "Ctrl-C again" in require_stopped(process, killed, "Ctrl-C", 130)
    assert (read_summary(killed).state, read_summary(killed).reason) == (
        "interrupted",
        "stopped by Ctrl-C",
    )
    require_ended(there)
    assert resume(killed).step == STEPS
    require_same_runs(killed, whole("followed"))


@pytest.mark.long
def test_two_ctrl_c_end_at_once(tiny: TinyRuns, killed: Path) -> None:
    """In a Step that never ends, so that it is the second that ends the run."""
    with killable(tiny, "stuck") as process:
        kit.wait_for_error(process, "reward 'says_and_hangs' printed: hangs")
        there = kit.descendants(process.pid)
        process.send_signal(signal.SIGINT)
        kit.wait_for_error(process, "Ctrl-C again")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode != 0
    assert "Signalled: ended at once by Ctrl-C" in err
    assert end_of(killed) == RunEnd(
        state="interrupted", reason=f"ended at once by Ctrl-C; {NO_CHECKPOINT.format(killed)}"
    )
    require_ended(there)


@LONG
def test_the_command_line_says_how_to_go_on(tiny: TinyRuns) -> None:
    inputs = f"--base {tiny.folder}/model --data {tiny.folder}/train.parquet"
    fn = "--reward-fn tests.kit.run_graphs:vowels --n 2 --batch 4 --max-tokens 6"
    words = f"run graphs.grpo:grpo {inputs} {fn} --steps 100000 --runs {tiny.runs} --threads 1"
    with kit.limited(kit.start_python("-c", kit.COMMAND_LINE, *words.split())) as process:
        assert process.stdout is not None
        while "step 3" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130, err
    assert f"dataflow resume {tiny.runs / 'grpo'}" in out


# resumed


@pytest.mark.long
def test_resuming_a_finished_run_says_so_and_changes_nothing(tiny: TinyRuns) -> None:
    first = tiny.run(partial(evaluated, keep_best=1))
    before = files_in(first.folder)
    again = resume(first.folder)
    assert again.reason == "nothing to do, as all 3 steps are done"
    assert again.metrics == metrics(first)[-1]
    assert (again.step, again.trained, again.best) == (3, first.trained, first.best)
    assert files_in(first.folder) == before
    with pytest.raises(RunError, match="--steps: expected 3 or more, as so many steps are done"):
        resume(first.folder, steps=2)
    assert files_in(first.folder) == before


@pytest.mark.long
def test_a_run_whose_data_has_ended_has_nothing_to_do(tiny: TinyRuns) -> None:
    first = tiny.run(partial(small, batch=10), None)
    assert column(first, "data/prompts") == [10, 10, 4]
    assert first.reason == "the data has ended"
    assert set(samples(first)["position"].to_pylist()) == set(range(24))
    before = files_in(first.folder)
    assert resume(first.folder).reason == "nothing to do, as the data has ended"
    assert files_in(first.folder) == before
    assert resume(first.folder, steps=4).step == 4


@pytest.mark.long
def test_options_that_change_stay_changed(tiny: TinyRuns) -> None:
    first = tiny.run(small, 1)
    assert resume(first.folder, steps=2).step == 2
    assert resume(first.folder).step == 2
    assert column(first, "step") == [1, 2]
    assert len(list((first.folder / "trace").iterdir())) == 2


def test_options_of_its_start_do_not_change(tiny: TinyRuns) -> None:
    with pytest.raises(RunError, match="resume: seed does not change in a resume"):
        resume(tiny.runs, seed=1)


@pytest.mark.long
def test_a_run_with_a_lambda_goes_on_with_its_graph_made_anew(tiny: TinyRuns) -> None:
    def graph() -> Graph:
        lengths = lambda completions, **kwargs: [float(len(c)) for c in completions]
        return small(tiny.folder, lengths)

    first = tiny.run(graph(), 2)
    with pytest.raises(GraphError, match="no other process can import"):
        resume(first.folder, steps=4)
    assert resume(first.folder, graph=graph(), steps=4).step == 4


@pytest.mark.long
def test_another_graph_is_refused(tiny: TinyRuns) -> None:
    first = tiny.run(small, 1)
    base, data = str(tiny.folder / "model"), str(tiny.folder / "train.parquet")
    other = grpo(base, data, vowels, n=2, batch=4, max_tokens=6)
    told = r"node rollout: n: 4 -> 2\n  node train_policy: lr: 0.001 -> 1e-06\n"
    with pytest.raises(CheckpointError, match=told):
        resume(first.folder, graph=other)
    before = (first.folder / "graph.json").read_text()
    assert resume(first.folder, graph=other, accept_changes=True, steps=2).step == 2
    assert (first.folder / "graph.json").read_text() != before
    assert resume(first.folder, steps=3).step == 3  # which is asked for once
    cut = Cut.from_json((first.folder / "checkpoints" / "step_3" / "cut.json").read_bytes())
    assert cut.record is not None
    changes = [(change.step, change.what, change.new) for change in cut.record.changes]
    assert changes == [(2, "n", "2"), (2, "lr", "1e-06")]


# by the clock


@pytest.mark.long
@LONG
def test_timed_checkpoints_change_no_bit_wherever_they_fall(tiny: TinyRuns, whole: Whole) -> None:
    """At each Step, and at those that the clock says; each of them is one to go on from."""
    always = tiny.run(followed, STEPS, checkpoint_minutes=1e-9, keep=20)
    require_same_runs(always, whole("followed"))
    assert steps_stored(always) == list(range(1, STEPS + 1))
    for later in range(5, STEPS + 1):
        shutil.rmtree(always.folder / "checkpoints" / f"step_{later}")
    resume(always.folder, checkpoint_minutes=0.0005)
    require_same_runs(always, whole("followed"))


# the end of a run that turns out to have been the last Step's


@pytest.mark.long
@LONG
def test_the_last_evaluation_is_made_up_for(tiny: TinyRuns) -> None:
    graph = partial(evaluated, every=4)
    wanted = metrics(tiny.run(graph, 3, name="wanted"))[-1]
    stopped = tiny.run(graph, 5, name="stopped", until=lambda row: row["step"] == 3)
    assert "eval/vowels" not in metrics(stopped)[-1]
    resume(stopped.folder, steps=3)
    evaluation = {name: value for name, value in wanted.items() if name.startswith("eval/")}
    assert evaluation
    assert evaluation.items() <= metrics(stopped)[-1].items()
