"""CURVE keys and addresses of channels between hosts, and which addresses are safe without keys.

Owns: key pairs for one run, the rule for binding. Does not own: how keys get to their Workers (at
launch, over the control channel), nor sockets.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

import zmq

from dataflow.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeyPair:
    """A CURVE key pair, 40 characters of Z85 each; repr hides the secret key."""

    public: bytes
    secret: bytes = field(repr=False)

    @staticmethod
    def make() -> CurveKeyPair:
        """A new pair."""
        public, secret = zmq.curve_keypair()
        return CurveKeyPair(public=public, secret=secret)


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
