"""Types follow every wire: pyright flags each planted mis-wiring, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "tests" / "miswirings"


@pytest.fixture(scope="module")
def flagged() -> dict[str, set[int]]:
    """Lines with an error, from 1, by file."""
    files = [str(FOLDER / name) for name in ("right.py", "wrong.py")]
    command = [sys.executable, "-m", "pyright", "--outputjson", *files]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False
    )
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(files), done.stderr
    lines_of: dict[str, set[int]] = {"right.py": set(), "wrong.py": set()}
    for entry in report["generalDiagnostics"]:
        if entry["severity"] == "error":
            lines_of[Path(entry["file"]).name].add(entry["range"]["start"]["line"] + 1)
    return lines_of


def test_pyright_flags_exactly_the_lines_marked_wrong(flagged: dict[str, set[int]]) -> None:
    lines = (FOLDER / "wrong.py").read_text(encoding="utf-8").splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(marked) >= 15
    missed, false = sorted(marked - flagged["wrong.py"]), sorted(flagged["wrong.py"] - marked)
    assert not missed, f"not flagged: {[lines[n - 1] for n in missed]}"
    assert not false, f"flagged though right: {[lines[n - 1] for n in false]}"


def test_pyright_has_nothing_to_say_of_the_twin(flagged: dict[str, set[int]]) -> None:
    assert flagged["right.py"] == set()
