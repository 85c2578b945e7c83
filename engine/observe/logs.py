"""The log file of a Worker.

Owns: where log records of the run go beside the screen. Does not own: what is logged, nor the level of any logger
but the engine's own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Append every record that reaches the root logger, and the engine's from INFO on, to this file."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root, engine = logging.getLogger(), logging.getLogger("engine")
    before = engine.level
    screen = logging.lastResort if not root.handlers else None
    if screen is not None:  # a root logger with a handler no longer shows warnings by itself
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
