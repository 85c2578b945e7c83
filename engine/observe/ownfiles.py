"""Files of a run folder, opened so that nothing there can lead out of it.

Owns: how such files are opened (never a link, a file with a second name elsewhere, or a pipe), and
the check of a whole folder before a run goes on in it. Does not own: which files there are
(runfolder.py), their form.

A folder may have been received from elsewhere. What a run writes, cuts or deletes is a plain file
or folder of that run folder, or the run does not start. Changes during the run are not guarded
against: whoever makes them has the owner's rights.
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


def own(path: str | Path, flags: int) -> int:
    """An opener for `open` of a file that may exist; truncated only once known to be the folder's
    own. Raises RunError for a link, a file with a second name, or no file.
    """
    careful = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, careful, _MODE)
    except OSError as error:
        if error.errno in _NOT_PLAIN:
            raise _foreign(Path(path)) from None
        raise
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise _foreign(Path(path))
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
        undo.pop_all()
    return descriptor


def require_plain(folder: Path, *, but: tuple[str, ...] = ()) -> None:
    """Raises RunError naming the first thing in a folder, at any depth, that is neither a file nor
    a folder. but: names at the top whose contents are not checked.
    """
    for path in _entries(folder, but):
        raise _foreign(path)


def _entries(folder: Path, but: tuple[str, ...]) -> Iterator[Path]:
    """Links, pipes, sockets and devices."""
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        with os.scandir(here) as found:
            for entry in sorted(found, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    if here != folder or entry.name not in but:
                        waiting.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)


def _foreign(path: Path) -> RunError:
    return RunError(
        f"{path}: expected a file of the run folder's own, found {_kind(path)}: nothing outside of"
        " it is written, cut or deleted. Fix: put what it leads to in its place, or take another"
        " run folder."
    )


def _kind(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"a link to {os.readlink(path)}"
    if stat.S_ISREG(mode):
        return "one that has a second name elsewhere (a hard link)"
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((word for of, word in kinds if of(mode)), "a device")
