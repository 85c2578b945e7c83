"""`dataflow resume RUN_FOLDER`: go on from the last checkpoint.

Owns: which options may change. Does not own: the options (engine.options), the run (engine.api).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import tyro

from engine.cli.run import ended
from engine.cli.target import UsageError, tell_imports
from engine.cli.values import gathered, registry
from engine.options import RunOptions, from_json
from engine.received import imports, text_of
from engine.run.signals import ending_command

_FIXED = ("seed", "name", "runs", "overwrite")
"""What makes a run the run it is."""
_ACCEPT = "--accept-changes"


def main(arguments: Sequence[str]) -> int:
    """Resume; raises CheckpointError where there is nothing to go on from."""
    folder, flags = _folder(arguments)
    accept, flags = _ACCEPT in flags, [flag for flag in flags if flag != _ACCEPT]
    changes = changed_options(flags)
    with ending_command():
        from engine.api import resume  # here: it imports what runs kernels

        tell_imports(imports_of(folder))
        return ended(resume(folder, accept_changes=accept, **changes))


def imports_of(folder: Path) -> list[str]:
    """What resuming will import, and from where; empty if the folder lacks the files."""
    kept = [folder / name for name in ("graph.json", "options.json")]
    if not all(file.is_file() for file in kept):
        return []
    _, folders = from_json(text_of(kept[1]), {})
    return imports(kept[0], folders)


def _folder(arguments: Sequence[str]) -> tuple[Path, Sequence[str]]:
    if arguments and arguments[0] in ("-h", "--help"):
        changed_options(["--help"])
    if not arguments or arguments[0].startswith("-"):
        fix = "dataflow resume runs/NAME [flags]"
        raise UsageError("dataflow resume", "expected the run's folder first", fix)
    path = Path(arguments[0])
    if not path.is_dir():
        fix = "the run folder, such as runs/NAME"
        raise UsageError("dataflow resume", f"no folder {str(path)!r}", fix)
    return path, arguments[1:]


def changed_options(flags: Sequence[str]) -> dict[str, Any]:
    """The given options by name; the run keeps the others. Raises UsageError for a fixed one."""
    about = (
        "Go on from a run folder's last checkpoint. Options that are not given stay as the run had"
        " them. Where a parameter, data, a model or a source file is another than it was, that is"
        f" refused; with {_ACCEPT} it holds from the next Step on, and is recorded."
    )
    words = gathered(flags, (RunOptions,))
    prog = "dataflow resume RUN_FOLDER"
    options = tyro.cli(RunOptions, args=words, prog=prog, description=about, registry=registry())
    said = {flag.partition("=")[0].replace("-", "_") for flag in flags if flag.startswith("--")}
    given = [f.name for f in fields(RunOptions) if said & {f"__{f.name}", f"__no_{f.name}"}]
    for name in (name for name in given if name in _FIXED):
        problem = f"{name} cannot change in the middle of a run"
        fix = f"leave --{name} out, or start another run"
        raise UsageError("dataflow resume", problem, fix)
    return {name: getattr(options, name) for name in given}
