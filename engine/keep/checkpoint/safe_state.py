"""What of a run is safe, in words: at the end of a StorageError, and where a signal ends a run.

Does not own: the error (dataflow/storage.py), the signals (engine/run/loop/signals.py), checkpoints
(store.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dataflow.errors import StorageError
from engine.keep.checkpoint.step_folders import steps_of_names

_ABSENT = (FileNotFoundError, NotADirectoryError)


@contextmanager
def telling_what_is_safe(folder: Path, *, is_made: bool = True) -> Iterator[None]:
    """Add to a StorageError of a run in this folder what is safe, and how to go on. is_made:
    whether the folder is there already.
    """
    place = folder.absolute()  # a user's function may go to another folder
    try:
        yield
    except StorageError as error:
        safe = what_is_safe(place, shown=folder, is_made=is_made)
        raise StorageError(f"{error} Safe: {safe}.") from error


def what_is_safe(folder: Path, *, shown: Path, is_made: bool = True) -> str:
    """E.g. "the checkpoint of step 4, from which `dataflow resume runs/a` goes on". shown: the
    folder as the user named it.
    """
    resume = f"`dataflow resume {shown}`"
    try:
        steps = _steps(folder)
        begun = _is_there(folder / "options.json")
        lost = is_made and not _is_there(folder)
    except OSError as error:
        why = error.strerror or str(error)
        return f"what there is cannot be seen now ({why}); {resume} looks for the last checkpoint"
    if steps:
        return f"the checkpoint of step {steps[-1]}, from which {resume} goes on"
    if begun:
        return f"no checkpoint had been made; {resume} begins again at step 1"
    if lost:
        return f"nothing, as {shown} is not there any more; start it again"
    return "nothing had begun; start it again"


def _steps(folder: Path) -> list[int]:
    try:
        return steps_of_names(os.listdir(folder / "checkpoints"))
    except _ABSENT:
        return []


def _is_there(path: Path) -> bool:
    """Raises OSError where that cannot be seen."""
    try:
        os.stat(path)
    except _ABSENT:
        return False
    return True
