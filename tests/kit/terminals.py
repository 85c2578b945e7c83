"""A terminal for a test: a program's output on it, and the screen that it leaves."""

from __future__ import annotations

import errno
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from fcntl import ioctl

_PIECE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


def on_terminal(
    code: str, *, columns: int, rows: int = 24, env: Mapping[str, str] = {}, typed: str = ""
) -> str:
    """All that a Python program writes to a terminal of this size; it must end well. typed: what
    the user has typed when it begins.
    """
    ours, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    given = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    given |= {"TERM": "xterm-256color", **env}
    words = [sys.executable, "-c", code]
    child = subprocess.Popen(words, stdin=its, stdout=its, stderr=its, env=given)
    os.close(its)
    os.write(ours, typed.encode())
    written = bytearray()
    while data := _read(ours):
        written += data
    os.close(ours)
    assert child.wait() == 0, written.decode()
    return written.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError as error:  # its last writer has closed a terminal
        if error.errno != errno.EIO:
            raise
        return b""


def screen(written: str, columns: int) -> list[str]:
    """The lines that a terminal of any height shows after this. Raises for what it does not know.

    Knows text, line ends, moving up, erasing a line, and colours, which it leaves out.
    """
    lines, y, x, end = [""], 0, 0, 0
    for found in _PIECE.finditer(written):
        assert found.start() == end, written[end : end + 20]
        end = found.end()
        number, letter, control, text = found.groups()
        if text is not None:
            for char in text:
                y, x = (y + 1, 0) if x == columns else (y, x)
                lines += [""] * (y + 1 - len(lines))
                lines[y] = lines[y].ljust(x)[:x] + char + lines[y][x + 1 :]
                x += 1
        elif control is not None:
            y, x = (y + 1, x) if control == "\n" else (y, 0)
            lines += [""] * (y + 1 - len(lines))
        elif letter == "A":
            y = max(0, y - int(number or 1))
        elif letter == "K":
            assert number == "2", number
            lines[y] = ""
        else:
            assert letter in "mhl", letter
    assert end == len(written), written[end:]
    return [line.rstrip() for line in lines]
