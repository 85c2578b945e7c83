"""What is installed: the version, what it needs of the machine, what the distributions hold."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from typing import Any

import pytest

import dataflow
from engine.cli import main
from tests.kit.processes import ROOT

TASK = """
import sys
sys.modules["pycosat"] = None  # the import system's word for: not there
from operators.kernels.data import open_rows
from operators.tasks import exact_match
rows = open_rows("reasoning_gym:spell_backward?size=3").table.to_pydict()
print(*exact_match(rows["answer"], rows["entry"], rows["task"]))
print(sys.modules.get("pycosat", "out of the way"))
open_rows("reasoning_gym:zebra_puzzles?size=1")
"""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert dataflow.__version__ == metadata.version("dataflow-rl") == project()["version"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{dataflow.__version__}\n"
    with pytest.raises(AttributeError, match="has no attribute 'versoin'"):
        dataflow.versoin  # type: ignore[attr-defined]


@pytest.mark.long
def test_tasks_need_nothing_that_is_compiled_but_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TASK], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines() == ["1.0 1.0 1.0", "out of the way"]
    refusal = "DataError: reasoning_gym:zebra_puzzles: needs the package pycosat, found none. Fix: "
    assert refusal in done.stderr


def test_the_lock_has_nothing_that_is_compiled() -> None:
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    assert "\nreasoning_gym==" in lock
    assert not re.search("^pycosat==", lock, re.MULTILINE)


def test_every_extra_is_used_by_the_code() -> None:
    """An extra of the packages' own names something that they import, or is for development."""
    code = "\n".join(
        path.read_text()
        for package in ("dataflow", "operators", "graphs", "engine")
        for path in (ROOT / package).rglob("*.py")
    )
    for extra, needed in project()["optional-dependencies"].items():
        for name in needed if extra != "dev" else []:
            module = re.split("[>=<\\[]", name)[0].replace("-", "_")
            assert re.search(rf"(import |from |\"){module}\b", code), f"{extra}: {name}"
