"""What surrounds joining a Ray cluster: whether one answers, and what Ray would change, undone.

Owns: knocking at an address; breakpoint() and Ray's token. Does not own: joining (ray.py), and
knows nothing of Ray's code.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_KNOCK = 5.0
"""Seconds for the address of a cluster to answer."""


def is_answered(address: str) -> bool:
    """Whether somebody is at an `address:port`, for which Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return True  # none, or a word of Ray's
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _KNOCK):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def own_breakpoint() -> Iterator[None]:
    """Let breakpoint() stay what it was, here and in child processes: Ray makes it its own."""
    before = os.environ.get("PYTHONBREAKPOINT")
    try:
        yield
    finally:
        os.environ.pop("PYTHONBREAKPOINT", None)
        if before is not None:
            os.environ["PYTHONBREAKPOINT"] = before


@contextlib.contextmanager
def token_for_us_alone() -> Iterator[None]:
    """Keep the token that a new Ray may write from other users of this machine."""
    token = Path("~/.ray/auth_token").expanduser()
    existed = token.exists()
    yield
    if not existed and token.exists():
        token.chmod(0o600)
