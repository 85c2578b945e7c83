"""The key file of a cluster: a CURVE key pair for the side that starts runs, one for each host.

Owns: making and reading it. Does not own: the keys that Workers get for one run (hosts.py).

With this file anything can be run on these hosts, so only its owner may be able to read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dataflow.errors import RunError
from dataflow.storage import new_private
from engine.channels.zmq.curve_keys import CurveKeyPair

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    """run: of the side that starts runs; hosts: of each host, by name."""

    run: CurveKeyPair
    hosts: Mapping[str, CurveKeyPair]

    def host(self, name: str) -> CurveKeyPair:
        """The keys of a host. Raises RunError where it has none."""
        if name not in self.hosts:
            found = f"found those of {', '.join(self.hosts) or 'nobody'}"
            fix = "Fix: dataflow keys CLUSTER, with a new file."
            raise RunError(f"key file: expected keys of host {name!r}, {found}. {fix}")
        return self.hosts[name]


def make_keys(path: Path, hosts: Iterable[str]) -> KeyFile:
    """A new key file. Raises RunError if there is one, StorageError if it cannot be written."""
    keys = KeyFile(run=CurveKeyPair.make(), hosts={name: CurveKeyPair.make() for name in hosts})
    pairs = {name: _plain(pair) for name, pair in keys.hosts.items()}
    text = json.dumps({"format": FORMAT, "run": _plain(keys.run), "hosts": pairs}, indent=1)
    try:
        new_private("the key file", path, text + "\n")
    except FileExistsError as error:
        problem = f"cannot be made: {error}. Fix: name another, or delete it."
        raise RunError(f"key file {path}: {problem}") from error
    return keys


def read_keys(path: Path | None) -> KeyFile:
    """A key file. Raises RunError if it is missing, malformed, or readable by others."""
    if path is None:
        problem = "expected a key file for runs on several hosts, found none"
        raise RunError(f"{problem}. Fix: dataflow keys CLUSTER.")
    try:
        mode = path.stat().st_mode
        data = json.loads(path.read_text(encoding="ascii"))
        hosts = {name: _keys(pair) for name, pair in data["hosts"].items()}
        keys = KeyFile(run=_keys(data["run"]), hosts=hosts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        found = f"expected what `dataflow keys` makes, found {type(error).__name__}: {error}"
        fix = "Fix: dataflow keys CLUSTER makes one; copy it to every host."
        raise RunError(f"key file {path}: {found}. {fix}") from error
    if mode & 0o077:
        problem = f"others can read it (mode {mode & 0o777:o})"
        raise RunError(f"key file {path}: {problem}. Fix: chmod 600 {path}, new keys.")
    return keys


def _plain(keys: CurveKeyPair) -> dict[str, str]:
    return {"public": keys.public.decode(), "secret": keys.secret.decode()}


def _keys(pair: Mapping[str, str]) -> CurveKeyPair:
    public, secret = pair["public"].encode(), pair["secret"].encode()
    if len(public) != 40 or len(secret) != 40:
        raise ValueError("a key that does not have 40 characters")
    return CurveKeyPair(public=public, secret=secret)
