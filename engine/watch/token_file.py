"""A token of the page's server that stays the same from start to start, for what asks without a
browser (Prometheus).

Owns: making and reading its file. Does not own: who is let through (guard.py).
"""

from __future__ import annotations

import re
from pathlib import Path

from dataflow.errors import RunError
from dataflow.storage import write_private_text
from engine.watch.guard import new_token

_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,512}")


def kept_token(path: Path) -> str:
    """Read the token in a file; make a new one where there is no file. Raises RunError for a file
    that others can read, that has no token, or that cannot be made (StorageError).
    """
    # Made before anything is looked at: two servers that start at once agree on one of them.
    token = new_token()
    try:
        write_private_text("the token", path, token)
    except FileExistsError:
        return _read(path)
    return token


def _read(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"token file {path}: {error.strerror}.") from error
    if mode & 0o077:
        raise RunError(f"token file {path}: others can read it. Fix: chmod 600 {path}.")
    text = content[:1024].decode("latin-1").strip()
    if not _TOKEN.fullmatch(text):
        expected = "expected 16 letters, digits, - and _ or more, and nothing else"
        raise RunError(f"token file {path}: {expected}. Fix: delete it, and it is made anew.")
    return text
