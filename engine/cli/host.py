"""`dataflow host CLUSTER NAME`: let runs that are started elsewhere use this host.

Owns: the command. Does not own: the server (engine/launch/host.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.cli.target import UsageError
from engine.run.signals import ending_command

USAGE = "dataflow host CLUSTER NAME [--keys FILE] [--grace SECONDS]"
_GRACE = 60.0


def main(arguments: Sequence[str]) -> int:
    """Serve one run after another until a signal says stop; the exit code is the signal's."""
    words, given = _split(arguments)
    if len(words) != 2 or any(word.startswith("-") for word in words):
        found = " ".join(arguments) or "nothing"
        raise UsageError("dataflow host", f"expected two words, found {found!r}", USAGE)
    keys = Path(given["--keys"]) if "--keys" in given else None
    with ending_command():
        from engine.launch.host import serve

        return serve(Path(words[0]), words[1], keys, _seconds(given.get("--grace", str(_GRACE))))


def _split(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words, and the values of flags."""
    words, given = list(arguments), {}
    for flag in ("--keys", "--grace"):
        if flag in words[:-1]:
            at = words.index(flag)
            given[flag] = words[at + 1]
            del words[at : at + 2]
    return words, given


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        problem = f"--grace: expected seconds, found {text!r}"
        raise UsageError("dataflow host", problem, USAGE) from None
