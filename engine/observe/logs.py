"""The log file of a Worker.

Owns: where log records of the run go beside the screen. Does not own: what is logged, nor the level of any logger
but the engine's own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import cast

from dataflow.shown import printable
from engine.observe.ownfiles import own


class _OwnFile(logging.FileHandler):
    def _open(self) -> TextIOWrapper:
        file = open(self.baseFilename, "a", encoding=self.encoding, opener=own)  # noqa: SIM115 - closed by close()
        return cast(TextIOWrapper, file)


class Readable(logging.Formatter):
    """Records as text without control characters: messages tell of data, names and errors from anywhere."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Append every record that reaches the root logger, and the engine's from INFO on, to this file."""
    handler = _OwnFile(path, encoding="utf-8")
    handler.setFormatter(Readable("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root, engine = logging.getLogger(), logging.getLogger("engine")
    before = engine.level
    screen = logging.lastResort if not root.handlers else None
    if screen is not None:  # a root logger with a handler no longer shows warnings by itself
        screen.setFormatter(Readable())
        root.addHandler(screen)
    root.addHandler(handler)
    if before == logging.NOTSET:
        engine.setLevel(logging.INFO)
    try:
        yield
    finally:
        engine.setLevel(before)
        root.removeHandler(handler)
        if screen is not None:
            root.removeHandler(screen)
        handler.close()


def to_log(form: str, level: int = logging.WARNING) -> None:
    """Send the records of this process to its standard error, in this form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Readable(form))
    logging.basicConfig(handlers=[handler], level=level)
