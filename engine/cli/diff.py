"""`dataflow diff A B`: what changes from one graph, or run, to another.

Owns: flags that two graph functions share, and that --set edits the second graph. Does not own: the
comparison (dataflow/diff.py, dataflow/program_diff.py; of two run folders also
engine/replay/run_diff.py, engine/replay/row_diff.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataflow.program_diff import compare
from engine.cli.flag_values import Settings, gather_values
from engine.cli.flags import parse_shared, split_target
from engine.cli.screen import say
from engine.cli.set_flag import with_settings
from engine.cli.target import UsageError

_USAGE = "dataflow diff TARGET TARGET [flags]"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """Show what changes from one graph to another; a flag goes to every function that has it. Of
    two run folders also their options, the ends of their metrics, and changes that were accepted.
    """

    rows: bool = False
    """Compare the rows that two runs recorded (--record), and name the first that differs."""
    set: Settings = ()
    """Edits of the second graph (rollout.temperature=0.7)."""


def main(arguments: Sequence[str]) -> int:
    """Print the difference; equal graphs are no error."""
    if "--rows" in arguments:
        return _compare_rows([word for word in arguments if word != "--rows"])
    first, rest = split_target("diff", _USAGE, DiffOptions, arguments)
    second, flags = split_target("diff", _USAGE, DiffOptions, rest)
    settings, flags = _split_settings(gather_values(flags, (DiffOptions,)))
    first_values, second_values = parse_shared("diff", (first, second), flags)
    before = first.graph(first_values)
    after = second.graph(second_values)
    after = with_settings(second, second_values, after, settings)
    say(str(compare(before, after)), end="")
    folders = [Path(t.text) for t in (first, second) if os.path.isdir(t.text)]
    if len(folders) == 2:
        # here: it imports what reads checkpoints
        from engine.replay.run_diff import run_differences

        say(f"\n{run_differences(*folders)}", end="")
    return 0


def _compare_rows(arguments: Sequence[str]) -> int:
    """Print where the rows of two runs first differ. Raises UsageError, RunError."""
    if len(arguments) != 2 or any(word.startswith("-") for word in arguments):
        problem = f"--rows takes two run folders and no other flag, found {' '.join(arguments)}"
        raise UsageError("dataflow diff", problem, "dataflow diff runs/A runs/B --rows")
    from engine.replay.row_diff import row_differences  # here: it reads Parquet files

    before, after = arguments
    say(row_differences(Path(before), Path(after)), end="")
    return 0


def _split_settings(flags: list[str]) -> tuple[list[str], list[str]]:
    """Split into the words after --set, and the other flags. flags: gathered, so that there is one
    --set.
    """
    if "--set" not in flags:
        return [], flags
    place = flags.index("--set")
    end = place + 1
    while end < len(flags) and not flags[end].startswith("-"):
        end += 1
    return flags[place + 1 : end], flags[:place] + flags[end:]
