"""What is safe of a run when something could not be written.

Owns: that sentence at the end of such an error. Does not own: the error (dataflow/storage.py), nor
checkpoints (store.py).
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
    """Add to a StorageError of a run in this folder what is safe, and how the run goes on."""
    try:
        yield
    except StorageError as error:
        raise StorageError(f"{error} {what_is_safe(folder)}") from error


def what_is_safe(folder: Path) -> str:
    """`Safe: the checkpoint of step 4; then: dataflow resume runs/a`."""
    try:
        names = os.listdir(folder / "checkpoints")
    except OSError:
        names = []
    steps = steps_of(names)
    begun = os.path.isfile(folder / "options.json")  # False if that cannot be read
    if steps:
        return (
            f"Safe: the checkpoint of step {steps[-1]}, from which `dataflow resume {folder}`"
            " goes on."
        )
    if begun:
        return (
            f"Safe: no checkpoint had been made; `dataflow resume {folder}` begins again at step 1."
        )
    return "Safe: nothing had begun; start it again."
