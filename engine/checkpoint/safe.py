"""The sentence at the end of a StorageError that says what of the run is safe.

Does not own: the error (dataflow/storage.py), checkpoints (store.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dataflow.errors import StorageError
from engine.checkpoint.folders import steps_of


@contextmanager
def telling_what_is_safe(folder: Path) -> Iterator[None]:
    """Add to a StorageError of a run in this folder what is safe, and how to go on."""
    try:
        yield
    except StorageError as error:
        raise StorageError(f"{error} {what_is_safe(folder)}") from error


def what_is_safe(folder: Path) -> str:
    """E.g. "Safe: the checkpoint of step 4, from which `dataflow resume runs/a` goes on."."""
    try:
        steps = steps_of(os.listdir(folder / "checkpoints"))
    except OSError:
        steps = []
    resume = f"`dataflow resume {folder}`"
    if steps:
        return f"Safe: the checkpoint of step {steps[-1]}, from which {resume} goes on."
    if os.path.isfile(folder / "options.json"):  # False if that cannot be read
        return f"Safe: no checkpoint had been made; {resume} begins again at step 1."
    return "Safe: nothing had begun; start it again."
