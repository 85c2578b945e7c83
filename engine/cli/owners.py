"""Which parameter of a graph function gives a node's value: the flag to use in place of --set.

Owns: finding it, by calling the graph function with one argument changed at a time. Does not own:
what is refused (dataflow/settings.py), flags (flags.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dataflow.errors import DataflowError
from dataflow.model import Model, Schedule
from dataflow.node import Node, content
from dataflow.program import AnyGraph, numbered_name, numbered_phases
from dataflow.settings import settable
from engine.cli.target import Target

_TRIED: Mapping[type[Any], Any] = {int: 3, float: 0.625, str: "another", bool: True}
"""A value of each kind of parameter whose default is None."""


def owners(target: Target, values: Mapping[str, Any], made: AnyGraph) -> dict[str, str]:
    """`NODE.PARAM` -> the graph function's parameter on which that value depends. values: the
    arguments with which it made the graph.

    A function that refuses each changed argument owns the values that have the parameter's name and
    present value.
    """
    hints, known = get_type_hints(target.function), _contents(made)
    taken = inspect.signature(target.function).parameters
    arguments = {name: values.get(name, p.default) for name, p in taken.items()}
    found = _by_object(made, arguments)
    bases = {name for path, name in found.items() if isinstance(arguments[name], str)}
    for name, value in arguments.items():
        if name in bases:  # no value of a node; a function may well look into the directory
            continue
        others = [
            g for v in _changed(value, hints.get(name)) if (g := _made(target, values, name, v))
        ]
        for other in others:
            new = _contents(other)
            moved = [path for path in known.keys() & new.keys() if known[path] != new[path]]
            found |= {path: name for path in moved if found.get(path) != path.rpartition(".")[2]}
        if not others:
            same = (p for p in known if p.rpartition(".")[2] == name)
            found |= {path: name for path in same if known[path] == content(value)}
    return found


def _made(target: Target, values: Mapping[str, Any], name: str, value: Any) -> AnyGraph | None:
    """The graph with another argument; None where the function refuses it."""
    try:
        return target.graph(**{**values, name: value})
    except DataflowError:
        return None


def _contents(made: AnyGraph) -> dict[str, str]:
    """`NODE.PARAM` -> its content, of all that can be set."""
    return {
        f"{node.name}.{parameter.name}": content(parameter.value)
        for node in settable(made)
        for parameter in node.parameters
    }


def _changed(value: Any, hint: Any) -> Iterator[Any]:
    """Other values of an argument, likely ones first; none for functions and what is unknown."""
    if isinstance(value, str):
        named = [name for part in (hint, *get_args(hint)) for name in _names(part)]
        yield from (name for name in named or [f"{value}_"] if name != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield from (value + 1, value * 2, value / 2 if isinstance(value, float) else value // 2)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from ((*value[:i], other, *value[i + 1 :]) for other in _changed(item, None))
    elif isinstance(value, Schedule):
        yield 0.625
    elif value is None:
        parts = (hint, *get_args(hint))
        yield from (name for part in parts for name in _names(part))
        yield from (_TRIED[part] for part in parts if part in _TRIED)


def _names(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _by_object(made: AnyGraph, values: Mapping[str, Any]) -> dict[str, str]:
    """`NODE.fn` and `NODE.STATE` -> the argument that is that function, or that Model's base."""
    owners_by_path: dict[str, str] = {}
    for number, phase in numbered_phases(made):
        for node in phase.graph.nodes:
            where = numbered_name(number, node.name)
            for name, value in values.items():
                owners_by_path |= {f"{where}.{key}": name for key in _uses(node, value)}
    return owners_by_path


def _uses(node: Node, value: Any) -> Iterator[str]:
    """What of a node is this argument of the graph function."""
    functions = [f for f in (value if isinstance(value, list) else [value]) if callable(f)]
    if any(f in functions for f in node.params.get("fns", ())):
        yield from ("fn", "fns")
    for key, state in node.states.items():
        if isinstance(state, Model) and isinstance(value, str) and state.base == value:
            yield key
