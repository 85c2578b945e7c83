"""The run that a command is about: by its name, its folder, or none given.

Owns: which one that is. Does not own: what is done with it.
"""

from __future__ import annotations

from pathlib import Path

from dataflow.errors import nearest_or_all
from engine.cli.target import UsageError
from engine.keep.reader.run_summary import read_summaries
from engine.keep.run_folder import is_run


def find_run(command: str, name: str, root: Path) -> Path:
    """Find the folder of this run; without a name, of the one that is running, else of the one that
    was written last. Raises UsageError.
    """
    if name:
        for path in (root / name, Path(name)):
            if path.is_dir() and is_run(path):
                return path
    usage = f"{command} RUN, a run's name or folder"
    try:
        runs, _ = read_summaries(root)
    except OSError as error:
        problem = f"{str(root)[:80]!r} cannot be read: {error.strerror}"
        raise UsageError(command, problem, usage) from error
    if name:
        fix = usage
        if runs:
            fix = nearest_or_all(name, [run.name for run in runs])
        raise UsageError(command, f"no run {name[:80]!r} in {str(root)[:80]!r}", fix)
    if not runs:
        raise UsageError(command, f"no runs in {str(root)[:80]!r}", usage)
    running = [run for run in runs if run.state == "running"]
    newest, *_ = running or runs
    return Path(newest.path)
