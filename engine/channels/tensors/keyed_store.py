"""A torch.distributed store by which ranks on several hosts find each other.

Owns: what torch asks of a Store, in our requests. Does not own: the requests and their server
(engine/channels/zmq/rendezvous.py), what ranks set and wait for (world.py, gloo, NCCL).

Experiments with torch 2.13 (gloo, 2 and 3 processes): init_process_group, new_group, DeviceMesh and
PrefixStore call get, set, wait, check, add and compare_set of a subclass in Python, and its errors
come back as they are. delete_key and num_keys never reach one. NCCL takes the same way; not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

from torch._C._distributed_c10d import Store

from engine.channels.tensors.world import TIMEOUT
from engine.channels.zmq.rendezvous_client import MeetingClient


class KeyedStore(Store):
    """timeout: seconds for one call that is given none. Raises RunError, as the client does."""

    _alive: ClassVar[list[KeyedStore]] = []
    """C++ keeps its part of a store alone: calls would fail once Python's part were gone."""

    def __init__(self, client: MeetingClient, *, timeout: float = TIMEOUT) -> None:
        super().__init__()
        self._client = client
        self._seconds = timeout
        self._alive.append(self)

    def set(self, key: str, value: Any) -> None:
        """Set a value, str or bytes."""
        self._client.ask("set", [key], [_bytes(value)], timeout=self._seconds)

    def get(self, key: str) -> bytes:
        """A value, once it is there."""
        return self._client.ask("get", [key], timeout=self._seconds)

    def add(self, key: str, amount: int) -> int:
        """Add to a number; returns the sum."""
        return int(self._client.ask("add", [key], amount=amount, timeout=self._seconds))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return self._client.ask("check", keys, timeout=self._seconds) == b"1"

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set `desired` if the value is `expected`; returns the value afterwards."""
        values = [_bytes(expected), _bytes(desired)]
        return self._client.ask("compare_set", [key], values, timeout=self._seconds)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all are there."""
        seconds = self._seconds
        if timeout is not None:
            seconds = timeout.total_seconds()
        self._client.ask("wait", keys, timeout=seconds)

    def set_timeout(self, timeout: timedelta) -> None:
        """For calls that are given none. C++ does not ask this."""
        self._seconds = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        """No calls for several keys at once."""
        return False

    def clone(self) -> KeyedStore:
        """Another connection, so that two threads do not wait for each other."""
        return KeyedStore(self._client.another(), timeout=self._seconds)

    def close(self) -> None:
        """Close the connection; no world may use it any more."""
        self._alive.remove(self)
        self._client.close()


def _bytes(text: Any) -> bytes:
    if isinstance(text, str):
        return text.encode()
    return bytes(text)
