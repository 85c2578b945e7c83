"""Critics: returns and advantages are made of the values of the critic that is trained. A warning.

Owns: whose values the returns of a value loss, and advantages, come from. Does not own: the values
that a critic is kept near (versions.py), heads (state.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import GraphWarning
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.regions import moved_by
from dataflow.rows import makers
from dataflow.rules.context import Context, Wire, line_of
from dataflow.schema import Advantage, Returns, Values


def frozen_critics(context: Context) -> Iterator[GraphWarning]:
    """A critic is trained, and what it learns, or what the policy learns from, are the values of
    another one that nothing trains.
    """
    wires = [wire for node in context.graph.nodes for wire in context.wires[id(node)]]
    wires = [wire for wire in wires if wire.node.operator.work == "train"]
    critics = [wire for wire in wires if issubclass(wire.input.schema, Returns)]
    of_returns = [warning for wire in critics for warning in _of_returns(context, wire)]
    yield from of_returns
    if critics and not of_returns:
        for wire in wires:
            if wire not in critics and issubclass(wire.input.schema, Advantage):
                yield from _of_advantages(context, wire, _trained(critics[0]))


def _of_returns(context: Context, wire: Wire) -> Iterator[GraphWarning]:
    trained = _trained(wire)
    critics = list(_critics(wire))
    if any(trained.name in {m.name for m in (model, *moved_by(model))} for _, model in critics):
        return
    for maker, model in critics:
        if model.name not in context.trained:
            problem = (
                f"its returns, and the advantages in them, are made of the values of {model.name!r}"
                f" ({maker.name!r}, {line_of(maker, wire.origin)}), which nothing trains; what"
                f" {trained.name!r} learns changes neither"
            )
            yield _warning(wire, problem, trained)


def _of_advantages(context: Context, wire: Wire, trained: Model) -> Iterator[GraphWarning]:
    critics = list(_critics(wire))
    if any(model.name in context.trained for _, model in critics):
        return
    for maker, model in critics:
        problem = (
            f"its advantages are made of the values of {model.name!r} ({maker.name!r},"
            f" {line_of(maker, wire.origin)}), which nothing trains; what {trained.name!r} learns"
            " changes none of them"
        )
        yield _warning(wire, problem, trained)


def _warning(wire: Wire, problem: str, trained: Model) -> GraphWarning:
    return GraphWarning(
        rule="frozen_critic",
        where=wire.where,
        problem=problem,
        fix=f"values({trained.name}, ...), or a Model that follows {trained.name!r}",
        origin=wire.origin,
    )


def _trained(wire: Wire) -> Model:
    return next(state for state in wire.node.states.values() if isinstance(state, Model))


def _critics(wire: Wire) -> Iterator[tuple[Node, Model]]:
    """The nodes that made the values in an advantage, with their Models."""
    for maker in _makers_of_values(wire.port):
        for model in maker.states.values():
            if isinstance(model, Model):
                yield maker, model


def _makers_of_values(port: Port) -> Iterator[Node]:
    """The nodes that made the values in an advantage, through what shapes it."""
    left, seen = [port], set[int]()
    while left:
        for maker in makers(left.pop()):
            if id(maker) in seen:
                continue
            seen.add(id(maker))
            for above in maker.inputs.values():
                if issubclass(above.schema, Values):
                    yield from makers(above)
                elif issubclass(above.schema, Advantage):
                    left.append(above)
