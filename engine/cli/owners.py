"""Which parameter of a graph function gives a node's value: the flag to use in place of --set.

Owns: finding it, by calling the graph function with one argument changed at a time, as a signature
does not say where its arguments go. Does not own: what is refused (dataflow/set_expressions.py),
flags (flags.py).
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


def find_owners(target: Target, values: Mapping[str, Any], graph: AnyGraph) -> dict[str, str]:
    """Find the graph function's parameter on which each value depends, by `NODE.PARAM`. values: the
    arguments with which it made the graph.

    Where the function refuses every other value of an argument, that argument owns the values that
    have its name and its content.
    """
    hints = get_type_hints(target.function)
    contents = _contents(graph)
    parameters = inspect.signature(target.function).parameters
    arguments = {name: values.get(name, p.default) for name, p in parameters.items()}
    owners_by_path = _owners_by_identity(graph, arguments)
    bases = {name for name in owners_by_path.values() if isinstance(arguments[name], str)}
    for name, argument in arguments.items():
        if name in bases:  # no value of a node; a function may well look into the directory
            continue
        other_values = _other_values(argument, hints.get(name))
        graphs = _remake(target, values, name, other_values)
        for other in graphs:
            for path in _moved_paths(contents, _contents(other)):
                # An argument with the parameter's own name stays its owner.
                if owners_by_path.get(path) != path.rpartition(".")[2]:
                    owners_by_path[path] = name
        if not graphs:
            for path, value_content in contents.items():
                is_namesake = path.rpartition(".")[2] == name
                if is_namesake and value_content == content(argument):
                    owners_by_path[path] = name
    return owners_by_path


def _remake(
    target: Target, values: Mapping[str, Any], name: str, others: Iterable[Any]
) -> list[AnyGraph]:
    """Make the graph with each of these values of one argument, as far as the function takes
    them.
    """
    graphs: list[AnyGraph] = []
    for other in others:
        with suppress(DataflowError):
            graph = target.graph({**values, name: other})
            graphs.append(graph)
    return graphs


def _moved_paths(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """List the paths that both have, with another content."""
    return [path for path in before.keys() & after.keys() if before[path] != after[path]]


def _contents(graph: AnyGraph) -> dict[str, str]:
    """Note the content of all that can be set, by `NODE.PARAM`."""
    contents: dict[str, str] = {}
    for node in settable(graph):
        for parameter in node.parameters:
            contents[f"{node.name}.{parameter.name}"] = content(parameter.value)
    return contents


def _other_values(argument: Any, hint: Any) -> Iterator[Any]:
    """Think of other values for an argument, likely ones first; of none for a function, and for any
    other kind.
    """
    if isinstance(argument, str):
        names = _literals(hint) or [f"{argument}_"]
        yield from (name for name in names if name != argument)
    elif isinstance(argument, bool):
        yield not argument
    elif isinstance(argument, (int, float)):
        yield argument + 1
        yield argument * 2
        yield argument / 2 if isinstance(argument, float) else argument // 2
    elif isinstance(argument, tuple):
        yield from _other_tuples(argument)
    elif isinstance(argument, Schedule):
        yield 0.625
    elif argument is None:
        yield from _literals(hint)
        for part in (hint, *get_args(hint)):
            if part in _TRIED:
                yield _TRIED[part]


def _other_tuples(parts: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Think of tuples of which one part is another."""
    for i, part in enumerate(parts):
        for other in _other_values(part, None):
            yield (*parts[:i], other, *parts[i + 1 :])


def _literals(hint: Any) -> list[Any]:
    """List the values that a Literal names, also one within a union."""
    literals: list[Any] = []
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Literal:
            literals += get_args(part)
    return literals


def _owners_by_identity(graph: AnyGraph, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Find the arguments that are a node's function or a Model's base as they stand, by `NODE.fn`
    and `NODE.STATE`.
    """
    owners_by_path: dict[str, str] = {}
    for number, phase in numbered_phases(graph):
        for node in phase.graph.nodes:
            node_path = numbered_name(number, node.name)
            for name, argument in arguments.items():
                for key in _keys_of(node, argument):
                    owners_by_path[f"{node_path}.{key}"] = name
    return owners_by_path


def _keys_of(node: Node, argument: Any) -> Iterator[str]:
    """List what of a node is this argument of the graph function."""
    arguments = argument if isinstance(argument, list) else [argument]
    functions = [each for each in arguments if callable(each)]
    if any(function in functions for function in node.params.get("fns", ())):
        yield from ("fn", "fns")
    environment = node.params.get("environment")
    if environment is not None and argument in (environment, getattr(environment, "target", None)):
        yield "environment"
    for key, state in node.states.items():
        if isinstance(state, Model) and isinstance(argument, str) and state.base == argument:
            yield key
