"""Command lines by the hundred: a process that has imported everything forks once for each.

    parent  ->  {"arguments": [...], "output": path, "faults": {...}, "limit": bytes of a file}
    parent  <-  {"code": exit code or minus the signal, "calls": [[call, path], ...],
                 "left": processes that stayed}

Each is one line of JSON. The faults are faults.py's; disk.py asserts.
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
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.kit.nothing_left import GONE_WITHIN
from tests.kit.processes import ROOT, ended, of_session, start_python

LIMIT = 240
"""Seconds after which a command counts as hung."""


@dataclass(frozen=True, kw_only=True)
class CommandEnd:
    """code: minus a signal that ended it. calls: of writers. left: processes that stayed."""

    code: int
    text: str
    calls: list[tuple[str, str]] = field(default_factory=list)
    left: int = 0

    @property
    def last(self) -> str:
        """The last line that is not empty."""
        return next((line for line in reversed(self.text.splitlines()) if line.strip()), "")


class Zygote:
    """A context manager; one command at a time."""

    def __init__(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stderr": None}
        self._process = start_python("-m", "tests.torture.zygote", cwd=ROOT, **pipes)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def run(
        self,
        arguments: Sequence[str],
        output: Path,
        faults: dict[str, Any] | None = None,
        limit: int = 0,
    ) -> CommandEnd:
        """`dataflow ARGUMENTS`, to its end. limit: bytes of a file (RLIMIT_FSIZE), 0 is any."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"arguments": list(arguments), "output": str(output), "faults": faults}
        self._process.stdin.write(json.dumps(order | {"limit": limit}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        text = output.read_text(errors="replace")
        calls = [(call, path) for call, path in answer["calls"]]
        return CommandEnd(code=answer["code"], text=text, calls=calls, left=answer["left"])


_IMPORTED = (
    "torch", "transformers.models.qwen2.modeling_qwen2", "engine.api", "engine.cli.resume",
    "engine.cli.run", "operators.kernels.data", "operators.kernels.torch.generate",
    "operators.kernels.torch.train", "tests.torture.faults", "tests.torture.victim",
)  # fmt: skip


def main() -> None:
    """Import, then one fork for each line."""
    for name in _IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        calls = Path(order["output"] + ".calls")
        pid = os.fork()
        if not pid:
            _command(order, calls)
        code, left = _waited(pid)
        written = json.loads(calls.read_text()) if calls.exists() else []
        calls.unlink(missing_ok=True)
        print(json.dumps({"code": code, "calls": written, "left": left}), flush=True)


def _command(order: dict[str, Any], calls: Path) -> None:
    """In the child: until the command has ended, by whatever."""
    code = 99
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        out = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for target, source in ((0, null), (1, out), (2, out)):
            os.dup2(source, target)
        if order["limit"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["limit"], order["limit"]))
        code = _with_faults(order, calls)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _with_faults(order: dict[str, Any], calls: Path) -> int:
    from engine.cli import main as dataflow
    from tests.torture.faults import WriteFaults, install

    real = open
    faults = WriteFaults(**order["faults"]) if order["faults"] else None
    if faults is not None:
        install(faults)
    code = dataflow(order["arguments"])
    if faults is not None:
        with real(calls, "w") as file:
            json.dump(faults.calls, file)
    return code


def _waited(pid: int) -> tuple[int, int]:
    """A child's exit code (minus SIGALRM for one that hung); how many of its session stayed."""
    hung = not ended(pid, LIMIT)
    if hung:
        os.killpg(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    end = time.monotonic() + GONE_WITHIN
    left = sum(not ended(other, end - time.monotonic()) for other in of_session(pid))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return -signal.SIGALRM if hung else os.waitstatus_to_exitcode(status), left


if __name__ == "__main__":
    main()
