"""Recorded runs: their rows are there once, and any part of them runs again to the same bits."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.errors import DataError, GraphError, RunError
from dataflow.graph import Graph
from engine.api import rerun, resume
from engine.cli import main
from engine.keep.record.place import nodes_in, row_files
from engine.keep.record.stored_assignments import assignment_files
from engine.replay.row_diff import row_differences
from tests.kit import algorithms, run_graphs
from tests.kit.processes import COMMAND_LINE, KillWorkers, command_of
from tests.kit.run_programs import two_phases
from tests.kit.runs import steps_stored
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)
LONG = pytest.mark.long
STEPS = 4
GRAPHS: dict[str, tuple[Callable[[Path], Graph], dict[str, Any]]] = {
    "grpo": (partial(algorithms.small, "grpo"), {}),
    "ppo": (partial(algorithms.small, "ppo"), {}),
    "dapo at lag 1": (partial(run_graphs.dapo, max_lag=1), {"workers": "auto"}),
    "two trained on rows of two sources": (run_graphs.sft_and_rl, {}),
    "followers": (run_graphs.followed, {}),
    "evaluations": (partial(run_graphs.evaluated, every=1), {}),
    "chunks on two replicas": (run_graphs.small, {"replicas": {"rollout": 2, "score": 2}}),
    "ranks at lag 1": (
        partial(run_graphs.dapo, max_lag=1),
        {"workers": "auto", "ranks": {"train_policy": 2}, "shard": True},
    ),
    "ranks split matrices": (run_graphs.small, {"tensor": {"train_policy": 2}}),
    "ranks divide tokens": (run_graphs.small, {"context": {"train_policy": 2}}),
}
"""Each with options of its run."""
TOLD = "FAIL_IN_THE_RERUN"


def fails_if_told(completions: Sequence[str], **columns: object) -> list[float]:
    if TOLD in os.environ:
        raise LookupError("as it was told")
    return run_graphs.vowels(completions)


def kills_other_ranks(completions: Sequence[str], **columns: object) -> list[float]:
    if os.environ.get(TOLD) == str(os.getpid()):
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        for task in Path("/proc/self/task").iterdir():
            for child in (task / "children").read_text().split():
                # As a word of its own: multiprocessing's fork server has it among what it imports.
                if "engine.replay.other_ranks" in command_of(int(child)):
                    os.kill(int(child), signal.SIGKILL)
    return run_graphs.vowels(completions)


def rows_of(folder: Path, node: str) -> pa.Table:
    """As any tool reads them."""
    tables = [pq.read_table(file.path) for file in row_files(folder / "recorded", node)]
    return pa.concat_tables(tables, promote_options="permissive")


def keys_in(table: pa.Table) -> list[tuple[int, ...]]:
    names = ("key.position", "key.sample", "key.attempt")
    return list(zip(*(table.column(name).to_pylist() for name in names), strict=True))


def require_once(table: pa.Table) -> None:
    keys = keys_in(table)
    assert len(keys) == len(set(keys))


def change_column(path: Path, name: str, change: Callable[[list[Any]], None]) -> None:
    """Change the values of a column of a file of rows."""
    table = pq.read_table(path)
    at = table.column_names.index(name)
    field, values = table.schema.field(at), table.column(at).to_pylist()
    change(values)
    pq.write_table(table.set_column(at, field, pa.array(values, field.type)), path)


def require_bits(folder: Path, node: str, step: int) -> None:
    found = rerun(folder, [node], step)
    assert found.same, f"{node} at step {step}: {found.nodes}"
    assert found.nodes[0].promise in ("bits", "tolerance"), found.nodes


def drawn(folder: Path, count: int, seed: int) -> list[tuple[str, int]]:
    """Nodes and Steps of a run by random."""
    steps = range(1, STEPS + 1)
    planned = json.loads((folder / "plan.json").read_text())["nodes"]
    trains = [node["name"] for node in planned if node["work"] in ("train", "evaluate")]
    nodes = [*nodes_in(folder / "recorded"), *trains]
    return random.Random(seed).sample([(n, s) for n in sorted(nodes) for s in steps], count)


@LONG
@pytest.mark.repeats
@pytest.mark.parametrize("name", GRAPHS)
def test_drawn_nodes_and_steps_give_the_bits_of_the_run(tiny: TinyRuns, name: str) -> None:
    make, how = GRAPHS[name]
    folder = tiny.run(make, STEPS, record="all", checkpoint_every=2, **how).folder
    for node, step in [("train_policy", STEPS), *drawn(folder, 9, seed=len(name))]:
        require_bits(folder, node, step)


@pytest.mark.long
def test_a_train_node_needs_no_more_than_rollouts_and_rewards(
    tiny: TinyRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny.run(run_graphs.small, 3, record="rollout,score", checkpoint_every=2).folder
    assert main(["rerun", str(folder), "--node", "train_policy", "--step", "3"]) == 0
    printed = capsys.readouterr().out
    assert "from checkpoint step_2, trained step 3" in printed
    assert "made again, as it was not recorded: advantage" in printed
    assert "train_policy: the same bits: the weights and " in printed
    changed = ["--node", "rollout,train_policy", "--set", "train_policy.lr=0.5"]
    assert main(["rerun", str(folder), "--step", "2", *changed]) == 1
    printed = capsys.readouterr().out
    assert "rollout: differs: row " in printed
    assert "train_policy: differs: weights: digest " in printed
    assert main(["rerun", str(folder), "--node", "rollout,score,advantage", "--step", "2"]) == 0
    assert "advantage: nothing to compare with: made 16 rows" in capsys.readouterr().out


@LONG
def test_the_debugger_opens_where_a_function_raises(tiny: TinyRuns) -> None:
    folder = tiny.run(partial(run_graphs.small, fn=fails_if_told), 1, record="rollout,score").folder
    words = f"rerun {folder} --node score --step 1 --debug".split()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND_LINE, *words], input="p len(completions)\nq\n",
        env={**os.environ, TOLD: "1"}, text=True, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert "LookupError: as it was told" in done.stdout
    assert "(Pdb) 1\n" in done.stdout  # it was called again row by row
    assert done.returncode == 3
    assert "LookupError: as it was told" in done.stderr


@pytest.mark.long
def test_what_cannot_run_again_is_one_clear_error(tiny: TinyRuns) -> None:
    folder = tiny.run(run_graphs.small, 2, record="score", name="scores").folder
    with pytest.raises(RunError, match=r"rows of rollout.* Fix: a run with --record score,rollout"):
        rerun(folder, ["train_policy"], 2)
    with pytest.raises(RunError, match=r"no node 'scor'\. Fix: score"):
        rerun(folder, ["scor"], 1)
    with pytest.raises(RunError, match=r"train_policy did in step 9 .* 1 to 2\. Fix: --step 2"):
        rerun(folder, ["train_policy"], 9)
    shutil.rmtree(folder / "recorded")
    with pytest.raises(RunError, match="recorded rows, found one that did not"):
        rerun(folder, ["score"], 1)


@LONG
@pytest.mark.usefixtures("own_interpreters")  # the function looks for ranks among its children
def test_a_rank_that_dies_is_named(tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    make = partial(run_graphs.small, fn=kills_other_ranks)
    how: dict[str, Any] = {"ranks": {"train_policy": 2}, "workers": "auto"}
    folder = tiny.run(make, 1, record="rollout", **how).folder
    monkeypatch.setenv(TOLD, str(os.getpid()))
    with pytest.raises(RunError, match="rank 1 of the rerun ended with -9"):
        rerun(folder, ["score", "train_policy"], 1)


@pytest.mark.long
def test_a_step_before_a_change_is_run_with_what_it_had(tiny: TinyRuns) -> None:
    folder = tiny.run(run_graphs.small, 2, record="rollout,score").folder
    resume(folder, steps=3, settings=["train_policy.lr=0.01"])
    require_bits(folder, "train_policy", 3)
    with pytest.raises(RunError, match=r"parameters: node train_policy lr: 0\.001 until step 2"):
        rerun(folder, ["train_policy"], 2)
    assert rerun(folder, ["train_policy"], 2, settings=["train_policy.lr=0.001"]).same


def test_a_run_with_a_lambda_runs_again_with_its_graph_made_anew(tiny: TinyRuns) -> None:
    def graph() -> Graph:
        lengths = lambda completions, **kwargs: [float(len(c)) for c in completions]
        return run_graphs.small(tiny.folder, lengths)

    folder = tiny.run(graph(), 2, record="rollout,score").folder
    with pytest.raises(
        GraphError, match=r"no other process can import.* graph= of resume and rerun"
    ):
        rerun(folder, ["score"], 2)
    assert rerun(folder, ["score", "train_policy"], 2, graph=graph()).same


@LONG
def test_phases_are_recorded_and_a_rerun_of_them_is_refused(tiny: TinyRuns) -> None:
    folder = tiny.run(two_phases, None, record="rollout").folder
    assert len(rows_of(folder, "rollout")) > 0
    steps = [step for step, _ in assignment_files(folder / "recorded")]
    assert steps == list(range(steps[-1] + 1))
    with pytest.raises(RunError, match="it is the run of a Program"):
        rerun(folder, ["rollout"], 1)


# rows are there once


@LONG
def test_a_resume_cuts_what_it_makes_again(tiny: TinyRuns) -> None:
    make = partial(run_graphs.small, max_lag=1)
    how: dict[str, Any] = {"record": "rollout,score", "workers": "auto"}
    whole = tiny.run(make, 4, checkpoint_every=2, keep=4, **how).folder
    shutil.rmtree(whole / "checkpoints" / "step_4")
    resume(whole)
    for node in ("rollout", "score"):
        require_once(rows_of(whole, node))
    require_bits(whole, "train_policy", 4)
    require_bits(whole, "score", 3)


@LONG
def test_rows_of_a_killed_worker_count_once(tiny: TinyRuns) -> None:
    """At lag 0 what was lost is made again with the same keys."""
    chunks = {"rollout": 2, "score": 2}
    how: dict[str, Any] = {"workers": "apart", "replicas": {"rollout": 2}, "chunks": chunks}
    death = KillWorkers({1: "rollout-0", 2: "rollout-1", 3: "score"})
    killed = tiny.run(run_graphs.small, 4, record="all", name="a", on_step=[death], **how).folder
    alone = tiny.run(run_graphs.small, 4, record="all", name="b", chunks=chunks).folder
    for node in ("prompts", "rollout", "score", "advantage"):
        require_once(rows_of(killed, node))
    assert row_differences(killed, alone).startswith("rows: no difference\n")
    require_bits(killed, "train_policy", 4)


@pytest.mark.long
def test_a_damaged_file_is_named(tiny: TinyRuns) -> None:
    folder = tiny.run(run_graphs.small, 2, record="all").folder
    damaged = row_files(folder / "recorded", "rollout")[1].path
    damaged.write_bytes(damaged.read_bytes()[:100])
    require_bits(folder, "rollout", 1)
    with pytest.raises(DataError, match=r"rollout/.*expected recorded rows, found a damaged file"):
        rerun(folder, ["rollout"], 2)


@LONG
def test_each_worker_writes_what_it_made(tiny: TinyRuns) -> None:
    how: dict[str, Any] = {"workers": "apart", "replicas": {"rollout": 2}}
    folder = tiny.run(run_graphs.small, 2, record="all", **how).folder
    workers = {file.worker for file in row_files(folder / "recorded", "rollout")}
    assert workers == {"rollout-0", "rollout-1"}
    assert set(rows_of(folder, "score").column("made.worker").to_pylist()) == {"score"}


# runs compared


@pytest.mark.long
def test_one_changed_log_prob_is_found(tiny: TinyRuns, capsys: pytest.CaptureFixture[str]) -> None:
    a = tiny.run(run_graphs.small, 3, record="rollout,score", name="a").folder
    b = tiny.runs / "b"
    shutil.copytree(a, b)
    assert main(["diff", str(a), str(b), "--rows"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("rows: no difference\ncompared: 96 rows of rollout, score, steps 1 to 3")

    def less_likely(rows: list[list[float]]) -> None:
        rows[5][3] += 1e-6

    path = row_files(b / "recorded", "rollout")[1].path
    change_column(path, "sampler_logprobs", less_likely)
    shutil.rmtree(b / "recorded" / "score")
    told = row_differences(a, b)
    position, sample, attempt = keys_in(pq.read_table(path))[5]
    row = f"row (position {position}, sample {sample}, attempt {attempt}): sampler_logprobs[3]: "
    assert told.startswith("first difference: step 2, rollout -> ")
    assert row in told
    assert "only a recorded score" in told


# generation that was interrupted


@LONG
def test_interrupted_rows_are_replayed_with_their_tokens(tiny: TinyRuns) -> None:
    """With so small a learning rate all versions have the same weights: so a row may claim any."""
    graph = algorithms.small("grpo", tiny.folder, lr=1e-30, max_lag=1)
    folder = tiny.run(graph, 3, record="all", workers="auto", checkpoint_every=1, keep=3).folder

    def newer_at_the_end(rows: list[list[int]]) -> None:
        for row in rows:
            row[-1] = row[0] + 1

    def likelier(rows: list[list[float]]) -> None:
        for row in rows:
            row[:] = [x + 0.1 for x in row]

    for file in row_files(folder / "recorded", "rollout"):
        change_column(file.path, "version", newer_at_the_end)
    found = rerun(folder, ["rollout"], 2)
    assert [node.promise for node in found.nodes] == ["tolerance"]
    assert found.same, found.nodes
    for file in row_files(folder / "recorded", "rollout"):
        change_column(file.path, "sampler_logprobs", likelier)
    assert "more than " in rerun(folder, ["rollout"], 2).nodes[0].difference


# checkpoints that stay


@pytest.mark.long
def test_every_second_checkpoint_stays_beside_the_newest(tiny: TinyRuns) -> None:
    result = tiny.run(run_graphs.small, 7, keep_every=3, keep=1, checkpoint_every=2)
    assert steps_stored(result) == [3, 6, 7]
