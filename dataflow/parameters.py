"""The parameters of a finished node: which there are, their values, and what each takes.

Owns: telling parameters from ports, States, functions and names. Does not own: reading a value
(literals.py), editing a graph (set_expressions.py), the limits (declarations).
"""

from __future__ import annotations

import collections.abc
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from dataflow.limits import number
from dataflow.literals import AcceptedValues
from dataflow.loss import Loss, LossTerm
from dataflow.model import Buffer, Model, Table
from dataflow.node import Node, Port
from dataflow.operator_functions import arguments, function_of

_WEIGHT = number(like=1.0)
_FILE = "edit the graph's file"
_REFUSED = {
    "port": ("a Port, the output of a node", _FILE),
    "state": ("a State", f"the graph function's flag for its Model, or {_FILE}"),
    "function": ("a function", f"the graph function's flag for it, or {_FILE}"),
    "name": ("the node's name", _FILE),
    "loss": ("a Loss", "its terms' parameters"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParameter:
    """A parameter of a finished node that text can give; of a term of its loss, `LOSS.PARAM`.

    about: what the docstring of its function says of it, or nothing.
    """

    name: str
    value: Any
    accepted: AcceptedValues
    about: str = ""

    @property
    def expected(self) -> str:
        """`a number >= 0`."""
        return self.accepted.expected


def parameters_of(node: Node) -> Iterator[NodeParameter]:
    """Those of the node, in the order of its function, then those of the terms of its loss."""
    function = function_of(node.operator)
    hints, values = _hints(function or node.operator.function), _values(node, function)
    about = inspect.getdoc(function or node.operator.function) or ""
    for name, value in values.items():
        if _kind(node, name, value, hints.get(name)) is None:
            accepted = AcceptedValues(
                limit=node.operator.limits.get(name),
                hint=hints.get(name, _like(value)),
                schedulable=name in node.operator.schedulable,
            )
            yield NodeParameter(
                name=name, value=value, accepted=accepted, about=described(about, name)
            )
    loss = node.params.get("loss")
    for term in loss.terms if isinstance(loss, Loss) else ():
        yield from _of_term(term)


def unsettable(node: Node) -> dict[str, tuple[str, str]]:
    """Name -> what it is instead of a value, and what to do, for all else that the node has."""
    function = function_of(node.operator)
    hints = _hints(function or node.operator.function)
    values = {**dict.fromkeys(node.inputs), **node.states, **_values(node, function), "name": ""}
    kinds = {name: _kind(node, name, value, hints.get(name)) for name, value in values.items()}
    found = {name: _REFUSED[kind] for name, kind in kinds.items() if kind is not None}
    if "fns" in node.params:
        found |= dict.fromkeys(("fn", "fns"), _REFUSED["function"])
    derived = [name for name in node.params if name not in values]
    follows = ("what follows from other arguments", _FILE)
    loss = node.params.get("loss")
    for term in loss.terms if isinstance(loss, Loss) else ():
        ports = [f"{term.label}.{port.name}" for port in term.function.ports]
        found |= dict.fromkeys([*ports, f"{term.label}.rows"], _REFUSED["port"])
        found[term.label] = _REFUSED["loss"]
    return dict.fromkeys(derived, follows) | found


def _values(node: Node, function: Callable[..., Any] | None) -> dict[str, Any]:
    """Name -> value of every argument by name of the call that makes the node."""
    given = arguments(node, node.inputs)[1]
    if function is None:
        return given
    named = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in named):
        return given
    return {
        p.name: given.get(p.name, None if p.default is p.empty else p.default)
        for p in named
        if p.kind is not p.VAR_POSITIONAL
    }


def _kind(node: Node, name: str, value: Any, hint: Any) -> str | None:
    """What an argument is, if it is no value that text can give."""
    built_in = function_of(node.operator) is not None
    if name in node.inputs or isinstance(value, Port) or _mentions(hint, Port):
        return "port"
    if name in node.states or isinstance(value, Model) or _mentions(hint, Model, Buffer, Table):
        return "state"
    if name == "name" and built_in:
        return "name"
    if isinstance(value, Loss):
        return "loss"
    if _mentions(hint, collections.abc.Callable) or _is_function(value):
        return "function"
    return None


def _is_function(value: Any) -> bool:
    several = value if isinstance(value, (list, tuple)) else (value,)
    return any(callable(each) and not isinstance(each, type) for each in several)


def _mentions(hint: Any, *kinds: Any) -> bool:
    """Whether an annotation has one of these classes anywhere."""
    inside = get_args(hint)
    parts = [p for part in inside for p in (part if isinstance(part, list) else [part])]
    return hint in kinds or get_origin(hint) in kinds or any(_mentions(p, *kinds) for p in parts)


def _like(value: Any) -> Any:
    """The annotation of a parameter without one: numbers stay numbers."""
    kind = type(value)
    return kind if kind in (bool, float) else int | float if kind is int else Any


def _hints(function: Callable[..., Any] | None) -> Mapping[str, Any]:
    """Annotations by name; those that are not found are unknown."""
    if function is None:
        return {}
    try:
        return get_type_hints(function)
    except (NameError, TypeError):  # a stand-in for a function that was not imported
        return {}


def _of_term(term: LossTerm) -> Iterator[NodeParameter]:
    function = function_of(term.function)
    hints, limits = _hints(function or term.function.fn), dict(term.function.limits)
    about = inspect.getdoc(function or term.function.fn) or ""
    values = dict(term.params)
    for name, value in values.items():
        if _mentions(hints.get(name), collections.abc.Callable) or _is_function(value):
            continue
        number_like = term.function.takes_number(name)
        accepted = AcceptedValues(
            limit=limits.get(name), hint=hints.get(name, _like(value)), schedulable=number_like
        )
        path = f"{term.label}.{name}"
        yield NodeParameter(name=path, value=value, accepted=accepted, about=described(about, name))
    if "weight" not in values:
        accepted = AcceptedValues(limit=_WEIGHT, schedulable=True)
        about = "the term's factor in the sum"
        path = f"{term.label}.weight"
        yield NodeParameter(name=path, value=term.weight, accepted=accepted, about=about)


def described(doc: str, name: str) -> str:
    """What a docstring says of a parameter: from `name: ` to the end of its first sentence, or to
    the list of values behind it; all of the list where that is all.
    """
    words = " ".join(doc.split())
    found = re.search(rf"(?:^|[.;] |, ){name}(?:, \w+)*: (.+)", words)
    if found is None:
        return ""
    depth, text = 0, found.group(1)
    ends = (". ",) if text.startswith("`") else (". ", "; ", ": `")
    for i, mark in enumerate(text):
        depth += (mark == "(") - (mark == ")")
        if not depth and f"{text[i:]} ".startswith(ends):
            return text[:i]
    return text
