"""Equality where `==` is not enough, and golden files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def same_message(one: Any, other: Any) -> bool:
    """Equal in type and in every value, arrays by content."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if dataclasses.is_dataclass(one):
        names = [f.name for f in dataclasses.fields(one)]
        return all(same_message(getattr(one, n), getattr(other, n)) for n in names)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_message, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_message(one[k], other[k]) for k in one)
    return bool(one == other)


def require_golden(name: str, text: str, encoding: str = "ascii") -> None:
    """Require the text of tests/golden/NAME; with GOLDEN=write in the environment, write it."""
    path = GOLDEN / name
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding=encoding)
    assert text == path.read_text(encoding=encoding)


def golden_names(folder: str, ending: str = "txt") -> set[str]:
    """The names, without their ending, of the golden files in a folder."""
    return {file.stem for file in (GOLDEN / folder).glob(f"*.{ending}")}
