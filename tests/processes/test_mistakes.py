"""What beginners' mistakes are told, word by word, and the page that explains it.

`GOLDEN=write pytest tests/processes/test_mistakes.py` writes the golden messages anew; read the
difference, then run scripts/troubleshooting.py.
"""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cli import main
from tests.kit.comparison import golden_names, require_golden
from tests.mistakes import Mistake

KINDS = ("data", "model", "reward", "environment", "graph", "options", "hosts")
ALL = [
    pytest.param(kind, mistake, id=mistake.name)
    for kind in KINDS
    for mistake in importlib.import_module(f"tests.mistakes.{kind}").MISTAKES
]
ROWS = "".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(8))
REWARD = "def exact(completions, answer, **kwargs):\n    return [0.0 for _ in completions]\n"


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model, data and a reward in the working directory; what it imports is forgotten."""
    shutil.copytree(tiny_folder / "model", tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(ROWS)
    (tmp_path / "rewards.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("COLUMNS", raising=False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.long
@pytest.mark.parametrize("kind, mistake", ALL)
def test_a_mistake_is_told(
    kind: str, mistake: Mistake, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in mistake.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if mistake.change is not None:
        mistake.change(folder)
    program, *words = shlex.split(mistake.command)
    assert program == "dataflow"
    code = main(words)
    told = capfd.readouterr().err
    assert code in (1, 2, 3), told
    told = re.sub(r"first completion: '.*?'(?=\.)", "first completion: '...'", told)
    require_golden(f"mistakes/{kind}/{mistake.name}.txt", told.replace(str(folder), "."), "utf-8")


def test_each_kind_has_ten_and_no_message_is_left_over() -> None:
    for kind in KINDS:
        mistakes = importlib.import_module(f"tests.mistakes.{kind}").MISTAKES
        assert len(mistakes) >= 10, kind
        assert golden_names(f"mistakes/{kind}") == {mistake.name for mistake in mistakes}
