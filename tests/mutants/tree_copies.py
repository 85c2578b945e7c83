"""Copies of the tree, in which a fault or probes are written, and pytest's environment in one.

Owns: what is copied, and that a changed file is what is imported. Does not own: what is changed
(code_faults.py, line_probes.py), nor the run itself (reach.py, trials.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.mutants.code_faults import ROOT

_LEFT_OUT = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTHONDONTWRITEBYTECODE")
"""Variables that would change what a run of pytest in a copy does."""


class TreeCopy:
    """A copy of all files that git knows or would take. The virtual environment is shared."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.check_output(command, cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            source, target = ROOT / name, folder / name
            if source.is_file():  # one that is deleted, and not committed, is still listed
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        # Some tests ask git which files there are.
        subprocess.check_call(["git", "init", "--quiet"], cwd=folder)

    @staticmethod
    def original(file: str) -> str:
        return (ROOT / file).read_text(encoding="utf-8")

    def read(self, file: str) -> str:
        return (self.folder / file).read_text(encoding="utf-8")

    def write(self, file: str, text: str) -> None:
        """Change a file. What Python kept compiled of it goes: it is told apart by size and
        second alone.
        """
        path = self.folder / file
        path.write_text(text, encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)

    def environment(self, **more: str) -> dict[str, str]:
        """Have this copy imported, before what is installed; also by processes that tests start."""
        inherited = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
        usual = {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        return {**inherited, **usual, **more}
