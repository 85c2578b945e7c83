"""What a user's function prints, in the log of its Worker and on the screen of the run.

Owns: lines, their limits, the last few of them; hearing a function that runs in this process. Does
not own: the pipe from another (scoring_parent.py), the log (lines become records of logging).
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

from dataflow.kernel import PRINTED
from dataflow.safe_text import printable
from operators.kernels.scoring_frames import abridge

_log = logging.getLogger(PRINTED)

_LINE = 500
"""Most characters of a line."""
_PENDING = 1 << 16
"""Most bytes of a line without an end."""
_CALL, _ALL = 16 << 10, 8 << 20
"""Most bytes kept of one call, and of all calls together."""
_LAST = 20


class PrintAllowance:
    """How many bytes of all calls together are still kept."""

    def __init__(self) -> None:
        self.bytes_left = _ALL


class Output:
    """Standard output and error of one function's process and of everything that it started."""

    def __init__(
        self, name: str, kind: str = "reward", allowance: PrintAllowance | None = None
    ) -> None:
        """kind: what has that name. allowance: shared with other processes of it."""
        self._name = f"{kind} {name!r}"
        self._allowance = allowance or PrintAllowance()
        self._pending = bytearray()
        self._last: deque[str] = deque(maxlen=_LAST)
        self._call_bytes_left = _CALL
        self._skipped = 0
        self._captured: list[str] | None = None

    def add(self, printed: bytes) -> None:
        """Take bytes as they come."""
        self._pending += printed
        *lines, rest = self._pending.split(b"\n")
        if len(rest) > _PENDING:
            lines = [*lines, rest]
            rest = bytearray()
        self._pending = bytearray(rest)
        for line in lines:
            self._keep(bytes(line))

    def settle(self) -> None:
        """A call has ended: what comes next belongs to another."""
        if self._pending:
            self._keep(bytes(self._pending))
            self._pending.clear()
        if self._skipped:
            _log.warning("%s printed %d bytes more, which are not kept", self._name, self._skipped)
        self._call_bytes_left = _CALL
        self._skipped = 0

    def last(self) -> list[str]:
        """The last lines printed since `forget`."""
        lines = list(self._last)
        if self._pending:
            lines.append(_decode_line(bytes(self._pending)))
        return lines

    def forget(self) -> None:
        """What was printed so far belongs to an earlier call."""
        self._last.clear()

    @contextmanager
    def capture(self) -> Iterator[list[str]]:
        """Lines that come in the meantime go into this list, and nowhere else."""
        self._captured = []
        try:
            yield self._captured
        finally:
            self._captured = None

    def _keep(self, raw: bytes) -> None:
        line = _decode_line(raw)
        if self._captured is not None:
            self._captured.append(line)
            return
        self._last.append(line)
        size = min(len(raw), _LINE) + 1
        if size > min(self._call_bytes_left, self._allowance.bytes_left):
            self._skipped += len(raw) + 1
            return
        self._call_bytes_left -= size
        self._allowance.bytes_left -= size
        # A warning, as no level means "a user's function printed this": it must be visible even if
        # nobody configured logging.
        _log.warning("%s printed: %s", self._name, line)


@contextmanager
def hear_function(output: Output) -> Iterator[None]:
    """Hear a function while it runs in this process: lines that it prints are this Output's. What
    other threads print, and a debugger, goes where it went before.
    """
    call = _Call(output)
    with (
        redirect_stdout(_HeardStream(call, sys.stdout)),
        redirect_stderr(_HeardStream(call, sys.stderr)),
    ):
        try:
            yield
        finally:
            call.end()


class _Call:
    """A call in this thread. Records of logging may go to standard error, which is also heard: they
    pass.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._thread = threading.get_ident()
        self._logging = False

    @property
    def hears(self) -> bool:
        """Whether what is written now is the function's own."""
        is_own_thread = threading.get_ident() == self._thread
        return is_own_thread and not self._logging and sys.gettrace() is None

    def add(self, text: str) -> None:
        self._logging = True
        try:
            self._output.add(text.encode(errors="backslashreplace"))
        finally:
            self._logging = False

    def end(self) -> None:
        self._logging = True
        self._output.settle()


class _HeardStream(io.TextIOBase):
    """A standard stream of this process, as a function sees it; under: the stream as it was."""

    def __init__(self, call: _Call, under: TextIO) -> None:
        self._call = call
        self._under = under

    def write(self, text: str) -> int:
        if not self._call.hears:
            return self._under.write(text)
        self._call.add(text)
        return len(text)

    def flush(self) -> None:
        self._under.flush()

    def fileno(self) -> int:
        return self._under.fileno()

    def isatty(self) -> bool:
        return self._under.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._under.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._under.errors

    @property
    def buffer(self) -> object:
        """The bytes below, which are not heard."""
        return self._under.buffer


def _decode_line(raw: bytes) -> str:
    """A line as text of at most _LINE characters around how many were left out."""
    if len(raw) > 8 * _LINE:  # decode no more than can be shown: a character has at most 4 bytes
        raw = raw[: 4 * _LINE] + raw[-4 * _LINE :]
    text = raw.rstrip(b"\r").decode(errors="backslashreplace")
    return printable(abridge(text, _LINE))
