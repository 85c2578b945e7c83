"""Folders named step_N that are whole or absent: their names, and how one disappears.

Owns: what checkpoints (store.py) and best versions (best.py) have in common. Does not own: what is
in a folder, nor which of them stay.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

TEMP = ".tmp-"
"""What the name of an unfinished folder begins with."""
_FINAL = re.compile(r"step_(0|[1-9][0-9]*)")


def steps_of(names: Iterable[str]) -> list[int]:
    """The Steps of the final names among these, ascending."""
    found = (_FINAL.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def temp_of(final: Path) -> Path:
    """The folder in which this one is written."""
    return final.with_name(f"{TEMP}{final.name}")


def delete(path: Path) -> None:
    """Rename it away first: a half-deleted folder never has a final name."""
    trash = path.with_name(f"{TEMP}deleted-{path.name}")
    shutil.rmtree(trash, ignore_errors=True)
    path.rename(trash)
    shutil.rmtree(trash)
