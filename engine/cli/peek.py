"""`dataflow peek TARGET NODE`: the first rows of one node's output.

Owns: the table on the screen. Does not own: running what the node needs (engine.session.calls).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dataflow.safe_text import one_line
from dataflow.width import screen_width
from engine.cli.flags import as_planned, parse, split_target
from engine.cli.screen import say
from engine.cli.set_flag import NodeOptions, with_settings
from engine.cli.target import UsageError
from engine.plan.options import RunOptions
from engine.session.node_phase import find_phase

if TYPE_CHECKING:
    import pyarrow as pa

_USAGE = "dataflow peek TARGET NODE [flags]"
_WIDTH, _LEAST = 96, 16
"""Most columns of a value, and the fewest on a narrow screen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekOptions:
    """Show the first rows of one node's output, running only what it needs."""

    rows: int = 4
    """Rows to show."""


_OPTIONS = (PeekOptions, RunOptions, NodeOptions)


def main(arguments: Sequence[str]) -> int:
    """Print the rows, each column on a line of its own; raises GraphError for an unknown node."""
    target, rest = split_target("peek", _USAGE, PeekOptions, arguments)
    if rest and rest[0] in ("-h", "--help"):
        parse("peek", target, _OPTIONS, rest)
    if not rest or rest[0].startswith("-"):
        raise UsageError("dataflow peek", "expected a node's name after TARGET", _USAGE)
    values, (own, options, nodes) = parse("peek", target, _OPTIONS, rest[1:])
    if options.kernel:
        problem = "--kernel: peek runs in this process, by kernels that can share it"
        raise UsageError("dataflow peek", problem, "without --kernel")
    graph = with_settings(target, values, target.graph(**values), nodes.set)
    options = as_planned(target, options, rest[1:])
    find_phase(graph, rest[0])  # raises with the names there are, before heavy imports
    from engine.session.calls import peek  # here: it imports what runs kernels

    say("\n".join(shown(peek(graph, rest[0], own.rows, options))))
    return 0


def shown(table: pa.Table) -> Iterator[str]:
    """`row 0`, then a line for each column: text as it is, lists with their length."""
    wide = max(map(len, table.column_names), default=0) + 2
    room = max(_LEAST, screen_width(_WIDTH + wide + 2) - wide - 2)
    for number, row in enumerate(table.to_pylist()):
        yield f"row {number}"
        for name, value in row.items():
            yield f"  {one_line(name).ljust(wide)}{_cell(value, room)}"


def _cell(value: Any, room: int) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        words, length = " ".join(_cell(v, room) for v in value[:32]), f"[{len(value)}]"
        return f"{length} {_cut(words, min(_WIDTH, max(_LEAST, room - len(length) - 1)))}"
    return _cut(one_line(str(value).replace("\n", "\\n")), room)


def _cut(words: str, room: int) -> str:
    return words if len(words) <= room else f"{words[: room - 3]}..."
