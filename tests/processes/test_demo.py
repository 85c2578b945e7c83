"""The demo's command on a few Steps: that it runs, shows what it promises and leaves a whole run
folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))


@pytest.mark.long
@pytest.mark.timeout(480)
def test_the_demo_shows_graph_plan_progress_and_answers(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "examples/demo.py",
        "--steps",
        "2",
        "--warm-steps",
        "2",
        "--runs",
        str(tmp_path),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=460
    )
    assert done.returncode == 0, done.stderr
    shapes = ("+-> train_policy", "nodes, in the order", "step 2/2")
    for shown in (*shapes, "before RL", "exact match on 512", "RL did not bring both"):
        assert shown in done.stdout
    assert f"the run folder is {tmp_path / 'demo'}" in done.stdout.replace("\n", "")
    rows = [
        json.loads(line) for line in (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [1, 2]
    wanted = {
        "reward/mean",
        "policy/lag/max",
        "time/step",
        "time/rollout",
        "throughput/samples_per_second",
    }
    assert all(wanted <= row.keys() for row in rows)
    assert {"eval/initial/exact_match", "eval/initial/sampled/exact_match"} <= rows[0].keys()
    assert {"eval/exact_match", "eval/sampled/exact_match"} <= rows[-1].keys()


def test_no_word_is_in_two_splits() -> None:
    import demo_task

    assert demo_task.held_out("Canid") == demo_task.held_out("cANID")
    share = sum(demo_task.held_out(f"word{i}") for i in range(2000)) / 2000
    assert 0.07 < share < 0.13


def test_the_control_keeps_rewards_and_moves_them() -> None:
    import demo_task

    words = [f"{a}{b}cde" for a in "abcd" for b in "abcd"]
    entries = [
        json.dumps({"answer": w[::-1], "question": "", "metadata": {"word": w}}) for w in words
    ]
    spec = "spell_backward?size=4&min_word_len=3&max_word_len=6"
    said = [w[::-1] if i % 2 else w for i, w in enumerate(words)]
    right = demo_task.exact_match(said, entries, [spec] * len(words))
    moved = demo_task.permuted_exact_match(said, entries, [spec] * len(words))
    assert right == [float(i % 2) for i in range(len(words))]
    assert sorted(moved) == sorted(right)
    assert moved != right
