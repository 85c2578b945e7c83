"""The processes that this one has started: its children, the Workers of a run among them."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
        of = int(text.rpartition(")")[2].split()[1])
        if of == (parent or os.getpid()) and not _tracks(stat.parent):
            found.append(int(stat.parent.name))
    return found


def _tracks(process: Path) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def workers() -> dict[str, int]:
    """The processes of a run's Workers that this one has started, by name, their last argument."""
    found = {}
    for pid in children():
        told = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"engine.launch.worker_process" in told:
            found[told[-2].decode()] = pid
    return found
