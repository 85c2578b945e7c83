"""The log file of a Worker, and what is printed into it.

Owns: where log records go besides the screen; a log that cannot be written neither ends a run nor
hides why it ended. Does not own: what is logged, nor the level of any logger but the engine's.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import cast

from dataflow.errors import DataflowError
from dataflow.safe_text import printable
from dataflow.storage import storage_error
from engine.keep.own_files import open_own_file


class Readable(logging.Formatter):
    """Records without control characters: they may quote data, names and errors from anywhere."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class LogFile(logging.FileHandler):
    """A log file. The screen says once that it cannot be written. RunError for a foreign file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self.setFormatter(Readable("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._path = path
        self._failed = False
        try:
            self.stream = self._open()
        except OSError as error:
            self._give_up(error)

    def _open(self) -> TextIOWrapper:
        file = open(self.baseFilename, "a", encoding=self.encoding, opener=open_own_file)  # noqa: SIM115 - closed by close()
        return cast(TextIOWrapper, file)

    def emit(self, record: logging.LogRecord) -> None:
        """Does nothing after a failure: a log must not have gaps."""
        if self._failed:
            return
        try:
            super().emit(record)
        except OSError as error:  # as it was opened
            self._give_up(error)

    def handleError(self, record: logging.LogRecord) -> None:
        """Of a write. Errors that are not the disk's are logging's to show."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._give_up(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        """Close even where buffered records cannot be written."""
        try:
            super().close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            problem = storage_error("the log", self._path, error)
            print(f"{problem} The run goes on without it.", file=sys.stderr)


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Append records to this file, the engine's from INFO on, and the traceback that ends a run."""
    handler = LogFile(path)
    root, engine = logging.getLogger(), logging.getLogger("engine")
    before = engine.level
    if not root.handlers:
        screen = logging.lastResort
    else:
        screen = None
    if screen is not None:  # a root logger with a handler no longer shows warnings by itself
        screen.setFormatter(Readable())
        root.addHandler(screen)
    root.addHandler(handler)
    if before == logging.NOTSET:
        engine.setLevel(logging.INFO)
    try:
        yield
    except Exception as error:
        handler.handle(_ended_by(error))
        raise
    finally:
        engine.setLevel(before)
        root.removeHandler(handler)
        if screen is not None:
            root.removeHandler(screen)
        handler.close()


def log_to_stderr(form: str) -> None:
    """Send this process's warnings and errors to its standard error, in this format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Readable(form))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


def _ended_by(error: Exception) -> logging.LogRecord:
    expected = isinstance(error, DataflowError)
    what = f"ended by an error{'' if expected else ' that nobody expected'}"
    trace = (type(error), error, error.__traceback__)
    return logging.LogRecord(__name__, logging.ERROR, __file__, 0, what, None, trace)


class _Lossy(io.FileIO):
    """A file whose writes cannot fail: what the disk does not take is lost."""

    def write(self, content: object) -> int:  # type: ignore[override]
        view = memoryview(content).cast("B")  # type: ignore[arg-type]
        try:
            return super().write(view) or 0
        except OSError:
            return len(view)


def make_output_ignore_full_disk() -> None:
    """Make a Worker's standard output and error, its log, ignore a full disk."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(_Lossy(descriptor, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, errors="backslashreplace", line_buffering=True))
