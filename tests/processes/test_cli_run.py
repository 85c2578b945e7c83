"""The commands that run something, once through, on a model of a few thousand weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MODEL = """
from pathlib import Path
from tests.kit.models import save_tiny
save_tiny(Path("model"), layers=1)
"""
CALL = "import sys; from engine.cli import main; sys.exit(main())"
REWARDS = """
import os, time

def same(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def leaves_a_daemon(completions, answer):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print("still here", os.getpid(), flush=True)
            time.sleep(1000)
        os._exit(0)
    return same(completions, answer)
"""
FLAGS = [
    *("--base", "model", "--data", "rows.jsonl", "--reward-fn", "my_rewards:same"),
    *("--n", "2", "--batch", "2", "--max-tokens", "3"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cli")
    rows = [{"prompt": letter * 2, "answer": letter} for letter in "abcdef"]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "my_rewards.py").write_text(REWARDS)
    done = python(made, MODEL)
    assert done.returncode == 0, done.stderr
    return made


def python(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "HOME": str(folder),
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def steps_of(run: Path) -> list[int]:
    return [
        int(json.loads(line)["step"]) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def test_run_then_resume(folder: Path) -> None:
    done = python(
        folder,
        CALL,
        "run",
        "graphs.grpo:grpo",
        *FLAGS,
        "--steps",
        "2",
        "--threads",
        "1",
        "--no-progress",
    )
    assert done.returncode == 0, done.stderr
    assert "step 2" in done.stdout
    assert (folder / "runs" / "grpo" / "graph.json").is_file()
    done = python(folder, CALL, "resume", "runs/grpo", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert steps_of(folder / "runs" / "grpo") == [1, 2, 3]


def test_what_reads_the_output_of_a_run_ends_with_it_although_a_reward_left_a_daemon(
    folder: Path,
) -> None:
    """`dataflow run ... | cat`, and 2>&1, too: the call below returns when both pipes are at their
    end.
    """
    flags = [flag.replace(":same", ":leaves_a_daemon") for flag in FLAGS]
    done = python(
        folder,
        CALL,
        "run",
        "graphs.grpo:grpo",
        *flags,
        "--steps",
        "1",
        "--threads",
        "1",
        "--name",
        "left",
    )
    assert done.returncode == 0, done.stderr
    said = "reward 'leaves_a_daemon' printed: still here "
    assert said in (folder / "runs" / "left" / "logs" / "main.log").read_text()
    for pid in [int(line.split()[-1]) for line in done.stderr.splitlines() if said in line]:
        assert not Path(f"/proc/{pid}").exists()


def test_explain_shows_every_node(folder: Path) -> None:
    done = python(folder, CALL, "explain", "graphs.grpo:grpo", *FLAGS)
    assert done.returncode == 0, done.stderr
    for node in ("prompts", "rollout", "score", "advantage", "train_policy"):
        assert node in done.stdout


def test_a_run_that_fails_ends_with_3_and_its_cause_last(folder: Path) -> None:
    (folder / "bad_rewards.py").write_text("def same(completions, answer):\n    return [1.0]\n")
    flags = [flag.replace("my_rewards", "bad_rewards") for flag in FLAGS]
    done = python(
        folder,
        CALL,
        "run",
        "graphs.grpo:grpo",
        *flags,
        "--steps",
        "1",
        "--name",
        "bad",
        "--threads",
        "1",
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "same" in done.stderr


@pytest.mark.long
def test_nothing_of_the_current_folder_takes_the_place_of_what_is_installed(
    folder: Path, tmp_path: Path
) -> None:
    """In the command's own process, in Workers and in reward processes; what graph.json names is
    imported by a resume that says so before.
    """
    here = tmp_path / "here"
    shutil.copytree(folder, here, ignore=shutil.ignore_patterns("runs"))
    for name in (
        "json",
        "random",
        "torch",
        "numpy",
        "struct",
        "selectors",
        "pyarrow",
        "msgspec",
        "transformers",
    ):
        (here / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder ran')\n")
    script = (  # as a console script
        "import sys; sys.path.remove(''); from engine.cli import main; sys.exit(main())"
    )
    flags = ["--workers", "apart", "--threads", "1", "--no-progress"]
    done = python(here, script, "run", "graphs.grpo:grpo", *FLAGS, "--steps", "1", *flags)
    assert done.returncode == 0, done.stderr
    done = python(here, script, "resume", "runs/grpo", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"imports my_rewards from {here / 'my_rewards.py'}\n")
