"""Environments in another interpreter: classes by name or by file, and what cannot get there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import KernelError
from operators.environments import Environment
from operators.kernels.environments import child
from operators.kernels.environments.targets import describe_target, describe_template
from tests.kit.environment_classes import Obedient
from tests.kit.environment_pools import begin, contents, fault_of, finish, opened, step

pytestmark = pytest.mark.timeout(180)

SOURCE = '''
import sys
import bare_words

class {name}:
    """Needs only the standard library."""

    def reset(self, seed, question):
        self.seed = seed
        return f"{{bare_words.GREETING}} {{question}}"

    def step(self, message):
        if message["content"] == "packages":
            return " ".join(sys.modules), None, False
        if message["content"] == "raise":
            raise ValueError("boom")
        return message["content"], 1.0, True
'''


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """An interpreter without installed packages."""
    script = tmp_path / "bare-python"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S "$@"\n')
    script.chmod(0o755)
    return str(script)


def written(folder: Path, name: str) -> Path:
    """A file with an environment, and another one that it imports."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bare_words.py").write_text("GREETING = 'hello'\n")
    path = folder / f"{name.lower()}.py"
    path.write_text(textwrap.dedent(SOURCE.format(name=name)))
    return path


def play(target: Any, python: str, isolation: str = "process") -> None:
    with opened(target, python=python, isolation=isolation) as pool:
        assert begin(pool, 1)[1].text == "hello q1"
        imported = contents(step(pool, 1, "packages"))[0].split()
        assert not {"numpy", "cloudpickle", "operators", "dataflow"} & set(imported)
        assert finish(pool, 1).state == {"seed": 7}
        begin(pool, 2)
        assert fault_of(step(pool, 2, "raise")).text == "raised ValueError: boom"


@pytest.mark.parametrize("isolation", ["process", "shared"])
def test_a_class_of_an_importable_file_runs_where_nothing_of_ours_is_installed(
    tmp_path: Path, bare_python: str, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    name = f"Importable{isolation}"
    written(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name.lower())
    play(getattr(module, name), bare_python, isolation)


def test_a_class_of_a_file_that_was_loaded_by_its_path_runs_there(
    tmp_path: Path, bare_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "elsewhere", "Loaded")
    monkeypatch.syspath_prepend(path.parent)
    spec = importlib.util.spec_from_file_location("another_name", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    described = describe_target("played", module.Loaded)
    assert described == {"kind": "file", "path": str(path), "qualname": "Loaded"}
    play(module.Loaded, bare_python)


def test_a_target_is_described_by_what_finds_it_there() -> None:
    described = describe_target("played", [Obedient, "a-name"])
    root = str(Path(__file__).resolve().parents[2])
    module = {
        "kind": "module",
        "module": "tests.kit.environment_classes",
        "qualname": "Obedient",
        "folder": root,
    }
    name = {"kind": "text", "text": "a-name"}
    assert described == {"kind": "list", "members": [module, name]}
    installed = describe_target("played", pytest.Module)
    assert installed["module"] == "_pytest.python"
    assert installed["folder"] == ""


class OfNotebook:
    __module__ = "__main__"

    def reset(self) -> None:
        return None


def test_what_no_other_interpreter_can_import_is_refused_with_what_to_do() -> None:
    def inner() -> None:
        return None

    fix = r"Fix: define it at the top of a file \(\.py\), or leave out python=\."
    with pytest.raises(KernelError, match=f"inner, which is defined inside a function. {fix}"):
        describe_target("played", inner)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("class Cell:\n    def reset(self): return None\n", namespace)
    where = "Cell, which is defined in a notebook or a shell"
    with pytest.raises(KernelError, match=f"{where}. {fix}"):
        describe_target("played", namespace["Cell"])


def test_a_class_of_a_script_is_found_by_its_file() -> None:
    described = describe_target("played", OfNotebook)
    assert described == {"kind": "file", "path": __file__, "qualname": "OfNotebook"}


CHILD = Path(child.__file__).parent
FILES = [*CHILD.glob("*.py"), CHILD / "adapters/__init__.py", CHILD / "adapters/native.py"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_runs_there_is_python_3_9_and_imports_the_standard_library_alone(file: Path) -> None:
    tree = ast.parse(file.read_text(), feature_version=(3, 9))
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(node.module or "")
    packages = {name.partition(".")[0] for name in imported}
    assert packages <= set(sys.stdlib_module_names)


def test_an_interpreter_that_is_not_there_is_named() -> None:
    environment = Environment(adapter="native", target=Obedient, python="/nowhere/python")
    with pytest.raises(KernelError, match=r"found '/nowhere/python', which cannot be run\. Fix: "):
        describe_template("played", environment)


def test_a_class_that_exists_nowhere_else_runs_in_the_runs_own_interpreter() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    source = "class Cell:\n"
    source += "    def reset(self, question): return question\n"
    source += "    def step(self, message): return message['content'], None, True\n"
    exec(source, namespace)
    with opened(namespace["Cell"]) as pool:
        assert begin(pool, 1)[1].text == "q1"
        assert step(pool, 1, "x").done


def test_what_is_missing_there_is_said_with_its_traceback(
    tmp_path: Path, bare_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "Lacking")
    path.write_text("import no_such_package\n" + path.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "no_such_package", sys)
    module = importlib.import_module("lacking")
    with (
        pytest.raises(KernelError, match="raised ModuleNotFoundError: No module named 'no_such"),
        opened(module.Lacking, python=bare_python),
    ):
        pytest.fail("it opened")
