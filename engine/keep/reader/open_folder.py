"""Run folders below one root, opened so that no request and no link leads out of it.

Owns: how a run is found by its name, and how its files are opened: component by component, never
through a link, plain files of one name only, and of a bounded size. Does not own: what they say.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dataflow.errors import DataflowError, RunError
from dataflow.safe_text import one_line
from engine.keep.own_files import open_own_file
from engine.keep.run_folder import is_run

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_OURS = (errno.ELOOP, errno.ENOTDIR)
LARGEST = 64 << 20
"""Bytes of a file that is read whole."""


class NotServed(DataflowError):
    """A request that gets no answer. status: of HTTP."""

    def __init__(self, text: str, status: int = 404) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMark:
    """What tells that a file has changed."""

    inode: int
    size: int
    mtime: int


class OpenFolder:
    """A folder by its descriptor, until `close`. name: as messages name it. guarded: for whoever
    asks from outside, by the page; a command of the user's own follows links, as `ls` does.
    """

    def __init__(self, descriptor: int, name: str, *, guarded: bool = True) -> None:
        self._descriptor = descriptor
        self._guarded = guarded
        self.name = name

    @property
    def path(self) -> Path:
        """Leads to just this folder, whatever has its name by now; while it is open."""
        return Path(f"/proc/self/fd/{self._descriptor}")

    @property
    def inode(self) -> int:
        """Tells it from another one of the same name."""
        return os.fstat(self._descriptor).st_ino

    def folder(self, name: str) -> OpenFolder | None:
        """A folder in it; None if there is none. Raises NotServed for a link or a file."""
        _require_name(name)
        try:
            if self._guarded:
                flags = _FOLDER
            else:
                flags = _FOLDER & ~os.O_NOFOLLOW
            descriptor = os.open(name, flags, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise NotServed(f"{self._shown_path(name)}: {error.strerror}", 403) from error
            raise NotServed(
                f"{self._shown_path(name)}: expected a folder of the run's own", 403
            ) from None
        return OpenFolder(descriptor, f"{self.name}/{name}", guarded=self._guarded)

    def open(self, name: str) -> BinaryIO | None:
        """A plain file in it, to read; None if there is none. Raises NotServed for all others."""
        _require_name(name)
        try:
            if not self._guarded:
                return open(self.path / name, "rb")
            return os.fdopen(open_own_file(self.path / name, os.O_RDONLY), "rb")
        except FileNotFoundError:
            return None
        except RunError:
            raise NotServed(
                f"{self._shown_path(name)}: expected a file of the run's own", 403
            ) from None
        except OSError as error:
            raise NotServed(f"{self._shown_path(name)}: {error.strerror}", 403) from error

    def read(self, name: str, most: int = LARGEST) -> bytes | None:
        """A file's content; None if there is none. Raises NotServed if it is larger than `most`."""
        file = self.open(name)
        if file is None:
            return None
        with file:
            content = file.read(most + 1)
        if len(content) > most:
            raise NotServed(f"{self._shown_path(name)}: larger than {most} bytes", 413)
        return content

    def mark(self, name: str) -> FileMark | None:
        """What tells that a file has changed; None if there is none."""
        _require_name(name)
        try:
            status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=not self._guarded)
        except OSError:
            return None
        return FileMark(inode=status.st_ino, size=status.st_size, mtime=status.st_mtime_ns)

    def names(self) -> list[str]:
        """The names of what is in it, in order."""
        return sorted(os.listdir(self._descriptor))

    def close(self) -> None:
        """Close it. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> OpenFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _shown_path(self, name: str) -> str:
        return one_line(f"{self.name}/{name}")


def open_run(path: Path, *, guarded: bool = False) -> OpenFolder:
    """A run folder by its path, which may be a link: it is the user's own word. Raises OSError."""
    return OpenFolder(os.open(path, _FOLDER & ~os.O_NOFOLLOW), str(path), guarded=guarded)


@contextmanager
def inside(folder: OpenFolder, *names: str) -> Iterator[OpenFolder | None]:
    """A folder some levels below; None where one of them is missing."""
    opened: list[OpenFolder] = []
    here: OpenFolder | None = folder
    try:
        for name in names:
            if here is not None:
                here = here.folder(name)
            else:
                here = None
            if here is not None:
                opened += [here]
        yield here
    finally:
        for each in opened:
            each.close()


class RunRoot:
    """The folder that holds run folders. Raises OSError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        os.close(os.open(self.path, _FOLDER))

    def runs(self) -> list[str]:
        """The names of the runs in it: folders, not links to some."""
        with os.scandir(self.path) as entries:
            folders = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
        return sorted(name for name in folders if is_run(self.path / name))

    def open(self, name: str) -> OpenFolder:
        """A run's folder. Raises NotServed if no folder here has that name."""
        if name not in self.runs():
            raise NotServed(f"no run {one_line(name)[:80]!r} here")
        with OpenFolder(os.open(self.path, _FOLDER), "") as root:
            run_folder = root.folder(name)
        if run_folder is None:
            raise NotServed(f"no run {one_line(name)[:80]!r} here")
        run_folder.name = name
        return run_folder


def _require_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise NotServed(f"{one_line(name)[:80]!r} is no name of a file", 400)
