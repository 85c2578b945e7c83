"""Traces of lengths that are none.

Owns: these files. Does not own: how they are judged (data.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path


def _file(content: bytes | str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        path = folder / "trace.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def _trace(lengths: str) -> Callable[[Path], str]:
    return _file(f"completion_tokens\n{lengths}\n")


TRACES: Mapping[str, Callable[[Path], str]] = {
    "a negative length": _trace("3\n-1"),
    "a length that is no number": _trace("3\nmany"),
    "a length beyond 64 bits": _trace("9" * 30),
    "no length": _trace(""),
    "a trace without its column": _file("tokens\n3\n"),
    "a trace of bytes": _file(b"\xff\xfe\x00"),
    "a trace that is not there": lambda folder: str(folder / "trace.csv"),
}
