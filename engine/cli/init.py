"""`dataflow init NAME`: a small project of one's own that runs as it is.

Owns: the name's check, and writing the files. Does not own: what is in them (init_project/, where
$NAME and the NAME of a file's own stand for the name).
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from dataflow.import_order import find_module
from engine.cli.screen import say
from engine.cli.target import UsageError

USAGE = "dataflow init NAME"
_WHERE = "dataflow init"
_HELP = f"""usage: {USAGE}

Make the folder NAME with a graph, a reward, their test and a README, which run as they are: a tiny
model, made in a second, is trained on a few prompts. NAME may be a path; its last part names the
graph and its files."""


def main(arguments: Sequence[str]) -> int:
    """Write the project, and print what to do next; raises UsageError and leaves what is there."""
    if arguments and arguments[0] in ("-h", "--help"):
        say(_HELP)
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        words = " ".join(arguments) or "nothing"
        raise UsageError(_WHERE, f"expected a name, found {words!r}", USAGE)
    folder = Path(arguments[0])
    _require_name(folder.name, arguments[0])
    texts = make_project(folder.name)
    try:
        _require_room(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"{str(folder)[:80]!r} cannot be written: {error.strerror}"
        raise UsageError(_WHERE, problem, "another folder") from error
    say(_next_steps(folder, list(texts)))
    return 0


def make_project(name: str) -> dict[str, str]:
    """Write the texts of a project of this name, by the names of its files."""
    folder = files("engine.cli").joinpath("init_project")
    texts: dict[str, str] = {}
    for template in sorted(folder.iterdir(), key=lambda each: each.name):
        file_name = template.name.removesuffix(".txt").replace("NAME", name)
        text = Template(template.read_text(encoding="utf-8"))
        texts[file_name] = text.substitute(NAME=name)
    return texts


def _require_name(name: str, path: str) -> None:
    """Raise UsageError for a name that Python cannot import, or that some module has already.
    path: as it was written.
    """
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
        fix = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_0123456789") or "my_project"
        if keyword.iskeyword(fix):
            fix = f"{fix}_project"
        expected = "expected a name of letters, digits and _ that Python can import"
        raise UsageError(_WHERE, f"{expected}, found {path!r}", f"dataflow init {fix}")
    for module in (name, f"{name}_reward", f"{name}_files"):
        spec = find_module(module)
        if spec is not None and spec.origin is not None:  # None: a folder without modules
            problem = f"Python has a module {module!r} already ({spec.origin})"
            raise UsageError(_WHERE, problem, f"dataflow init my_{name}")


def _require_room(folder: Path) -> None:
    """Raise UsageError where something is there already; an empty folder may be."""
    if folder.is_dir():
        if not any(folder.iterdir()):
            return
        obstacle = "a folder that is not empty"
    elif folder.exists():
        obstacle = "a file"
    else:
        return
    problem = f"expected {str(folder)!r} not to be there, found {obstacle}"
    raise UsageError(_WHERE, problem, f"another name, as dataflow init {folder}_2")


def _next_steps(folder: Path, names: Sequence[str]) -> str:
    """Say what was written, and the commands to go on with."""
    commands = [
        f"cd {folder}",
        f"dataflow check {folder.name}.py:graph",
        "pytest",
        f"dataflow run {folder.name}.py:graph --steps 20",
    ]
    missing = [package for package in ("pytest", "hypothesis") if find_spec(package) is None]
    if missing:
        commands.insert(2, "pip install 'dataflow-rl[test]'")
    lines = "\n".join(f"    {command}" for command in commands)
    return f"{folder}: made {', '.join(names)}. Next:\n{lines}"
