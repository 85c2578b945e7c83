"""Which parameter of a graph function gives a node's value: the flag to use in place of --set.

Owns: finding it, by calling the graph function with one argument changed at a time. Does not own:
what is refused (dataflow/set_expressions.py), flags (flags.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dataflow.errors import DataflowError
from dataflow.model import Model, Schedule
from dataflow.node import Node, content
from dataflow.program import AnyGraph, numbered_name, numbered_phases
from dataflow.set_expressions import settable
from engine.cli.target import Target

_TRIED: Mapping[type[Any], Any] = {int: 3, float: 0.625, str: "another", bool: True}
"""A value of each kind of parameter whose default is None."""


def owners(target: Target, values: Mapping[str, Any], graph: AnyGraph) -> dict[str, str]:
    """`NODE.PARAM` -> the graph function's parameter on which that value depends. values: the
    arguments with which it made the graph.

    A function that refuses each changed argument owns the values that have the parameter's name and
    present value.
    """
    hints, contents = get_type_hints(target.function), _contents(graph)
    parameters = inspect.signature(target.function).parameters
    arguments = {name: values.get(name, p.default) for name, p in parameters.items()}
    owners_by_path = _by_object(graph, arguments)
    bases = {name for name in owners_by_path.values() if isinstance(arguments[name], str)}
    for name, argument in arguments.items():
        if name in bases:  # no value of a node; a function may well look into the directory
            continue
        graphs = _remake(target, values, name, _other_values(argument, hints.get(name)))
        for other in graphs:
            for path in _moved_paths(contents, _contents(other)):
                # An argument with the parameter's own name stays its owner.
                if owners_by_path.get(path) != path.rpartition(".")[2]:
                    owners_by_path[path] = name
        if not graphs:
            namesakes = (path for path in contents if path.rpartition(".")[2] == name)
            equal_paths = (path for path in namesakes if contents[path] == content(argument))
            owners_by_path |= dict.fromkeys(equal_paths, name)
    return owners_by_path


def _remake(
    target: Target, values: Mapping[str, Any], name: str, others: Iterable[Any]
) -> list[AnyGraph]:
    """The graphs with each of these values of one argument, without those that the function
    refuses.
    """
    graphs: list[AnyGraph] = []
    for other in others:
        with suppress(DataflowError):
            graphs.append(target.graph(**{**values, name: other}))
    return graphs


def _moved_paths(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The paths that both have, with another content."""
    return [path for path in before.keys() & after.keys() if before[path] != after[path]]


def _contents(graph: AnyGraph) -> dict[str, str]:
    """`NODE.PARAM` -> its content, of all that can be set."""
    contents: dict[str, str] = {}
    for node in settable(graph):
        for parameter in node.parameters:
            contents[f"{node.name}.{parameter.name}"] = content(parameter.value)
    return contents


def _other_values(value: Any, hint: Any) -> Iterator[Any]:
    """Other values of an argument, likely ones first; none for functions and what is unknown."""
    if isinstance(value, str):
        names = _literals(hint) or [f"{value}_"]
        yield from (name for name in names if name != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        half = value / 2 if isinstance(value, float) else value // 2
        yield from (value + 1, value * 2, half)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from ((*value[:i], other, *value[i + 1 :]) for other in _other_values(item, None))
    elif isinstance(value, Schedule):
        yield 0.625
    elif value is None:
        yield from _literals(hint)
        parts = (hint, *get_args(hint))
        yield from (_TRIED[part] for part in parts if part in _TRIED)


def _literals(hint: Any) -> list[Any]:
    """The values that a Literal names, also one within a union."""
    values: list[Any] = []
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Literal:
            values += get_args(part)
    return values


def _by_object(graph: AnyGraph, values: Mapping[str, Any]) -> dict[str, str]:
    """`NODE.fn` and `NODE.STATE` -> the argument that is that function, or that Model's base."""
    owners_by_path: dict[str, str] = {}
    for number, phase in numbered_phases(graph):
        for node in phase.graph.nodes:
            where = numbered_name(number, node.name)
            for name, value in values.items():
                owners_by_path |= {f"{where}.{key}": name for key in _uses(node, value)}
    return owners_by_path


def _uses(node: Node, value: Any) -> Iterator[str]:
    """What of a node is this argument of the graph function."""
    values = value if isinstance(value, list) else [value]
    functions = [each for each in values if callable(each)]
    if any(function in functions for function in node.params.get("fns", ())):
        yield from ("fn", "fns")
    for key, state in node.states.items():
        if isinstance(state, Model) and isinstance(value, str) and state.base == value:
            yield key
