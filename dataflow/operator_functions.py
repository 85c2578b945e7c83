"""Declaring functions: the call that makes a finished node, and the node of another such call.

Owns: finding the function that users call for an operator or a loss, and the arguments that a node
was made with. Does not own: who changes which argument (set_expressions.py).

A user's own operator or loss has none: its parameters are those of its node.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dataflow.graph import Inputs
from dataflow.loss import Loss, LossFunction, LossTerm
from dataflow.loss_terms import ROWS, unbind_loss
from dataflow.node import Node, Port
from dataflow.operator import Operator


def function_of(declared: Operator | LossFunction) -> Callable[..., Any] | None:
    """The function that users call for it, which stands beside its declaration; None for a user's
    own, and for what a file says of a declaration that is not there.
    """
    module, _, attribute = declared.path.partition(":")
    if not module.startswith("operators."):
        return None
    there = importlib.import_module(module)
    ours = getattr(there, attribute, None)
    if not isinstance(ours, type(declared)) or ours.name != declared.name:
        return None
    return getattr(there, declared.name)


def arguments(node: Node, inputs: Inputs) -> tuple[list[Port[Any]], dict[str, Any]]:
    """The arguments, by position and by name, of the call that makes this node on these inputs."""
    function = function_of(node.operator)
    if function is None:
        return [], dict(node.params)
    taken = inspect.signature(function).parameters.values()
    declared = {i.name for i in node.operator.inputs}
    named = {key: port for key, port in inputs.items() if key in declared}
    known = {**node.states, **named, **node.params, **_derived(node), "name": node.name}
    if any(p.kind is p.VAR_KEYWORD for p in taken):
        given = {**named, **node.params, "name": node.name}
    else:
        given = {p.name: known[p.name] for p in taken if p.name in known}
    if any(p.kind is p.VAR_POSITIONAL for p in taken):
        return [port for key, port in inputs.items() if key not in declared], given
    return [], given


def _derived(node: Node) -> dict[str, Any]:
    """Arguments that a node keeps in another form."""
    found: dict[str, Any] = {"scope": "group" if node.operator.scope == "group" else "row"}
    if fns := node.params.get("fns"):
        found["fn"] = fns[0] if len(fns) == 1 else fns
    if isinstance(node.params.get("loss"), Loss):
        found["loss"] = unbind_loss(node)
    return found


def remade(node: Node, inputs: Inputs, changes: dict[str, Any]) -> Node:
    """The node that its declaring function makes with other arguments, or on other inputs; raises
    the GraphError of that call. What only the node has (the columns that a function reads) stays.
    """
    function = function_of(node.operator)
    if function is None:
        return node.changed(inputs=inputs, params=node.params | changes)
    unnamed, named = arguments(node.changed(inputs=inputs), inputs)
    made = _node(function(*unnamed, **(named | changes)))
    kept = {k: v for k, v in node.params.items() if k in made.params and k not in named}
    return node.changed(
        operator=made.operator, inputs=inputs, params=made.params | kept, schemas=made.schemas
    )


def _node(made: Any) -> Node:
    """The node behind what a declaring function returned."""
    first = made[0] if isinstance(made, tuple) else made
    return first.node if isinstance(first, Port) else first


def remade_term(node: Node, term: LossTerm, changes: dict[str, Any], weight: Any) -> LossTerm:
    """A term of a train node's loss, with other parameters or another weight; raises the GraphError
    of the loss's function.
    """
    params, function = dict(term.params) | changes, function_of(term.function)
    if function is None or not changes:
        return replace(term, params=tuple(params.items()), weight=weight)
    (given,) = [t for t, old in _pairs(node) if old is term]
    rows = {} if given.rows is None else {ROWS: given.rows}
    (made,) = function(**dict(given.ports), **params, **rows).terms
    return replace(term, function=made.function, params=made.params, weight=weight)


def _pairs(node: Node) -> list[tuple[LossTerm, LossTerm]]:
    """Each term of a train node's loss as it was given, and as the node has it."""
    return list(zip(unbind_loss(node).terms, node.params["loss"].terms, strict=True))
