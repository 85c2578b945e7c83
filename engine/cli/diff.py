"""`dataflow diff A B`: what changes from one graph to another.

Owns: flags that two graph functions share. Does not own: the comparison
(dataflow/diff.py, dataflow/program_diff.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataflow.program_diff import compare
from engine.cli.flags import parse_shared, split_target
from engine.cli.screen import say

_USAGE = "dataflow diff TARGET TARGET [flags]"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """Show what changes from one graph to another; a flag goes to every function that has it."""


def main(arguments: Sequence[str]) -> int:
    """Print the difference; equal graphs are no error."""
    first, rest = split_target("diff", _USAGE, DiffOptions, arguments)
    second, flags = split_target("diff", _USAGE, DiffOptions, rest)
    values = parse_shared("diff", (first, second), flags)
    a, b = (target.graph(**given) for target, given in zip((first, second), values, strict=True))
    say(str(compare(a, b)), end="")
    return 0
