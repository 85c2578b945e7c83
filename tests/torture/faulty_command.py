"""A command line in a process of its own, whose writes fail as faults.py says; disk.py asserts.

`python -m tests.torture.faulty_command ORDER` is that process. An order is JSON:

    {"arguments": [...], "faults": {...} or null, "limit": bytes of a file, "calls": path}
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.cli import main as dataflow
from tests.kit.forked import IMPORTED
from tests.kit.nothing_left import GONE_WITHIN
from tests.kit.processes import ROOT, ended, ended_within, kill, of_session, start_python
from tests.torture.faults import WriteFaults, install

LIMIT = 240
"""Seconds after which a command counts as hung."""


@dataclass(frozen=True, kw_only=True)
class CommandEnd:
    """code: minus a signal that ended it, SIGALRM if it hung. calls: file of the calls of writers.
    left: processes that stayed.
    """

    code: int
    text: str
    calls: Path
    left: int

    @property
    def last(self) -> str:
        """The last line that is not empty."""
        return next((line for line in reversed(self.text.splitlines()) if line.strip()), "")


def called(
    arguments: Sequence[str], output: Path, faults: dict[str, Any] | None = None, limit: int = 0
) -> CommandEnd:
    """`dataflow ARGUMENTS`, to its end. limit: bytes of a file (RLIMIT_FSIZE), 0 is any."""
    calls = output.with_suffix(".calls")
    order = {"arguments": arguments, "faults": faults, "limit": limit, "calls": str(calls)}
    with open(output, "w") as out:
        process = start_python(
            *("-m", "tests.torture.faulty_command", json.dumps(order)),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    hung = not ended_within(process, LIMIT)
    if hung:
        kill(of_session(process.pid))
    end = time.monotonic() + GONE_WITHIN
    left = sum(not ended(pid, end - time.monotonic()) for pid in of_session(process.pid))
    kill(of_session(process.pid))
    code = process.wait()
    code = -signal.SIGALRM if hung else code
    return CommandEnd(code=code, text=output.read_text(errors="replace"), calls=calls, left=left)


def main(order: dict[str, Any]) -> None:
    """Until the command has ended, by whatever; a full disk may take its last words, too."""
    for name in IMPORTED:  # what was imported before faults come calls what they replace
        importlib.import_module(name)
    code = 99
    try:
        if order["limit"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["limit"], order["limit"]))
        faults = WriteFaults(**order["faults"]) if order["faults"] else None
        if faults is not None:
            install(faults)
        code = dataflow(order["arguments"])
        if faults is not None:
            Path(order["calls"]).write_text(json.dumps(faults.calls))
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
