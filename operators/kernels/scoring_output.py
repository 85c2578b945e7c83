"""What a user's function prints, in the log of its Worker.

Owns: lines, their limits, the last few of them. Does not own: the pipe (scoring_parent.py), the log
(lines become records of logging).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from dataflow.shown import printable
from operators.kernels.scoring_frames import bounded

_log = logging.getLogger(__name__)

_LINE = 500
"""Most characters of a line."""
_PENDING = 1 << 16
"""Most bytes of a line without an end."""
_CALL, _ALL = 16 << 10, 8 << 20
"""Most bytes kept of one call, and of all calls together."""
_LAST = 20


class Output:
    """Standard output and error of one function's process and of everything that it started."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending = bytearray()
        self._last: deque[str] = deque(maxlen=_LAST)
        self._left, self._left_in_all = _CALL, _ALL
        self._skipped = 0
        self._captured: list[str] | None = None

    def add(self, data: bytes) -> None:
        """Take bytes as they come."""
        self._pending += data
        *lines, rest = self._pending.split(b"\n")
        if len(rest) > _PENDING:
            lines, rest = [*lines, rest], bytearray()
        self._pending = bytearray(rest)
        for line in lines:
            self._keep(bytes(line))

    def settle(self) -> None:
        """A call has ended: what comes next belongs to another."""
        if self._pending:
            self._keep(bytes(self._pending))
            self._pending.clear()
        if self._skipped:
            _log.warning(
                "reward %r printed %d bytes more, which are not kept", self._name, self._skipped
            )
        self._left, self._skipped = _CALL, 0

    def last(self) -> list[str]:
        """The last lines printed since `forget`."""
        pending = [_line(bytes(self._pending))] if self._pending else []
        return [*self._last, *pending]

    def forget(self) -> None:
        """What was printed so far belongs to an earlier call."""
        self._last.clear()

    @contextmanager
    def captured(self) -> Iterator[list[str]]:
        """Lines that come in the meantime go into this list, and nowhere else."""
        self._captured = []
        try:
            yield self._captured
        finally:
            self._captured = None

    def _keep(self, raw: bytes) -> None:
        line = _line(raw)
        if self._captured is not None:
            self._captured.append(line)
            return
        self._last.append(line)
        size = min(len(raw), _LINE) + 1
        if size > min(self._left, self._left_in_all):
            self._skipped += len(raw) + 1
            return
        self._left -= size
        self._left_in_all -= size
        # A warning, as no level means "a user's function printed this": it must be visible even if
        # nobody configured logging.
        _log.warning("reward %r printed: %s", self._name, line)


def _line(raw: bytes) -> str:
    cut = raw if len(raw) <= 8 * _LINE else raw[: 4 * _LINE] + raw[-4 * _LINE :]
    return printable(bounded(cut.rstrip(b"\r").decode(errors="backslashreplace"), _LINE))
