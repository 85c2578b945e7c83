"""The parameters of a finished node: which there are, their values, and what each takes.

Owns: telling parameters from ports, States, functions and names. Does not own: reading a value
(value_parser.py), editing a graph (set_expressions.py), the limits (declarations), refusing a name
that is no parameter (calls.py).
"""

from __future__ import annotations

import collections.abc
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from dataflow.limits import number
from dataflow.loss import Loss, LossTerm
from dataflow.model import Buffer, Model, Table
from dataflow.node import Node, Port
from dataflow.operator_functions import call_arguments, function_of
from dataflow.value_parser import AcceptedValues

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
        return self.accepted.description


def parameters_of(node: Node) -> Iterator[NodeParameter]:
    """Those of the node, in the order of its function, then those of the terms of its loss."""
    function = function_of(node.operator)
    hints = _hints(function or node.operator.function)
    about = inspect.getdoc(function or node.operator.function) or ""
    for name, argument in _list_arguments(node, function).items():
        if _find_kind(node, name, argument, hints.get(name)) is None:
            accepted = AcceptedValues(
                limit=node.operator.limits.get(name),
                hint=hints.get(name, _likely_hint(argument)),
                schedulable=name in node.operator.schedulable,
            )
            yield NodeParameter(
                name=name, value=argument, accepted=accepted, about=find_description(about, name)
            )
    for term in _loss_terms(node):
        yield from _parameters_of_term(term)


def find_unsettable(node: Node) -> dict[str, tuple[str, str]]:
    """Name -> what it is instead of a value, and what to do, for all else that the node has."""
    function = function_of(node.operator)
    hints = _hints(function or node.operator.function)
    arguments = {**dict.fromkeys(node.inputs), **node.states}
    arguments |= {**_list_arguments(node, function), "name": ""}
    refusals: dict[str, tuple[str, str]] = {}
    for name in node.params:
        if name not in arguments:
            refusals[name] = ("what follows from other arguments", _FILE)
    for name, argument in arguments.items():
        kind = _find_kind(node, name, argument, hints.get(name))
        if kind is not None:
            refusals[name] = _REFUSED[kind]
    if "fns" in node.params:
        refusals |= dict.fromkeys(("fn", "fns"), _REFUSED["function"])
    for term in _loss_terms(node):
        ports = [f"{term.label}.{port.name}" for port in term.function.ports]
        refusals |= dict.fromkeys([*ports, f"{term.label}.rows"], _REFUSED["port"])
        refusals[term.label] = _REFUSED["loss"]
    return refusals


def _loss_terms(node: Node) -> tuple[LossTerm, ...]:
    loss = node.params.get("loss")
    return loss.terms if isinstance(loss, Loss) else ()


def _list_arguments(node: Node, function: Callable[..., Any] | None) -> dict[str, Any]:
    """Name -> argument of every parameter of the call that makes the node, defaults included."""
    _, keywords = call_arguments(node, node.inputs)
    if function is None:
        return keywords
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return keywords
    arguments: dict[str, Any] = {}
    for p in parameters:
        if p.kind is not p.VAR_POSITIONAL:
            default = None if p.default is p.empty else p.default
            arguments[p.name] = keywords.get(p.name, default)
    return arguments


def _find_kind(node: Node, name: str, argument: Any, hint: Any) -> str | None:
    """What an argument is, if it is no value that text can give: a key of _REFUSED."""
    is_built_in = function_of(node.operator) is not None
    if name in node.inputs or isinstance(argument, Port) or _mentions(hint, Port):
        return "port"
    if name in node.states or isinstance(argument, Model | Table):
        return "state"
    if _mentions(hint, Model, Buffer, Table):
        return "state"
    # A user's own operator may have a parameter of that name.
    if name == "name" and is_built_in:
        return "name"
    if isinstance(argument, Loss):
        return "loss"
    if _mentions(hint, collections.abc.Callable) or _has_function(argument):
        return "function"
    return None


def _has_function(argument: Any) -> bool:
    """Whether it is a function, or a list with one."""
    elements = argument if isinstance(argument, (list, tuple)) else (argument,)
    return any(callable(each) and not isinstance(each, type) for each in elements)


def _mentions(hint: Any, *kinds: Any) -> bool:
    """Whether an annotation has one of these classes anywhere."""
    if hint in kinds or get_origin(hint) in kinds:
        return True
    for part in get_args(hint):
        # Of a Callable the parameters are a list of annotations.
        parts = part if isinstance(part, list) else [part]
        if any(_mentions(inner, *kinds) for inner in parts):
            return True
    return False


def _likely_hint(argument: Any) -> Any:
    """The annotation of a parameter without one: numbers stay numbers."""
    kind = type(argument)
    if kind in (bool, float):
        return kind
    return int | float if kind is int else Any


def _hints(function: Callable[..., Any] | None) -> Mapping[str, Any]:
    """Annotations by name; those that are not found are unknown."""
    if function is None:
        return {}
    try:
        return get_type_hints(function)
    except (NameError, TypeError):  # a stand-in for a function that was not imported
        return {}


def _parameters_of_term(term: LossTerm) -> Iterator[NodeParameter]:
    function = function_of(term.function)
    hints, limits = _hints(function or term.function.fn), dict(term.function.limits)
    about = inspect.getdoc(function or term.function.fn) or ""
    arguments = dict(term.params)
    for name, argument in arguments.items():
        if _mentions(hints.get(name), collections.abc.Callable) or _has_function(argument):
            continue
        accepted = AcceptedValues(
            limit=limits.get(name),
            hint=hints.get(name, _likely_hint(argument)),
            schedulable=term.function.takes_number(name),
        )
        path, description = f"{term.label}.{name}", find_description(about, name)
        yield NodeParameter(name=path, value=argument, accepted=accepted, about=description)
    if "weight" not in arguments:
        accepted = AcceptedValues(limit=_WEIGHT, schedulable=True)
        about = "the term's factor in the sum"
        path = f"{term.label}.weight"
        yield NodeParameter(name=path, value=term.weight, accepted=accepted, about=about)


def find_description(doc: str, name: str) -> str:
    """Find what a docstring says of a parameter: from `name: ` to the end of its first sentence, or
    to the list of values behind it; all of the list where that is all.
    """
    words = " ".join(doc.split())
    match = re.search(rf"(?:^|[.;] |, ){name}(?:, \w+)*: (.+)", words)
    if match is None:
        return ""
    description = match.group(1)
    is_list = description.startswith("`")
    ends = (". ",) if is_list else (". ", "; ", ": `")
    depth = 0
    for i, mark in enumerate(description):
        # What is in parentheses ends nothing.
        depth += (mark == "(") - (mark == ")")
        if not depth and f"{description[i:]} ".startswith(ends):
            return description[:i]
    return description
