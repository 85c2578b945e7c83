"""`dataflow peek TARGET NODE`: the first rows of one node's output.

Owns: the table on the screen. Does not own: running what the node needs (engine.api).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dataflow.graph import Graph
from dataflow.shown import one_line
from engine.cli.flags import parse, split_target
from engine.cli.screen import say
from engine.cli.target import UsageError
from engine.options import RunOptions

if TYPE_CHECKING:
    import pyarrow as pa

_USAGE = "dataflow peek TARGET NODE [flags]"
_WIDTH = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekOptions:
    """Show the first rows of one node's output, running only what it needs."""

    rows: int = 4
    """Rows to show."""


def main(arguments: Sequence[str]) -> int:
    """Print the rows, each column on a line of its own; raises GraphError for an unknown node."""
    target, rest = split_target("peek", _USAGE, PeekOptions, arguments)
    if rest and rest[0] in ("-h", "--help"):
        parse("peek", target, (PeekOptions, RunOptions), rest)
    if not rest or rest[0].startswith("-"):
        raise UsageError("dataflow peek", "expected a node's name after TARGET", _USAGE)
    values, (own, options) = parse("peek", target, (PeekOptions, RunOptions), rest[1:])
    graph = target.graph(**values)
    if isinstance(graph, Graph):
        graph.node(rest[0])  # raises with the names there are, before anything heavy is imported
    from engine.api import peek  # here: it imports what runs kernels

    say("\n".join(shown(peek(graph, rest[0], own.rows, options))))
    return 0


def shown(table: pa.Table) -> Iterator[str]:
    """`row 0`, then a line for each column: text as it is, lists with their length."""
    wide = max(map(len, table.column_names), default=0) + 2
    for number, row in enumerate(table.to_pylist()):
        yield f"row {number}"
        for name, value in row.items():
            yield f"  {one_line(name).ljust(wide)}{_cell(value)}"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{len(value)}] {_cut(' '.join(_cell(v) for v in value[:32]))}"
    return _cut(one_line(str(value).replace("\n", "\\n")))


def _cut(words: str) -> str:
    return words if len(words) <= _WIDTH else f"{words[: _WIDTH - 3]}..."
