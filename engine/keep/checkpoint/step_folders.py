"""Names and deletion of folders step_N, which are whole or absent.

Does not own: their contents and which of them stay (store.py, best_versions.py).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

TEMP = ".tmp-"
"""Prefix of an unfinished folder."""
_FINAL = re.compile(r"step_(0|[1-9][0-9]*)")


def steps_of_names(names: Iterable[str]) -> list[int]:
    """The Steps of the final names, ascending."""
    return sorted(int(match[1]) for match in map(_FINAL.fullmatch, names) if match)


def temp_of(final: Path) -> Path:
    """The folder in which this one is written."""
    return final.with_name(f"{TEMP}{final.name}")


def delete_folder(path: Path) -> None:
    """Delete a folder, renamed first: a half-deleted folder never has a final name."""
    trash = path.with_name(f"{TEMP}deleted-{path.name}")
    shutil.rmtree(trash, ignore_errors=True)
    path.rename(trash)
    shutil.rmtree(trash)
