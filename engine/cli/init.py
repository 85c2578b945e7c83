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
        found = " ".join(arguments) or "nothing"
        raise UsageError(_WHERE, f"expected a name, found {found!r}", USAGE)
    folder = Path(arguments[0])
    texts = project(_checked(folder.name, arguments[0]))
    try:
        _refuse_what_is_there(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"{str(folder)[:80]!r} cannot be written: {error.strerror}"
        raise UsageError(_WHERE, problem, "another folder") from error
    say(_told(folder, list(texts)))
    return 0


def project(name: str) -> dict[str, str]:
    """File name -> text, for a project of this name."""
    templates = sorted(files("engine.cli").joinpath("init_project").iterdir(), key=lambda t: t.name)
    return {
        template.name.removesuffix(".txt").replace("NAME", name): Template(
            template.read_text(encoding="utf-8")
        ).substitute(NAME=name)
        for template in templates
    }


def _checked(name: str, given: str) -> str:
    """A name that Python can import, and that nothing else has. Raises UsageError."""
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
        fix = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_0123456789") or "my_project"
        fix = f"{fix}_project" if keyword.iskeyword(fix) else fix
        expected = "expected a name of letters, digits and _ that Python can import"
        raise UsageError(_WHERE, f"{expected}, found {given!r}", f"dataflow init {fix}")
    for module in (name, f"{name}_reward", f"{name}_files"):
        found = find_module(module)
        if found is not None and found.origin is not None:  # None: a folder without modules
            problem = f"Python has a module {module!r} already ({found.origin})"
            raise UsageError(_WHERE, problem, f"dataflow init my_{name}")
    return name


def _refuse_what_is_there(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists():
        found = "a folder that is not empty" if folder.is_dir() else "a file"
        problem = f"expected {str(folder)!r} not to be there, found {found}"
        raise UsageError(_WHERE, problem, f"another name, as dataflow init {folder}_2")


def _told(folder: Path, names: Sequence[str]) -> str:
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
