"""Small data files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def save_jsonl(path: Path, *rows: Any) -> str:
    """A line for each row: JSON, or a text as it is; returns the path as a user gives it."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)
