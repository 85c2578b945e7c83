"""The demo's command on a few Steps: it runs, shows what it promises, leaves a complete folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.processes import ROOT, call_python
from tests.kit.runs import metrics

sys.path.insert(0, str(ROOT / "examples"))
import demo_task


@pytest.mark.long
@pytest.mark.timeout(480)
def test_the_demo_shows_graph_plan_progress_and_answers(tmp_path: Path) -> None:
    words = ["--steps", 2, "--warm-steps", 2, "--runs", tmp_path]
    done = call_python("examples/demo.py", *words, cwd=ROOT, env={"COLUMNS": "120"}, timeout=460)
    assert done.returncode == 0, done.stderr
    shapes = ("+-> train_policy", "nodes, in the order", "phase 2/2 grpo  step 4/4")
    for shown in (*shapes, "before RL", "exact match on 512", "RL did not bring both"):
        assert shown in done.stdout
    assert f"the run folder is {tmp_path / 'demo'}" in done.stdout.replace("\n", "")
    rows = metrics(tmp_path / "demo")
    assert [(row["step"], row["phase"]) for row in rows] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert {"eval/initial/exact_match", "eval/initial/sampled/exact_match"} <= rows[2].keys()
    assert {"eval/exact_match", "eval/sampled/exact_match"} <= rows[-1].keys()


@pytest.mark.long
@pytest.mark.repeats
@pytest.mark.timeout(480)
def test_the_demo_trains_an_adapter_beside_the_warm_start(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    words = ["--steps", 2, "--warm-steps", 2, "--adapter", 4, "--runs", tmp_path]
    where: dict[str, Any] = {"cwd": ROOT, "path": [Path(peft.__file__).parents[1]]}
    done = call_python("examples/demo.py", *words, env={"COLUMNS": "120"}, timeout=460, **where)
    assert done.returncode == 0, done.stderr
    assert "adapter/norm" in metrics(tmp_path / "demo")[-1]
    saved = tmp_path / "demo" / "checkpoints" / "step_4" / "train_policy"
    assert (saved / "adapter_model.safetensors").is_file()
    assert "right answer" in done.stdout


def test_no_word_is_in_two_splits() -> None:
    assert demo_task.held_out("Canid") == demo_task.held_out("cANID")
    share = sum(demo_task.held_out(f"word{i}") for i in range(2000)) / 2000
    assert 0.07 < share < 0.13


def test_the_control_keeps_rewards_and_moves_them() -> None:
    words = [f"{a}{b}cde" for a in "abcd" for b in "abcd"]
    tasks = [{"answer": w[::-1], "question": "", "metadata": {"word": w}} for w in words]
    entries = [json.dumps(task) for task in tasks]
    spec = "spell_backward?size=4&min_word_len=3&max_word_len=6"
    said = [w[::-1] if i % 2 else w for i, w in enumerate(words)]
    right = demo_task.exact_match(said, entries, [spec] * len(words))
    moved = demo_task.permuted_exact_match(said, entries, [spec] * len(words))
    assert right == [float(i % 2) for i in range(len(words))]
    assert sorted(moved) == sorted(right)
    assert moved != right
