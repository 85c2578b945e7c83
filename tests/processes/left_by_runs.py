"""What runs leave: metrics, weights, processes; and how two of them are compared."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Rows = list[dict[str, Any]]


def metrics(run: Path) -> Rows:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(rows: Rows) -> Rows:
    """Without what depends on the clock, or on where Workers are."""
    placed = ("time/", "throughput/", "worker/", "edge/", "coordinator/")
    return [{k: v for k, v in row.items() if not k.startswith(placed)} for row in rows]


def weights(result_or_folder: Any) -> dict[str, bytes]:
    """The bytes of every weight file of the last checkpoint, by path within it."""
    folder = Path(getattr(result_or_folder, "checkpoint", result_or_folder))
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.safetensors"))
    }


def children(parent: int | None = None) -> list[int]:
    """Processes whose parent is this one (or another), the dead that nobody waited for among them.

    Without multiprocessing's tracker: it is left by whichever test used that module in this
    process, for good.
    """
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(text.rpartition(")")[2].split()[1]) == (parent or os.getpid()) and not _tracks(
            stat.parent
        ):
            found.append(int(stat.parent.name))
    return found


def _tracks(process: Path) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def workers() -> dict[str, int]:
    """The processes of a run's Workers, which this process has started, by name: their last
    argument.
    """
    found = {}
    for pid in children():
        told = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"engine.launch.worker_process" in told:
            found[told[-2].decode()] = pid
    return found
