"""Files on disks that may be full, fail, or be read-only.

Owns: the one message for what cannot be written (what, where, why, how much it needs and how much
is free), and replacing a file completely or not at all. Does not own: any file's format, what of a
run is safe then (engine/keep/checkpoint/safe_state.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dataflow.errors import StorageError
from dataflow.safe_text import shown_bytes

_FULL = {
    errno.ENOSPC: ("the disk is full", "free space there, or use another disk"),
    errno.EDQUOT: ("the quota of this user is used up", "free space there, or use another disk"),
    errno.EFBIG: (
        "the file would be larger than is allowed",
        "raise the limit (ulimit -f), or use another disk",
    ),
}
"""Errors whose message includes the sizes: what is wrong, and the fix."""

_OTHERS = {
    errno.EIO: (
        "the disk fails (Input/output error)",
        "look at the disk (dmesg), or use another one",
    ),
    errno.EROFS: ("the file system is read-only", "mount it for writing, or use another folder"),
    errno.EACCES: ("this user may not write there", "another folder, or the rights of this one"),
    errno.EPERM: ("this user may not write there", "another folder, or the rights of this one"),
    errno.ENAMETOOLONG: ("the name is longer than the file system allows", "a shorter name"),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", "another folder"),
    errno.EEXIST: ("a file of that name is in the way", "another name, or move that away"),
    errno.EISDIR: ("a folder of that name is in the way", "another name, or move that away"),
    errno.ENOENT: ("its folder is not there", "make the folder, or name another"),
    errno.EMFILE: ("this process has too many files open", "raise the limit (ulimit -n)"),
    errno.ENFILE: ("the machine has too many files open", "close some, or raise fs.file-max"),
    errno.ENOMEM: ("the machine has no memory left", "a machine with more memory"),
    errno.ESTALE: ("the network file system lost the file", "mount it anew, or use another disk"),
}

CANNOT = "could not be written"
"""Part of every such message."""


@contextmanager
def writing(what: str, path: Path, needed: int = 0) -> Iterator[None]:
    """While `what` is written to `path`: raise errors of the operating system as StorageError.

    needed: the bytes that it takes, if known.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(what, path, error, needed) from error


def storage_error(what: str, path: Path, error: OSError, needed: int = 0) -> StorageError:
    """`runs/a/metrics.jsonl: step 3 could not be written: the disk is full (needs 1.2 KiB, 0 B
    free). Fix: ...`
    """
    unknown = (error.strerror or str(error), "see what is wrong with that path")
    why, fix = (_FULL | _OTHERS).get(error.errno or 0, unknown)
    sizes: list[str] = []
    if needed:
        sizes.append(f"needs {shown_bytes(needed)}")
    if error.errno in _FULL and (free := free_bytes(path)) is not None:
        sizes.append(f"{shown_bytes(free)} free")
    if sizes:
        why += f" ({', '.join(sizes)})"
    return StorageError(f"{path}: {what} {CANNOT}: {why}. Fix: {fix}.")


def free_bytes(path: Path) -> int | None:
    """Bytes that this user can still write where `path` is or would be; None if unknown."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(folder).free
    return None


@contextmanager
def replacing(
    what: str, path: Path, needed: int = 0, *, durable: bool = True
) -> Iterator[BinaryIO]:
    """A file to fill; it takes the name `path` once it is complete and, if it is to be durable, on
    the disk. Until then the old one stays.

    Raises StorageError, and then nothing of the new file is left. The next call removes what a kill
    leaves (`.NAME.tmp`).
    """
    temp = temporary_path(path)
    try:
        with writing(what, path, needed):
            with _open_new(temp) as file:
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temp, path)
            if durable:
                sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise


def replace_text(what: str, path: Path, text: str) -> None:
    """Replace a text file completely. Raises StorageError."""
    content = text.encode()
    with replacing(what, path, len(content)) as file:
        file.write(content)


def write_to_user_path(what: str, path: Path, text: str) -> None:
    """Write a text file to a user's path, which may be a pipe or a device. Raises StorageError."""
    with writing(what, path, len(text)):
        # The file behind a link is replaced, not the link.
        target = path.resolve()
        is_plain = not target.exists() or stat.S_ISREG(target.stat().st_mode)
    if is_plain:
        replace_text(what, target, text)
        return
    with writing(what, path, len(text)):
        target.write_text(text, encoding="utf-8")


def write_private_text(what: str, path: Path, text: str) -> None:
    """Write a new file that only this user can read. Raises FileExistsError if there is one,
    StorageError if it cannot be written, and then leaves none.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise
    except OSError as error:
        raise storage_error(what, path, error, len(text)) from error
    try:
        with writing(what, path, len(text)), os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
    except StorageError:
        path.unlink()  # it is incomplete
        raise


def temporary_path(path: Path) -> Path:
    """Where a file's new content is written before it takes the file's name."""
    return path.with_name(f".{path.name}.tmp")


def _open_new(path: Path) -> BinaryIO:
    """Open a file that did not exist before: never through a link, never another's file."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o666), "wb")


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable: without it, a power cut may undo a rename."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make a folder and everything in it durable, deepest first."""
    for where, _, names in os.walk(folder, topdown=False):
        for name in names:
            with open(Path(where) / name, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(where))
