"""The ends of a run's logs, and the errors of its rows.

Owns: which lines are shown. Does not own: the files (engine/keep/worker_logs.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from dataflow.safe_text import one_line, printable
from engine.keep.flow.records import Lost, Tombstones
from engine.keep.reader.open_folder import NotServed, OpenFolder, inside

LOGS = "logs"
_TAIL = 1 << 18
MOST_LINES = 2000


def log_lines(run: OpenFolder, worker: str, lines: int) -> list[str]:
    """The last lines of a Worker's log; control characters as codes. Raises NotServed for a Worker
    without one.
    """
    name = f"{worker.replace('/', '_')}.log"
    file = None
    with inside(run, LOGS) as folder:
        if folder is not None and name in folder.names():
            file = folder.open(name)
    if file is None:
        raise NotServed(f"no log of {one_line(worker)[:80]!r}")
    with file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        text = file.read(_TAIL).decode("utf-8", "replace")
    tail_lines = text.splitlines()
    if size > _TAIL:
        tail_lines = tail_lines[1:]  # the first one may be the rest of a line
    count = min(lines, MOST_LINES)
    return [printable(line, keep="\t") for line in tail_lines[-count:]]


def logged_workers(run: OpenFolder) -> list[str]:
    """The names that have a log."""
    names: Sequence[str] = ()
    with inside(run, LOGS) as folder:
        if folder is not None:
            names = folder.names()
    return [name.removesuffix(".log") for name in names if name.endswith(".log")]


def errors_of(
    mishaps: Iterable[Lost | Tombstones], node: str, workers: Iterable[str]
) -> list[dict[str, Any]]:
    """List what failed in a node, and the losses of its Workers, the newest first."""
    errors: list[dict[str, Any]] = []
    for mishap in mishaps:
        if isinstance(mishap, Lost):
            if mishap.worker in workers:
                error = one_line(mishap.error)
                errors.append({"step": mishap.step, "key": None, "error": error})
        elif mishap.node == node:
            errors.append(_describe_tombstones(mishap))
    return errors


def _describe_tombstones(mishap: Tombstones) -> dict[str, Any]:
    keys = [list(key) for key in mishap.keys]
    return {
        "step": mishap.step,
        "key": keys[0] if keys else None,
        "keys": keys[:50],
        "failed": mishap.failed,
        "row_only": mishap.row_only,
        "error": one_line(mishap.error),
    }
