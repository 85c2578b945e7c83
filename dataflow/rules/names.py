"""Names: one node per name, one content per State's name.

Owns: that every name in a graph means one thing, and may be part of a metric's or file's name. Does
not own: two writers of one State, whose train nodes have the same default name (state.py has the
better message).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from dataflow.errors import Fault
from dataflow.model import Model, State
from dataflow.node import Node
from dataflow.regions import leaders
from dataflow.rules.context import Context, line_of, name_node

_LEGAL = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z")


def check_unique_names(context: Context) -> Iterator[Fault]:
    """Illegal names, nodes that share a name, States that share a name and differ."""
    yield from _check_form(context)
    yield from _check_nodes(context)
    yield from _check_states(context)


def _check_form(context: Context) -> Iterator[Fault]:
    for node in context.graph.nodes:
        if not _is_legal(node.name):
            where = f"{node.operator.name} {node.name!r}"
            yield _illegal_name(node, where, node.operator.name)
    for state in context.graph.states:
        if not _is_legal(state.name):
            where = f"{type(state).__name__} {state.name!r}"
            yield _illegal_name(_find_user(context, state), where, "policy")


def _is_legal(name: object) -> bool:
    return isinstance(name, str) and _LEGAL.match(name) is not None


def _illegal_name(node: Node | None, where: str, like: str) -> Fault:
    problem = "expected a name of letters, digits, _ . and -, which begins with a letter"
    origin = node.origin if node else None
    return Fault(rule="names", where=where, problem=problem, fix=f'"{like}"', origin=origin)


def _check_nodes(context: Context) -> Iterator[Fault]:
    first_nodes: dict[str, Node] = {}
    names = {node.name for node in context.graph.nodes}
    for node in context.graph.nodes:
        first = first_nodes.setdefault(node.name, node)
        if first is node or _write_one_state(first, node):
            continue
        number = next(i for i in range(2, len(names) + 3) if f"{node.name}_{i}" not in names)
        where, line = f"{node.operator.name} {node.name!r}", line_of(first, node.origin)
        problem = f"another node has this name: {first.operator.name} ({line})"
        fix = (
            f'name="{node.name}_{number}" in one of them, or use the other\'s output where the two'
            " are meant as one"
        )
        yield Fault(rule="names", where=where, problem=problem, fix=fix, origin=node.origin)


def _write_one_state(node: Node, other: Node) -> bool:
    """Whether two nodes write a State of one name, which state.py reports."""
    return not _written_names(node).isdisjoint(_written_names(other))


def _written_names(node: Node) -> set[str | None]:
    return {getattr(node.states.get(param), "name", None) for param in node.operator.writes}


def _check_states(context: Context) -> Iterator[Fault]:
    first_states: dict[str, State] = {}
    for state in context.graph.states:
        first = first_states.setdefault(state.name, state)
        if first == state:
            continue
        user, first_user = _find_user(context, state), _find_user(context, first)
        kind, first_kind = type(state).__name__, type(first).__name__
        origin = user.origin if user else None
        place = ""
        if first_user is not None:
            place = f" ({name_node(first_user)}, {line_of(first_user, origin)})"
        difference = _describe_difference(first, state)
        problem = f"a {first_kind} of this name{place} differs in {difference}"
        fix = f"another name for one of them, or one object for both: {state.name} = {kind}(...)"
        where = f"{kind} {state.name!r}"
        yield Fault(rule="names", where=where, problem=problem, fix=fix, origin=origin)


def _find_user(context: Context, state: State) -> Node | None:
    """The first node that has this State, or one that follows it."""
    for node in context.graph.nodes:
        for node_state in node.states.values():
            if node_state is state:
                return node
            if isinstance(node_state, Model) and any(m is state for m in leaders(node_state)):
                return node
    return None


def _describe_difference(state: State, other: State) -> str:
    if type(state) is not type(other):
        return "kind"
    differences: list[str] = []
    for field in dataclasses.fields(state):
        first, second = getattr(state, field.name), getattr(other, field.name)
        if field.compare and first != second and field.name != "follows":
            differences.append(f"{field.name} ({first!r} and {second!r})")
    # Of a leader only that it is another one: a whole Model would fill the message.
    if isinstance(state, Model) and isinstance(other, Model) and state.follows != other.follows:
        differences.append("follows")
    return ", ".join(differences)
