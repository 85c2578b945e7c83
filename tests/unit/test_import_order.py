"""The user's folders come last: nothing there takes the place of Python's or a package's own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy
import pytest

from dataflow.import_order import (
    describe_hidden_modules,
    describe_replaced_packages,
    find_module,
    import_path,
    interpreter,
    is_installed,
)
from dataflow.shipping import pickle_by_value
from tests.kit.processes import ROOT

SHADOWS = "json random torch struct numpy pyarrow msgspec transformers selectors"


def test_the_path_has_installed_packages_before_the_users_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = tmp_path / "first", tmp_path / "last"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(first), "", *sys.path, str(last)])
    found = import_path()
    assert len(found) == len(set(found))
    assert all(os.path.isabs(entry) for entry in found)
    installed = found.index(str(Path(pytest.__file__).parent.parent))
    assert installed < found.index(str(last)) < found.index(str(first)) < found.index(str(tmp_path))
    assert set(found) >= {str(first), str(tmp_path), str(last)}


def test_a_fresh_interpreter_finds_the_users_modules_after_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SHADOWS.split():
        text = f"raise SystemExit('the {name} of the user ran')\n"
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "only_mine.py").write_text("WORD = 'mine'\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    code = "import json, random, struct, numpy, selectors, only_mine\n"
    command = interpreter(code + "print([only_mine.WORD, *sys.argv[3:]])", "title", "a", "b c")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "['mine', 'a', 'b c']\n"


def test_a_module_is_located_without_running_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "loud_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('ran')\n")
    (package / "inner.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    spec = find_module("loud_package.inner")
    assert spec.origin == str(package / "inner.py")
    assert "loud_package" not in sys.modules
    assert find_module("loud_package.nothing") is None
    assert find_module("no_such_package.inner") is None
    assert find_module("operators.kernels.torch.train") is not None


def test_a_module_with_two_names_is_shipped_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "twice.py").write_text("def f():\n    return 1\n")
    spec = spec_from_file_location("twice", tmp_path / "twice.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("twice", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, module)
    again = pickle.loads(pickle_by_value(module.f, "f"))
    assert again is not module.f, "it was sent by name, so this tests nothing"
    assert again() == 1


def test_packages_of_an_environment_below_are_installed_ones(tmp_path: Path) -> None:
    assert is_installed(os.__file__)
    assert is_installed(numpy.__file__)
    assert is_installed("/usr/lib/python3/dist-packages/torch/__init__.py")
    assert not is_installed(str(tmp_path / "my_script.py"))
    assert not is_installed(str(ROOT / "graphs/grpo.py"))


def _with_packages(folder: Path) -> Path:
    """A user's folder with a package `operators`, scripts in `graphs/`, plots in `engine/`."""
    for name in ("operators/__init__.py", "graphs/mine.py", "engine/plot.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "uses.py").write_text("import dataflow\nimport graphs.grpo\n")
    text = "import graphs.grpo\n\ndef test_one():\n    pass\n"
    (folder / "test_uses.py").write_text(text)
    return folder


def _said(folder: Path, *command: str) -> list[str]:
    """What a command in a folder says of dataflow, a line each."""
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=300
    )
    lines = (done.stderr + done.stdout).splitlines()
    return [line for line in lines if line.startswith("dataflow:")]


def test_folders_that_targets_cannot_import_are_named(tmp_path: Path) -> None:
    folder = _with_packages(tmp_path)
    both = f"{folder / 'operators/'}/, {folder / 'graphs/'}/"
    told = f"dataflow: {both} are hidden by dataflow-rl's packages of that name (in {ROOT})."
    code = "import engine.start, sys; sys.exit(engine.start.main())"
    assert _said(folder, "-P", "-c", code, "--version") == [f"{told} Fix: give them other names."]
    assert describe_hidden_modules(str(ROOT)) is None
    assert describe_hidden_modules(str(ROOT / "docs")) is None


@pytest.mark.long
@pytest.mark.parametrize("command", [["uses.py"], ["-m", "pytest", "-q", "-p", "no:cacheprovider"]])
def test_folders_in_place_of_ours_are_named(tmp_path: Path, command: list[str]) -> None:
    folder = _with_packages(tmp_path)
    place = f"{folder / 'operators'} is imported in place of dataflow-rl's package of that name"
    told = f"dataflow: {place} (in {ROOT}). Fix: give it another name."
    assert set(_said(folder, *command)) == {told}
    assert describe_replaced_packages() is None
