"""Small data files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def save_jsonl(path: Path, *rows: Any) -> str:
    """Write a line for each row: JSON, or a text unchanged; returns the path as a string."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)
