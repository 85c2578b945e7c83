"""`dataflow watch` in a process of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.kit.processes import COMMAND_LINE, limited, start_python

LIMIT = 1800.0
"""Seconds: one server serves all tests, however busy the machine is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server. entry: the URL with its token; base: without."""

    entry: str
    process: subprocess.Popen[str]

    def kill(self) -> None:
        """End it at once, as a crash does."""
        self.process.kill()
        self.process.wait()

    @property
    def base(self) -> str:
        return self.entry.partition("?")[0]

    @property
    def port(self) -> int:
        return int(self.base.rstrip("/").rpartition(":")[2])


@contextlib.contextmanager
def served(root: Path, *, port: int = 0) -> Iterator[Served]:
    """The server of all runs below a folder; it is killed at the end."""
    words = ["-c", COMMAND_LINE, "watch", "--root", root, "--port", port]
    with limited(start_python(*words), LIMIT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline().strip()
        assert line.startswith("http://127.0.0.1:"), line + process.stderr.read()
        yield Served(entry=line, process=process)
