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
    declaring_module = importlib.import_module(module)
    declaration = getattr(declaring_module, attribute, None)
    if not isinstance(declaration, type(declared)) or declaration.name != declared.name:
        return None
    return getattr(declaring_module, declared.name)


def call_arguments(node: Node, inputs: Inputs) -> tuple[list[Port[Any]], dict[str, Any]]:
    """The arguments, by position and by name, of the call that makes this node on these inputs."""
    function = function_of(node.operator)
    if function is None:
        return [], dict(node.params)
    parameters = inspect.signature(function).parameters.values()
    declared = {declared_input.name for declared_input in node.operator.inputs}
    named_inputs = {name: port for name, port in inputs.items() if name in declared}
    variadic_inputs = [port for name, port in inputs.items() if name not in declared]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        keywords = {**named_inputs, **node.params, "name": node.name}
    else:
        derived = _derive_arguments(node)
        known = {**node.states, **named_inputs, **node.params, **derived, "name": node.name}
        keywords = {p.name: known[p.name] for p in parameters if p.name in known}
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return variadic_inputs, keywords
    return [], keywords


def _derive_arguments(node: Node) -> dict[str, Any]:
    """Derive the arguments that a node keeps in another form."""
    derived: dict[str, Any] = {"scope": "group" if node.operator.scope == "group" else "row"}
    if fns := node.params.get("fns"):
        derived["fn"] = fns[0] if len(fns) == 1 else fns
    if isinstance(node.params.get("loss"), Loss):
        derived["loss"] = unbind_loss(node)
    return derived


def remake_node(node: Node, inputs: Inputs, changes: dict[str, Any]) -> Node:
    """Call the node's declaring function with other arguments, or on other inputs; raises the
    GraphError of that call. What only the node has (the columns that a function reads) stays.
    """
    function = function_of(node.operator)
    if function is None:
        return node.changed(inputs=inputs, params=node.params | changes)
    positional, named = call_arguments(node.changed(inputs=inputs), inputs)
    remade = _node_behind(function(*positional, **(named | changes)))
    params = dict(remade.params)
    for name, param in node.params.items():
        if name in remade.params and name not in named:
            params[name] = param
    return node.changed(
        operator=remade.operator, inputs=inputs, params=params, schemas=remade.schemas
    )


def _node_behind(output: Any) -> Node:
    """The node behind what a declaring function returned: itself, its port, or several of them."""
    first = output[0] if isinstance(output, tuple) else output
    return first.node if isinstance(first, Port) else first


def remake_term(node: Node, term: LossTerm, changes: dict[str, Any], weight: Any) -> LossTerm:
    """Make a term of a train node's loss anew, with other parameters or another weight; raises the
    GraphError of the loss's function.
    """
    params, function = dict(term.params) | changes, function_of(term.function)
    if function is None or not changes:
        return replace(term, params=tuple(params.items()), weight=weight)
    user_term = _find_user_term(node, term)
    rows = {} if user_term.rows is None else {ROWS: user_term.rows}
    (remade,) = function(**(dict(user_term.ports) | params | rows)).terms
    return replace(term, function=remade.function, params=remade.params, weight=weight)


def _find_user_term(node: Node, term: LossTerm) -> LossTerm:
    """A term of a train node's loss as the user made it, with ports instead of names of inputs."""
    bound_terms = node.params["loss"].terms
    for user_term, bound_term in zip(unbind_loss(node).terms, bound_terms, strict=True):
        if bound_term is term:
            return user_term
    raise AssertionError("it is a term of this node")
