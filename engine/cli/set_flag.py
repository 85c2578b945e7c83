"""`--set NODE.PARAM=VALUE`: edits of the graph that a target made, and the help page of its nodes.

Owns: the flag, and how nodes are listed after the other flags. Does not own: what a setting does
(dataflow/set_expressions.py), which flag gives a value already (owners.py).
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from dataflow.errors import GraphError
from dataflow.parameters import NodeParameter
from dataflow.program import AnyGraph
from dataflow.set_expressions import edited, settable
from dataflow.width import screen_width
from engine.cli.flag_values import FUNCTION, Settings, takes_function
from engine.cli.owners import owners
from engine.cli.target import Target, UsageError

_WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Any parameter of any node; --help with the required flags given lists them."""

    set: Settings = ()
    """Edits of the finished graph (rollout.temperature=0.7)."""


def with_settings(
    target: Target, values: Mapping[str, Any], graph: AnyGraph, settings: Sequence[str]
) -> AnyGraph:
    """What the target made, edited. Raises UsageError for a setting that cannot be."""
    if not settings:
        return graph
    try:
        return edited(graph, settings, flags=owners(target, values, graph))
    except GraphError as error:
        raise refused(error) from error


def refused(error: GraphError) -> UsageError:
    """The error of a setting that cannot be, as one of the command line."""
    fault = error.faults[0]
    return UsageError(fault.where.replace("setting ", "--set ", 1), fault.problem, fault.fix)


def nodes_page(target: Target, values: Mapping[str, Any], graph: AnyGraph) -> str:
    """The nodes with what --set may change of each: value, what it may be, and what it means; or
    the flag that gives it.
    """
    flags = owners(target, values, graph)
    lines = ["nodes, and what --set NODE.PARAM=VALUE may change of each, with its value now:"]
    for node in settable(graph):
        lines += ["", f"{node.name} ({node.operator})"]
        if not node.parameters:
            lines.append("  nothing that can be set")
        paths = (f"{node.name}.{parameter.name}" for parameter in node.parameters)
        lines += _parameters(node.parameters, [flags.get(path, "") for path in paths])
    return "\n".join(lines)


def _parameters(parameters: Sequence[NodeParameter], flags: Sequence[str]) -> Iterator[str]:
    """A line for each, or more. flags: those that give the value already, empty if none does."""
    values = [f"{parameter.name}={_text(parameter.value)}" for parameter in parameters]
    screen = screen_width(_WIDTH)
    wide = min(max(map(len, values), default=0), screen * 2 // 5)
    for value_now, parameter, flag in zip(values, parameters, flags, strict=True):
        words = f"by --{flag.replace('_', '-')}" if flag else parameter.expected
        if parameter.about:
            words += f": {parameter.about}"
        start, rest = f"  {value_now.ljust(wide)}  ", " " * (wide + 4)
        yield from textwrap.wrap(
            words,
            screen,
            initial_indent=start,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )


def how_to_see_nodes(command: str, target: Target) -> str:
    """What `--help` says in place of the nodes where flags that the graph needs are missing."""
    parameters = inspect.signature(target.function).parameters.values()
    hints = get_type_hints(target.function)
    needed = [p.name for p in parameters if p.default is p.empty]
    like = [FUNCTION if takes_function(hints.get(name)) else name.upper() for name in needed]
    flags = [f"--{n.replace('_', '-')} {what}" for n, what in zip(needed, like, strict=True)]
    line = " ".join(["dataflow", command, target.text, *flags, "--help"])
    return f"--help with the required flags lists the nodes, and what --set may change:\n  {line}"


def _text(value: Any) -> str:
    """A value as --set reads it."""
    plain = isinstance(value, str) and value and not any(c.isspace() for c in value)
    return value if plain else repr(value)
