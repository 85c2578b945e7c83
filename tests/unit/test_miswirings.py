"""Types follow every wire: pyright flags each planted mis-wiring, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.processes import ROOT

FOLDER = ROOT / "tests/miswirings"


@pytest.mark.long
def test_pyright_flags_exactly_the_lines_marked_wrong() -> None:
    """Those of wrong.py; right.py is its twin, of which it has nothing to say."""
    files = [str(FOLDER / name) for name in ("right.py", "wrong.py")]
    command = [sys.executable, "-m", "pyright", "--outputjson", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(files), done.stderr
    flagged = {
        (Path(entry["file"]).name, entry["range"]["start"]["line"] + 1)
        for entry in report["generalDiagnostics"]
        if entry["severity"] == "error"
    }
    lines = (FOLDER / "wrong.py").read_text().splitlines()
    marked = {("wrong.py", n) for n, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(marked) >= 15
    assert marked - flagged == set(), "not flagged"
    assert flagged - marked == set(), "flagged though right"
