"""What run folders tell: the record of an end, `dataflow runs`, `dataflow diff` of two runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dataflow.errors import RunError, StorageError
from engine.cli import main
from engine.cli.runs import list_runs
from engine.keep.end_record import EndRecord, RunEnd, end_of
from engine.keep.reader.run_state import NO_WORD
from engine.keep.reader.run_summary import LastValue, RunSummary, read_summaries, read_summary
from engine.keep.run_folder import RunFolder
from engine.plan.options import RunOptions
from engine.replay.run_diff import run_differences
from graphs.sft import sft
from tests.kit.kept_runs import kept_run

NOW = 1_000_000.0
DONE = {"state": "finished", "reason": "all steps are done"}


def rows(count: int, **metrics: float) -> list[dict[str, Any]]:
    """Steps 1 to count; each metric grows by its value a Step."""
    return [
        {"step": n, **{name.replace("__", "/"): n * value for name, value in metrics.items()}}
        for n in range(1, count + 1)
    ]


# the record of an end


def test_an_end_is_recorded_and_a_beginning_deletes_it(run_folder: RunFolder) -> None:
    for reason, interrupted in (("all steps are done", False), ("Ctrl-C", True)):
        with EndRecord(run_folder) as end:
            assert end_of(run_folder.path) is None
            end.tell(reason, interrupted=interrupted)
        state = "interrupted" if interrupted else "finished"
        assert end_of(run_folder.path) == RunEnd(state=state, reason=reason)


@pytest.mark.parametrize("error, state, reason", [
    (RunError("score: raised\x1b KeyError\nmore"), "failed", "score: raised\\x1b KeyError"),
    (ZeroDivisionError(), "failed", "ZeroDivisionError"),
    (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
])  # fmt: skip
def test_an_error_is_recorded_and_goes_on(
    run_folder: RunFolder, error: BaseException, state: Any, reason: str
) -> None:
    with pytest.raises(type(error)), EndRecord(run_folder):
        raise error
    assert end_of(run_folder.path) == RunEnd(state=state, reason=reason)


def test_an_end_that_cannot_be_written_hides_no_error(
    run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "write_text", Mock(side_effect=StorageError("disk full")))
    with pytest.raises(RunError, match="first"), EndRecord(run_folder):
        raise RunError("first")
    with pytest.raises(StorageError), EndRecord(run_folder) as end:
        end.tell("done", interrupted=False)


# dataflow runs


def test_the_state_of_a_run(tmp_path: Path) -> None:
    with RunFolder.create("going", tmp_path) as folder:
        assert read_summary(folder.path).state == "running"
    assert read_summary(folder.path).state == NO_WORD
    with RunFolder.open_existing(folder.path):  # being asked left no lock behind
        assert read_summary(folder.path).state == "running"
    assert read_summary(kept_run(tmp_path / "old")).state == NO_WORD
    found = read_summary(kept_run(tmp_path / "ended", ended=DONE))
    assert (found.state, found.reason) == ("finished", "all steps are done")
    found = read_summary(kept_run(tmp_path / "damaged", ended={"state": "gone"}))
    assert found.state == "unknown"
    assert "ended.json: expected how the run ended" in found.problem
    assert "Fix: delete" in found.problem


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    values = rows(3, reward__mean=0.25, loss__dpo=1.0)
    found = read_summary(kept_run(tmp_path / "a", rows=values, torn='{"step":4,"reward/me'))
    assert (found.step, found.problem) == (3, "")
    assert found.reward == LastValue(metric="reward/mean", value=0.75, step=3)
    assert found.loss == LastValue(metric="loss/dpo", value=3.0, step=3)
    assert found.evaluation is None


def test_an_evaluation_may_be_of_an_earlier_step(tmp_path: Path) -> None:
    values = rows(49, reward__std=1.0, reward__mean=0.5)
    values[0]["eval/initial/reward"] = 0.1
    values[19] |= {"eval/rows": 64.0, "eval/reward": 0.375}
    values.append({"step": 50, "reward/mean": None, "loss/forged": 10**400})
    found = read_summary(kept_run(tmp_path / "a", rows=values))
    assert found.evaluation == LastValue(metric="eval/reward", value=0.375, step=20)
    assert found.reward == LastValue(metric="reward/mean", value=None, step=50)
    assert found.loss == LastValue(metric="loss/forged", value=None, step=50)


def test_only_the_end_of_the_metrics_is_read(tmp_path: Path) -> None:
    run = kept_run(tmp_path / "a", rows=rows(4000, reward__mean=1.0, other__metric=2.0))
    file = run / "metrics.jsonl"
    assert file.stat().st_size > 1 << 17
    file.write_bytes(b"\xff" * 1000 + file.read_bytes())
    found = read_summary(run)
    assert (found.step, found.problem) == (4000, "")
    assert found.reward == LastValue(metric="reward/mean", value=4000, step=4000)


@pytest.mark.parametrize("line", ["[1]", "{}", '{"step": "x"}', "[" * 100_000, "nan"])
def test_a_whole_line_that_is_no_row_is_said(tmp_path: Path, line: str) -> None:
    run = kept_run(tmp_path / "a", torn=f"{line}\n")
    assert f"{run}/metrics.jsonl: expected a JSON object with a step" in read_summary(run).problem


def test_runs_come_last_written_first_and_other_folders_are_counted(tmp_path: Path) -> None:
    for name, written in (("old", 10.0), ("new", 30.0), ("middle", 20.0)):
        kept_run(tmp_path / name, written=written)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "file").touch()
    found, others = read_summaries(tmp_path)
    assert [run.name for run in found] == ["new", "middle", "old"]
    assert others == 1
    assert [run.name for run in read_summaries(tmp_path / "old")[0]] == ["old"]


def test_the_size_counts_every_file_but_not_what_links_lead_to(tmp_path: Path) -> None:
    run = kept_run(tmp_path / "a")
    (run / "checkpoints" / "step_1").mkdir(parents=True)
    (run / "checkpoints" / "step_1" / "model").write_bytes(b"x" * 5000)
    os.symlink("/dev/zero", run / "link")
    assert 5002 <= read_summary(run).nbytes <= 5200


RUNS = [
    RunSummary(
        name="grpo-7b", path="runs/grpo-7b", state="running", step=120, steps=400, phase=2,
        reward=LastValue(metric="reward/mean", value=0.51234, step=120),
        evaluation=LastValue(metric="eval/reward", value=0.25, step=100),
        loss=LastValue(metric="loss/clipped_policy_loss", value=None, step=120),
        nbytes=3 << 30, written=NOW - 59.7,
    ),
    RunSummary(
        name="first", path="runs/first", state="failed", reason="score: raised KeyError: 'x'",
        step=3, nbytes=2048, written=NOW - 3 * 86_400,
    ),
    RunSummary(name="lost", path="runs/lost", state=NO_WORD, nbytes=1, written=NOW - 7300),
]  # fmt: skip

WIDE = """\
run      state                 steps              reward  eval  loss        size     written
grpo-7b  running               120/400 (phase 2)  0.5123  0.25  not finite  3.0 GiB  59 s ago
first    failed                3                  -       -     -           2.0 KiB  3 d ago
lost     ended without a word  0                  -       -     -           1 B      2 h ago
first failed: score: raised KeyError: 'x'
ended without a word: no process holds the folder, and nothing in it says how the run ended
"""

NARROW = """\
grpo-7b
  running  steps 120/400 (phase 2)  reward 0.5123
  eval 0.25  loss not finite  size 3.0 GiB
  written 59 s ago
first
  failed  steps 3  size 2.0 KiB  written 3 d ago
lost
  ended without a word  steps 0  size 1 B
  written 2 h ago
first failed: score: raised KeyError: 'x'
ended without a word: no process holds the folder,
and nothing in it says how the run ended
"""


@pytest.mark.parametrize("wide, golden", [(100, WIDE), (50, NARROW)])
def test_the_list(wide: int, golden: str) -> None:
    shown = "\n".join(list_runs(RUNS, now=NOW, wide=wide)) + "\n"
    assert shown == golden
    assert max(map(len, shown.splitlines())) <= wide


def test_runs_as_text_and_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["runs"]) == 2
    told = "dataflow runs: 'runs' cannot be read: No such file or directory. Fix: dataflow runs"
    assert capsys.readouterr().err.startswith(told)
    (tmp_path / "runs" / "other").mkdir(parents=True)
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == "no runs in runs\n1 other folder in runs\n"
    values, options = rows(3, reward__mean=0.25), RunOptions(steps=3)
    run = tmp_path / "runs" / "a"
    kept_run(run, options=options, rows=values, ended=DONE, written=time.time() - 600.0)
    assert main(["runs"]) == 0
    _, line, _ = capsys.readouterr().out.splitlines()
    assert line.split()[:4] == ["a", "finished", "3/3", "0.75"]
    assert line.endswith("10 min ago")
    assert main(["runs", "runs/a", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["path"], found["reason"]) == ("runs/a", "all steps are done")
    assert found["reward"] == {"metric": "reward/mean", "value": 0.75, "step": 3}


# dataflow diff of two runs

DIFFERENCES = """\
Options
           one                other
  --steps  20                 -
  --pin    rollout=a score=b  -

Metrics: the mean of the last 10 Steps that have it; of an evaluation, the last
               one   other
  step         20    4
  reward/mean  1.55  0.75
  eval/reward  0.5   0.75
  loss/dpo     15.5  not finite
  time/step    31    2.5
  only one has optim/a, optim/b, optim/c and 1 more
  only other has policy/entropy

Changes that a resume accepted
  other, from step 3 on: train_policy: lr: 1e-6 -> 1e-5
"""


def two_runs(folder: Path) -> tuple[Path, Path]:
    optim = {f"optim__{name}": 1.0 for name in "abcd"}
    long = rows(20, reward__mean=0.1, loss__dpo=1.0, time__step=2.0, **optim)
    long[4]["eval/reward"], long[9]["eval/reward"] = 0.25, 0.5
    short = rows(4, reward__mean=0.3, time__step=1.0, policy__entropy=1.0)
    for row in short:
        row["loss/dpo"] = None
    short[0]["eval/reward"] = 0.75
    options = RunOptions(steps=20, pin={"rollout": "a", "score": "b"}, name="one")
    graph = sft("models/base", "rows.jsonl")
    one = kept_run(folder / "one", graph, options=options, rows=long, ended=DONE)
    torn = '{"step":5,"rew'
    other = kept_run(folder / "other", graph, options=RunOptions(), rows=short, torn=torn)
    change = {"step": 3, "where": "train_policy", "what": "lr", "old": "1e-6", "new": "1e-5"}
    (other / "changes.json").write_text(json.dumps({"changes": [change]}))
    return one, other


def test_diff_of_run_folders_compares_graphs_and_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = two_runs(tmp_path)
    assert main(["diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out == f"sft\n\nno difference\n\n{DIFFERENCES}"
    assert main(["diff", str(one), str(other / "graph.json")]) == 0
    assert capsys.readouterr().out == "sft\n\nno difference\n"


def test_equal_runs_without_steps(tmp_path: Path) -> None:
    one, other = (kept_run(tmp_path / n / "run", options=RunOptions(seed=1)) for n in "ab")
    told = run_differences(one, other)
    assert told.startswith("Options: no difference\n\nMetrics: ")
    assert told.splitlines()[-1].split() == ["step", "none", "none"]
    assert str(one) in told


def test_at_most_twenty_metrics_are_shown(tmp_path: Path) -> None:
    values = rows(2, **{f"user__m{n:02}": 1.0 for n in range(30)}, reward__mean=1.0)
    one, other = (kept_run(tmp_path / n, options=RunOptions(), rows=values) for n in "ab")
    lines = run_differences(one, other).splitlines()
    assert lines[-1] == "  and 11 more that both have"
    shown = [line.split()[0] for line in lines[-21:-1]]
    assert (shown[0], shown[1], shown[-1]) == ("reward/mean", "user/m00", "user/m18")


@pytest.mark.parametrize("name, text, told", [
    ("changes.json", '{"changes": [{"step": "x"}]}', "changes.json: expected accepted changes"),
    ("options.json", "[]", "options.json: expected an object of options"),
    ("metrics.jsonl", '[1]\n{"step": 1}\n', "metrics.jsonl:1: expected a JSON object with a step"),
])  # fmt: skip
def test_a_damaged_run_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, told: str
) -> None:
    one, other = two_runs(tmp_path)
    (other / name).write_text(text)
    assert main(["diff", str(one), str(other)]) in (1, 3)
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1


ODD = ("null", "[]", "{}", "3", '"x"', "-1e999", "NaN", "1" + "0" * 400, "[" * 50_000, '"\\ud800"')


@pytest.mark.long
def test_odd_values_are_told_and_never_an_internal_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each value of each file in turn: one line or none on standard error, never exit code 4."""
    one, other = two_runs(tmp_path)
    (other / "ended.json").write_text(json.dumps(DONE))
    documents = {
        "options.json": '{"steps": %s, "path": []}',
        "ended.json": '{"state": "failed", "reason": %s}',
        "changes.json": '{"changes": %s}',
        "metrics.jsonl": '{"step": 1, "reward/mean": %s, "eval/reward": %s}\n',
    }
    for name, text in documents.items():
        kept = (other / name).read_bytes()
        for odd in ODD:
            for made in (odd + "\n", text.replace("%s", odd)):
                (other / name).write_text(made)
                for words in (["diff", str(one), str(other)], ["runs", str(tmp_path)]):
                    assert main(words) in (0, 1, 3), (name, made[:60], words)
                    assert capsys.readouterr().err.count("\n") <= 1
        (other / name).write_bytes(kept)
