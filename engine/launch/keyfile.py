"""The key file of a cluster: who may speak to whom, before a run has keys of its own.

Owns: making and reading it. Does not own: the keys that Workers get for one run (hosts.py).

It has a CURVE key pair for the side that starts runs, and one for each host. Whoever has it can run
anything on these hosts: it is readable by its owner alone, and refused where it is not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dataflow.errors import RunError
from dataflow.storage import storage_error, writing
from engine.channels.zmq.curve_keys import CurveKeyPair

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    """run: of whoever starts runs; hosts: of each host, by name."""

    run: CurveKeyPair
    hosts: Mapping[str, CurveKeyPair]

    def host(self, name: str) -> CurveKeyPair:
        """The keys of a host. Raises RunError where it has none."""
        if name not in self.hosts:
            raise RunError(
                f"key file: expected keys of host {name!r}, found those of"
                f" {', '.join(self.hosts) or 'nobody'}. Fix: dataflow keys CLUSTER, with a new"
                " file."
            )
        return self.hosts[name]


def make_keys(path: Path, hosts: Iterable[str]) -> KeyFile:
    """A new key file. Raises RunError if there is one, StorageError if it cannot be written."""
    made = KeyFile(run=CurveKeyPair.make(), hosts={name: CurveKeyPair.make() for name in hosts})
    pairs = {name: _plain(keys) for name, keys in made.hosts.items()}
    text = json.dumps({"format": FORMAT, "run": _plain(made.run), "hosts": pairs}, indent=1)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise RunError(
            f"key file {path}: cannot be made: {error}. Fix: name another, or delete it."
        ) from error
    except OSError as error:
        raise storage_error("the key file", path, error, len(text)) from error
    try:
        with (
            writing("the key file", path, len(text)),
            os.fdopen(descriptor, "w", encoding="ascii") as file,
        ):
            file.write(text + "\n")
    except RunError:
        path.unlink()  # a part of a key file is none
        raise
    return made


def read_keys(path: Path | None) -> KeyFile:
    """A key file. Raises RunError where it is not there, is none, or can be read by others."""
    if path is None:
        raise RunError(
            "expected a key file for runs on several hosts, found none. Fix: dataflow keys CLUSTER."
        )
    try:
        mode = path.stat().st_mode
        data = json.loads(path.read_text(encoding="ascii"))
        found = KeyFile(
            run=_keys(data["run"]),
            hosts={name: _keys(pair) for name, pair in data["hosts"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"key file {path}: expected what `dataflow keys` makes, found {type(error).__name__}:"
            f" {error}. Fix: dataflow keys CLUSTER makes one; copy it to every host."
        ) from error
    if mode & 0o077:
        raise RunError(
            f"key file {path}: others can read it (mode {mode & 0o777:o}). Fix: chmod 600 {path},"
            " new keys."
        )
    return found


def _plain(keys: CurveKeyPair) -> dict[str, str]:
    return {"public": keys.public.decode(), "secret": keys.secret.decode()}


def _keys(pair: Mapping[str, str]) -> CurveKeyPair:
    public, secret = pair["public"].encode(), pair["secret"].encode()
    if len(public) != 40 or len(secret) != 40:
        raise ValueError("a key that has not 40 characters")
    return CurveKeyPair(public=public, secret=secret)
