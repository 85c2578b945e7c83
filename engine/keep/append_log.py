"""A file of a run folder that grows at its end, whatever its records are.

Owns: opening it so that nothing leads out of the folder (own_files.py), whole writes, cutting a
tail, syncing, and how much of a file stays when a run goes back. Does not own: the records' framing
(segments.py, metric_lines.py, timeline.py), nor the words of an error: they raise OSError, which
their callers turn into a StorageError.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from engine.keep.own_files import open_own_file


class AppendLog:
    """One file, open to append. empty: drop what an earlier run left in it.

    Raises OSError, and RunError for all but a plain file. Every call writes at once: what is
    buffered in this process would be lost with it.
    """

    def __init__(self, path: Path, *, empty: bool = False) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        if empty:
            flags |= os.O_TRUNC
        self._descriptor: int | None = open_own_file(path, flags)

    def append(self, content: bytes) -> None:
        """Write all of it. What a full disk or a kill tears off is a torn tail."""
        descriptor = self._require_open()
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def cut(self, size: int) -> None:
        """Keep the first `size` bytes; what follows is appended behind them."""
        os.ftruncate(self._require_open(), size)

    def sync(self) -> None:
        """Wait until all of it is on the disk."""
        os.fsync(self._require_open())

    def reader(self) -> BinaryIO:
        """The file, from its beginning, to read."""
        return open(self.path, "rb", opener=open_own_file)

    def close(self) -> None:
        """Close it. A second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> AppendLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _require_open(self) -> int:
        assert self._descriptor is not None, f"{self.path} is closed"
        return self._descriptor


def whole_until(
    records: Iterable[tuple[int, int]], last_step: int | None = None
) -> tuple[int, int]:
    """(bytes, Step) at the end of the leading records that stay; (0, -1) without any.

    records: (offset behind it, Step) of each whole one, in order; a torn tail is not among them.
    last_step: records of later Steps go, with all that follows the first; None: all stay.
    """
    size, newest = 0, -1
    for end, step in records:
        if last_step is not None and step > last_step:
            break
        size, newest = end, step
    return size, newest
