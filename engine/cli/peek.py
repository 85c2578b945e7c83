"""`dataflow peek TARGET NODE`: the first rows of one node's output.

Owns: the table on the screen. Does not own: running what the node needs (engine.session.calls).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dataflow.conversation import MESSAGES, read_conversation
from dataflow.safe_text import one_line
from dataflow.width import screen_width
from engine.cli.flags import asks_for_help, inherit_planned, parse, split_target
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
_MESSAGES = 24
"""Of a conversation that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekOptions:
    """Show the first rows of one node's output, running only what it needs."""

    rows: int = 4
    """Rows to show."""


_OPTIONS = (PeekOptions, RunOptions, NodeOptions)


def main(arguments: Sequence[str]) -> int:
    """Print the rows, each column on a line of its own; raises GraphError for an unknown node."""
    target, rest = split_target("peek", _USAGE, PeekOptions, arguments)
    if asks_for_help(rest[:1]):
        parse("peek", target, _OPTIONS, rest)
    if not rest or rest[0].startswith("-"):
        raise UsageError("dataflow peek", "expected a node's name after TARGET", _USAGE)
    values, option_groups = parse("peek", target, _OPTIONS, rest[1:])
    peek_options, options, node_options = option_groups
    if options.kernel:
        problem = "--kernel: peek runs in this process, by kernels that can share it"
        raise UsageError("dataflow peek", problem, "without --kernel")
    graph = with_settings(target, values, target.graph(values), node_options.set)
    options = inherit_planned(target, options, rest[1:])
    find_phase(graph, rest[0])  # raises with the names there are, before heavy imports
    from engine.session.calls import peek  # here: it imports what runs kernels

    table = peek(graph, rest[0], peek_options.rows, options)
    say("\n".join(describe_rows(table)))
    return 0


def describe_rows(table: pa.Table) -> Iterator[str]:
    """Write `row 0`, then a line for each column: text as it is, lists with their length, of an
    episode's conversation a line for each message.
    """
    wide = max(map(len, table.column_names), default=0) + 2
    room = max(_LEAST, screen_width(_WIDTH + wide + 2) - wide - 2)
    for number, row in enumerate(table.to_pylist()):
        yield f"row {number}"
        for name, cell in row.items():
            lines = list(_lines(name, cell, room))
            yield f"  {one_line(name).ljust(wide)}{lines[0]}"
            for line in lines[1:]:
                yield f"  {''.ljust(wide)}{line}"


def _lines(name: str, cell: Any, room: int) -> Iterator[str]:
    """A column's cell, on one line or, of messages, several."""
    conversation = None
    if name == MESSAGES:
        conversation = read_conversation(cell)
    if conversation is None:
        yield _cell(cell, room)
        return
    yield f"{len(conversation)} messages"
    for message in conversation[:_MESSAGES]:
        yield _cell(f"{message.who}: {message}", room)
    if len(conversation) > _MESSAGES:
        yield f"... {len(conversation) - _MESSAGES} more"


def _cell(value: Any, room: int) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        length = f"[{len(value)}]"
        words = " ".join(_cell(each, room) for each in value[:32])
        rest = max(_LEAST, room - len(length) - 1)
        return f"{length} {_shorten(words, min(_WIDTH, rest))}"
    text = str(value).replace("\n", "\\n")
    return _shorten(one_line(text), room)


def _shorten(words: str, room: int) -> str:
    if len(words) <= room:
        return words
    return f"{words[: room - 3]}..."
