"""Files of a run folder, opened so that nothing there can lead out of it.

Owns: how such files are opened (never a link, a file with a second name elsewhere, or a pipe), and
the check of a whole folder before a run goes on in it. Does not own: which files there are
(run_folder.py), their form.

A folder may have been received from elsewhere, so a run starts only if all that it writes, cuts or
deletes are plain files and folders there. Changes during the run are not guarded against: only a
process with the owner's rights can make them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dataflow.errors import RunError

_MODE = 0o666
_NOT_PLAIN = (errno.ELOOP, errno.ENXIO, errno.EISDIR)


def open_own_file(path: str | Path, flags: int) -> int:
    """An opener for `open`. Raises RunError, truncating nothing, for all but a plain file."""
    careful = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, careful, _MODE)
    except OSError as error:
        if error.errno in _NOT_PLAIN:
            raise _foreign(Path(path)) from None
        raise
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise _foreign(Path(path))
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
        undo.pop_all()
    return descriptor


def require_plain(folder: Path, *, but: tuple[str, ...] = ()) -> None:
    """RunError if a folder has, at any depth, other than files and folders. but: names left out."""
    for path in _entries(folder, but):
        raise _foreign(path)


def _entries(folder: Path, but: tuple[str, ...]) -> Iterator[Path]:
    """Links, pipes, sockets and devices."""
    waiting = [folder]
    while waiting:
        folder_here = waiting.pop()
        with os.scandir(folder_here) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    if folder_here != folder or entry.name not in but:
                        waiting.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)


def _foreign(path: Path) -> RunError:
    problem = f"expected a file of the run folder's own, found {_kind(path)}"
    why = "nothing outside of it is written, cut or deleted"
    fix = "put what it leads to in its place, or take another run folder"
    return RunError(f"{path}: {problem}: {why}. Fix: {fix}.")


def _kind(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"a link to {os.readlink(path)}"
    if stat.S_ISREG(mode):
        return "one that has a second name elsewhere (a hard link)"
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((word for of, word in kinds if of(mode)), "a device")
