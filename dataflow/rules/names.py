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
from dataflow.rules.context import Context, line_of, place

_LEGAL = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z")


def check(context: Context) -> Iterator[Fault]:
    """Illegal names, nodes that share a name, States that share a name and differ."""
    yield from _illegal(context)
    yield from _nodes(context)
    yield from _states(context)


def _illegal(context: Context) -> Iterator[Fault]:
    for node in context.graph.nodes:
        if not _legal(node.name):
            yield _not_legal(node, f"{node.operator.name} {node.name!r}", node.operator.name)
    for state in context.graph.states:
        if not _legal(state.name):
            yield _not_legal(
                _user(context, state), f"{type(state).__name__} {state.name!r}", "policy"
            )


def _legal(name: object) -> bool:
    return isinstance(name, str) and _LEGAL.match(name) is not None


def _not_legal(node: Node | None, where: str, like: str) -> Fault:
    problem = "expected a name of letters, digits, _ . and -, which begins with a letter"
    origin = node.origin if node else None
    return Fault(rule="names", where=where, problem=problem, fix=f'"{like}"', origin=origin)


def _nodes(context: Context) -> Iterator[Fault]:
    seen: dict[str, Node] = {}
    taken = {n.name for n in context.graph.nodes}
    for node in context.graph.nodes:
        first = seen.setdefault(node.name, node)
        if first is node or _both_write(first, node):
            continue
        number = next(i for i in range(2, len(taken) + 3) if f"{node.name}_{i}" not in taken)
        problem = (
            f"another node has this name: {first.operator.name} ({line_of(first, node.origin)})"
        )
        fix = (
            f'name="{node.name}_{number}" in one of them, or use the other\'s output where the two'
            " are meant as one"
        )
        yield Fault(
            rule="names",
            where=f"{node.operator.name} {node.name!r}",
            problem=problem,
            fix=fix,
            origin=node.origin,
        )


def _both_write(a: Node, b: Node) -> bool:
    written = [{getattr(n.states.get(p), "name", None) for p in n.operator.writes} for n in (a, b)]
    return bool(written[0] & written[1])


def _states(context: Context) -> Iterator[Fault]:
    seen: dict[str, State] = {}
    for state in context.graph.states:
        first = seen.setdefault(state.name, state)
        if first == state:
            continue
        user = _user(context, state)
        where = f"{type(state).__name__} {state.name!r}"
        origin = user.origin if user else None
        other = _user(context, first)
        at = f" ({place(other)}, {line_of(other, origin)})" if other else ""
        problem = (
            f"a {type(first).__name__} of this name{at} differs in {_difference(first, state)}"
        )
        fix = (
            f"another name for one of them, or one object for both: {state.name} ="
            f" {type(state).__name__}(...)"
        )
        yield Fault(rule="names", where=where, problem=problem, fix=fix, origin=origin)


def _user(context: Context, state: State) -> Node | None:
    """The first node that has this State, or one that follows it."""
    for node in context.graph.nodes:
        for used in node.states.values():
            if used is state or (
                isinstance(used, Model) and any(m is state for m in leaders(used))
            ):
                return node
    return None


def _difference(a: State, b: State) -> str:
    if type(a) is not type(b):
        return "kind"
    fields = [
        f.name
        for f in dataclasses.fields(a)
        if f.compare and getattr(a, f.name) != getattr(b, f.name)
    ]
    shown = [
        f"{name} ({getattr(a, name)!r} and {getattr(b, name)!r})"
        for name in fields
        if name != "follows"
    ]
    return ", ".join(shown + ["follows"] * ("follows" in fields))
