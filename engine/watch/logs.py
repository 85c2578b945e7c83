"""The ends of a run's logs, and the errors of its rows.

Owns: which lines are shown. Does not own: the files (engine/keep/worker_logs.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
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
    with inside(run, LOGS) as folder:
        if folder is not None and name in folder.names():
            file = folder.open(name)
        else:
            file = None
    if file is None:
        raise NotServed(f"no log of {one_line(worker)[:80]!r}")
    with file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        text = file.read(_TAIL).decode("utf-8", "replace")
    tail_lines = text.splitlines()
    if size > _TAIL:
        tail_lines = tail_lines[1:]
    else:
        tail_lines = tail_lines
    return [printable(line, keep="\t") for line in tail_lines[-min(lines, MOST_LINES) :]]


def logged_workers(run: OpenFolder) -> list[str]:
    """The names that have a log."""
    with inside(run, LOGS) as folder:
        if folder is not None:
            names = folder.names()
        else:
            names = []
    return [name.removesuffix(".log") for name in names if name.endswith(".log")]


def errors_of(
    mishaps: Iterable[Lost | Tombstones], node: str, workers: Iterable[str]
) -> list[dict[str, Any]]:
    """What failed in a node, and the losses of its Workers, the newest first."""
    errors = []
    for each in mishaps:
        if isinstance(each, Lost):
            if each.worker in workers:
                errors.append({"step": each.step, "key": None, "error": one_line(each.error)})
        elif each.node == node:
            keys = [list(key) for key in each.keys]
            if keys:
                first = keys[0]
            else:
                first = None
            errors.append(
                {
                    "step": each.step,
                    "key": first,
                    "keys": keys[:50],
                    "failed": each.failed,
                    "error": one_line(each.error),
                }
            )
    return errors
