"""`--set NODE.PARAM=VALUE`: edits of the graph that a target made, and the help page of its nodes.

Owns: the flag, what it says of a setting that is refused, and how nodes are listed after the other
flags. Does not own: reading, refusing and applying a setting's text (dataflow/set_expressions.py),
which flag gives a value already (owners.py).
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_type_hints

from dataflow.errors import GraphError
from dataflow.parameters import NodeParameter
from dataflow.program import AnyGraph
from dataflow.set_expressions import edited, settable
from dataflow.width import screen_width
from engine.cli.flag_values import FUNCTION, Settings, takes_function
from engine.cli.owners import find_owners
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
    """Edit the graph that the target made with these values. Raises UsageError for a setting that
    is refused.
    """
    if not settings:
        return graph
    try:
        return edited(graph, settings, flags=find_owners(target, values, graph))
    except GraphError as error:
        raise _usage_error(error) from error


@contextmanager
def refusing_settings() -> Iterator[None]:
    """Raise a UsageError for what --set was refused within; any other error passes."""
    try:
        yield
    except GraphError as error:
        if any(fault.rule == "setting" for fault in error.faults):
            raise _usage_error(error) from error
        raise


def _usage_error(error: GraphError) -> UsageError:
    """Turn the error of a setting into one of the command line."""
    fault = error.faults[0]
    return UsageError(fault.where.replace("setting ", "--set ", 1), fault.problem, fault.fix)


def settable_paths(graph: AnyGraph) -> Iterator[str]:
    """List `NODE.PARAM` of all that --set may change."""
    for node in settable(graph):
        for parameter in node.parameters:
            yield f"{node.name}.{parameter.name}"


def nodes_page(target: Target, values: Mapping[str, Any], graph: AnyGraph) -> str:
    """List the nodes with what --set may change of each: value, what it may be, and what it means;
    or the flag that gives it.
    """
    owners = find_owners(target, values, graph)
    lines = ["nodes, and what --set NODE.PARAM=VALUE may change of each, with its value now:"]
    for node in settable(graph):
        lines += ["", f"{node.name} ({node.operator})"]
        if not node.parameters:
            lines.append("  nothing that can be set")
        flags: list[str] = []
        for parameter in node.parameters:
            owner = owners.get(f"{node.name}.{parameter.name}", "")
            flags.append(owner.replace("_", "-"))
        lines += _parameter_lines(node.parameters, flags)
    return "\n".join(lines)


def _parameter_lines(parameters: Sequence[NodeParameter], flags: Sequence[str]) -> Iterator[str]:
    """Write a line for each, or more. flags: those that give the value already, empty if none
    does.
    """
    settings = [f"{parameter.name}={_text(parameter.value)}" for parameter in parameters]
    screen = screen_width(_WIDTH)
    # One long value does not push the explanations of all others off the screen.
    wide = min(max(map(len, settings), default=0), screen * 2 // 5)
    for setting, parameter, flag in zip(settings, parameters, flags, strict=True):
        words = parameter.expected
        if flag:
            words = f"by --{flag}"
        if parameter.about:
            words += f": {parameter.about}"
        yield from textwrap.wrap(
            words,
            screen,
            initial_indent=f"  {setting.ljust(wide)}  ",
            subsequent_indent=" " * (wide + 4),
            break_long_words=False,
            break_on_hyphens=False,
        )


def how_to_see_nodes(command: str, target: Target) -> str:
    """Say how `--help` lists the nodes, where flags that the graph needs are missing."""
    hints = get_type_hints(target.function)
    words = ["dataflow", command, target.text]
    for parameter in inspect.signature(target.function).parameters.values():
        if parameter.default is not parameter.empty:
            continue
        flag = f"--{parameter.name.replace('_', '-')}"
        if takes_function(hints.get(parameter.name)):
            words += [flag, FUNCTION]
        else:
            words += [flag, parameter.name.upper()]
    line = " ".join([*words, "--help"])
    return f"--help with the required flags lists the nodes, and what --set may change:\n  {line}"


def _text(value: Any) -> str:
    """Write a value as --set reads it."""
    is_word = isinstance(value, str) and value and not any(map(str.isspace, value))
    if is_word:
        return value
    return repr(value)
