"""What an environment's process prints, read from its pipe.

Owns: the pipe, the stack that is printed when a process is late. Does not own: lines and their
limits (scoring_output.py).
"""

from __future__ import annotations

import contextlib
import os
import selectors
from itertools import takewhile

from operators.kernels.scoring_output import Output, PrintAllowance

_READ = 1 << 16
_READS = 16
"""Most reads in one go: something may print without end."""
_OUR_FRAMES = os.path.dirname(os.path.abspath(__file__)) + os.sep


class PrintedLines:
    """The pool's end of a pipe. printing: the other end, until it is passed on."""

    def __init__(
        self, name: str, allowance: PrintAllowance, selector: selectors.BaseSelector
    ) -> None:
        self._selector = selector
        self._output = Output(name, "environment", allowance)
        self._capturing = contextlib.ExitStack()
        self._stack_lines: list[str] | None = None
        self._printed, self.printing = os.pipe()
        os.set_blocking(self._printed, False)
        selector.register(self._printed, selectors.EVENT_READ, self._act)
        self._is_open = True

    def begin_call(self) -> None:
        """What was printed so far belongs to an earlier call."""
        self._output.forget()

    def end_call(self) -> None:
        """Read what was printed before an answer."""
        self.hear()
        self._output.settle()

    def capture_stack(self) -> None:
        """What is printed from now on is a stack."""
        self.hear()
        self._stack_lines = self._capturing.enter_context(self._output.capture())

    def stack(self) -> str:
        """The stack that was printed; empty if none was."""
        self.hear()
        frames = [line for line in self._stack_lines or () if line.startswith("  File ")]
        return format_stack(frames)

    def last(self) -> str:
        """What it printed before its end: for a crash the stack, without this package's frames."""
        self.hear()
        lines: list[str] = []
        for line in self._output.last():
            if not (line.startswith("  File ") and _OUR_FRAMES in line):
                lines.append(f"  | {line}")
        return "\n".join(["It printed last:", *lines]) if lines else ""

    def hear(self) -> None:
        """Read what is there."""
        for _ in range(_READS):
            if not self._is_open:
                return
            try:
                printed = os.read(self._printed, _READ)
            except BlockingIOError:
                return
            if not printed:  # nobody prints there any more
                self._leave()
                return
            self._output.add(printed)

    def close(self) -> None:
        """Read what is left, and close the pipe."""
        if self._is_open:
            self.hear()
        self._capturing.close()
        self._output.settle()
        self._leave()

    def _act(self, events: int) -> None:
        self.hear()

    def _leave(self) -> None:
        if self._is_open:
            self._is_open = False
            self._selector.unregister(self._printed)
            os.close(self._printed)


def format_stack(frames: list[str]) -> str:
    """Where it stood, of frames with the innermost first: from ours on are those that called it."""
    user_frames = list(takewhile(lambda frame: _OUR_FRAMES not in frame, frames))
    if not user_frames:
        return ""
    return "It stood at (the innermost call first):\n" + "\n".join(user_frames)
