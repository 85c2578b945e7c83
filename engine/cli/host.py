"""`dataflow host CLUSTER NAME`: let runs that are started elsewhere use this host.

Owns: the command. Does not own: the server (engine/launch/host.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.cli.target import UsageError

USAGE = "dataflow host CLUSTER NAME [--keys FILE]"


def main(arguments: Sequence[str]) -> int:
    """Serve one run after another, until it is ended by a signal."""
    words = [word for word in arguments if word != "--keys"]
    if len(words) != 2 + (len(words) != len(arguments)) or words[0].startswith("-"):
        raise UsageError(
            f"dataflow host: expected two words, found {' '.join(arguments) or 'nothing'!r}. Fix: {USAGE}."
        )
    keys = Path(words.pop(arguments.index("--keys"))) if len(words) == 3 else None
    from engine.launch.host import serve

    return serve(Path(words[0]), words[1], keys)
