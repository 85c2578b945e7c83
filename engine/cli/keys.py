"""`dataflow keys CLUSTER`: make the key file of a cluster.

Owns: the command. Does not own: the file (engine/launch/keyfile.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.cli.screen import say
from engine.cli.target import UsageError
from engine.plan.cluster import read_cluster

USAGE = "dataflow keys CLUSTER [FILE]"


def main(arguments: Sequence[str]) -> int:
    """Make keys for every host of the cluster file, in FILE or where that says."""
    if len(arguments) not in (1, 2) or arguments[0].startswith("-"):
        found = " ".join(arguments) or "nothing"
        raise UsageError("dataflow keys", f"expected a cluster file, found {found!r}", USAGE)
    from engine.launch.keyfile import make_keys

    cluster = read_cluster(Path(arguments[0]))
    path = Path(arguments[1]) if len(arguments) > 1 else cluster.keys
    assert path is not None
    names = [host.name for host in cluster.hosts]
    make_keys(path, names)
    say(f"{path}: keys of {', '.join(names)}; copy it to each, readable by nobody else")
    return 0
