"""The first lines of the command `dataflow`, before anything else is imported.

Owns: a Ctrl-C while the command is still being imported. Does not own: the command (engine/cli).
"""

from __future__ import annotations

import os
import signal


def main() -> int:
    """Run the command line; Ctrl-C ends it with one line from its first moment on."""
    before = signal.signal(signal.SIGINT, _end)
    from engine.cli import main as command

    signal.signal(signal.SIGINT, before)
    return command()


def _end(number: int, frame: object) -> None:
    """No clean-up: nothing has begun."""
    os.write(2, b"interrupted\n")
    os._exit(128 + number)
