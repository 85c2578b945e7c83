"""What joining a Ray cluster would change in this process and on this machine, undone.

Owns: breakpoint() and Ray's token. Does not own: joining (ray.py), and knows nothing of Ray's code.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def own_breakpoint() -> Iterator[None]:
    """breakpoint() stays what it was in this process and its children: Ray makes it its own."""
    before = {name: value for name, value in os.environ.items() if name == "PYTHONBREAKPOINT"}
    try:
        yield
    finally:
        os.environ.pop("PYTHONBREAKPOINT", None)
        os.environ.update(before)


@contextlib.contextmanager
def token_for_us_alone() -> Iterator[None]:
    """The token that a new Ray may write is not for others of this machine."""
    token = Path("~/.ray/auth_token").expanduser()
    existed = token.exists()
    yield
    if not existed and token.exists():
        token.chmod(0o600)
