"""A fault at the k-th system call that writes under one folder, in the process that installs it.

    full    from this call on nothing new fits (ENOSPC)
    eio     this call fails (EIO), and no other
    kill    SIGKILL before this call
    torn    half of what is written, then SIGKILL; as kill where nothing is written

What Rust or C++ writes (safetensors) counts as one call. disk.py says which fault comes when.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("full", "eio", "kill", "torn")
_GROWS = ("open", "write", "mkdir", "rename", "truncate")
"""Calls that need room."""


@dataclass(kw_only=True)
class WriteFaults:
    """folder: whose calls count. at: the call that fails, from 1; 0 for none. kind: see above."""

    folder: str
    at: int = 0
    kind: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """(call, path within the folder), in order."""
    full: bool = False

    def hit(
        self, call: str, path: Any, data: Any = None, write: Callable[[Any], Any] | None = None
    ) -> None:
        """A call is about to be made. data, write: what it would write, and how."""
        name = self._within(path)
        if name is None:
            return
        self.calls.append((call, name))
        if len(self.calls) == self.at:
            self._strike(data, write)
        if self.full and call in _GROWS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    def _strike(self, data: Any, write: Callable[[Any], Any] | None) -> None:
        if self.kind == "full":
            self.full = True
            return
        if self.kind == "eio":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.kind == "torn" and write is not None:
            write(memoryview(data).cast("B")[: memoryview(data).nbytes // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    def _within(self, path: Any) -> str | None:
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return None
        whole = os.path.abspath(os.fspath(path))
        return whole[len(self.folder) + 1 :] if whole.startswith(self.folder + os.sep) else None


class _Hooks:
    """What stands in the place of what."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def put(self, where: Any, name: str, value: Any) -> None:
        self._undo.append((where, name, getattr(where, name)))
        setattr(where, name, value)

    def undo(self) -> None:
        while self._undo:
            setattr(*self._undo.pop())


def install(faults: WriteFaults) -> None:
    """From now on, in this process. Call it after imports, before what writes is made."""
    hooks = _Hooks()
    _hook_files(faults, hooks)
    _hook_os(faults, hooks)
    _hook_libraries(faults, hooks)


@contextmanager
def installed(faults: WriteFaults) -> Iterator[WriteFaults]:
    """For a while, for what neither Rust nor C++ writes."""
    hooks = _Hooks()
    try:
        _hook_files(faults, hooks)
        _hook_os(faults, hooks)
        yield faults
    finally:
        hooks.undo()


def _hook_files(faults: WriteFaults, hooks: _Hooks) -> None:
    real = builtins.open

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            faults.hit("write", self.fileno(), data, super().write)
            return super().write(data)

        def truncate(self, size: int | None = None) -> int:
            faults.hit("truncate", self.fileno())
            return super().truncate(size)

    def opened(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
        if not set(mode) & set("wax+") or faults._within(file) is None:
            return real(file, mode, buffering, *rest, **named)
        if not isinstance(file, int):
            faults.hit("open", file)
        raw = Raw(file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        encoding = named.get("encoding") or "utf-8"
        return io.TextIOWrapper(buffered, encoding=encoding, line_buffering=buffering == 1)

    hooks.put(builtins, "open", opened)
    hooks.put(io, "open", opened)


def _hook_os(faults: WriteFaults, hooks: _Hooks) -> None:
    def wrap(name: str, call: str, place: Callable[..., Any], writes: bool = False) -> None:
        real = getattr(os, name)

        def called(*args: Any, **named: Any) -> Any:
            where = place(*args, **named)
            if where is not None and writes:
                faults.hit(call, where, args[1], lambda part: real(args[0], part))
            elif where is not None:
                faults.hit(call, where)
            return real(*args, **named)

        hooks.put(os, name, called)

    def creates(path: Any, flags: int, *rest: Any, dir_fd: int | None = None) -> Any:
        return _at(path, dir_fd) if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else None

    wrap("open", "open", creates)
    wrap("write", "write", lambda descriptor, data: descriptor, writes=True)
    wrap("pwrite", "write", lambda descriptor, *rest: descriptor)
    wrap("sendfile", "write", lambda out, *rest: out)
    wrap("ftruncate", "truncate", lambda descriptor, size: descriptor)
    wrap("fsync", "fsync", lambda descriptor: descriptor)
    wrap("mkdir", "mkdir", lambda path, *rest, dir_fd=None, **named: _at(path, dir_fd))
    for name in ("rename", "replace"):
        wrap(name, "rename", lambda old, new, **named: new)
    for name in ("unlink", "remove", "rmdir"):
        wrap(name, "delete", lambda path, *, dir_fd=None: _at(path, dir_fd))


def _at(path: Any, folder: int | None) -> Any:
    if folder is None:
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(path))


def _hook_libraries(faults: WriteFaults, hooks: _Hooks) -> None:
    import pyarrow as pa
    from safetensors import SafetensorError
    from transformers import modeling_utils

    native: Any = pa.OSFile

    def arrow(path: Any, mode: str = "r", **named: Any) -> Any:
        if "w" not in mode:
            return native(path, mode, **named)
        return pa.PythonFile(open(path, mode))

    hooks.put(pa, "OSFile", arrow)
    real: Any = modeling_utils.safe_save_file

    def save(tensors: Any, filename: Any, *rest: Any, **named: Any) -> None:
        def half(_: Any) -> None:
            real(tensors, filename, *rest, **named)
            os.truncate(filename, Path(filename).stat().st_size // 2)

        try:
            faults.hit("write", filename, b"", half)
        except OSError as error:
            said = f"Error while serializing: I/O error: {error} (os error {error.errno})"
            raise SafetensorError(said) from None
        real(tensors, filename, *rest, **named)

    hooks.put(modeling_utils, "safe_save_file", save)
