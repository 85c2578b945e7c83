"""CURVE keys and addresses of channels between hosts, and which addresses are safe without keys.

Owns: key pairs, whose key is whose, the rule for binding. Does not own: how public keys get to the
peers (engine/run/control/control.py; secret ones stay in the process that made them), nor sockets.
"""

from __future__ import annotations

import ipaddress
import threading
from dataclasses import dataclass, field
from typing import Protocol

from dataflow.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeyPair:
    """A CURVE key pair, 40 characters of Z85 each; repr hides the secret key."""

    public: bytes
    secret: bytes = field(repr=False)

    @staticmethod
    def make() -> CurveKeyPair:
        """A new pair."""
        import zmq  # here: a Worker of one host knows of keys, and has none

        public, secret = zmq.curve_keypair()
        return CurveKeyPair(public=public, secret=secret)


class Names(Protocol):
    """Public key -> the name of its owner; a dict, or PeerKeys."""

    def get(self, key: bytes, /) -> str | None:
        """None for a key that nobody has."""
        ...


class PeerKeys:
    """The public key of each peer, which may change; for several threads."""

    def __init__(self) -> None:
        self._keys: dict[str, bytes] = {}
        self._names: dict[bytes, str] = {}
        self._lock = threading.Lock()

    def put(self, peer: str, key: bytes) -> None:
        """The peer has this key, and no other any more; none if it is empty."""
        with self._lock:
            if earlier := self._keys.pop(peer, b""):
                self._names.pop(earlier, None)
            if key:
                self._keys[peer], self._names[key] = key, peer

    def get(self, key: bytes, /) -> str | None:
        """See Names."""
        with self._lock:
            return self._names.get(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a peer's channel answers. key: its public key, None without encryption."""

    endpoint: str
    key: bytes | None = None


def require_safe(endpoint: str, keys: CurveKeyPair | None, *, private: bool = False) -> None:
    """Raises RunError if other hosts could connect without a key, unless the network is private."""
    if keys is None and not private and not is_local(endpoint):
        problem = f"expected keys for {endpoint}, which other hosts can reach, found none"
        fix = "give the channel keys (they are made for each run), or bind to tcp://127.0.0.1:*"
        raise RunError(f"{problem}. Fix: {fix} or ipc://")


def any_port(address: str) -> str:
    """The endpoint at any free port of an IP address."""
    return f"tcp://[{address}]:*" if ":" in address else f"tcp://{address}:*"


def is_local(endpoint: str) -> bool:
    """Whether only this host's processes can reach it."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        return True
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return scheme == "tcp" and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return scheme == "tcp" and host == "localhost"
