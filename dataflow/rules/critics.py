"""Critics: the returns that a critic learns are made of its own values. A warning.

Owns: whose values the returns of a value loss come from. Does not own: the values that it is kept
near (versions.py), heads (state.py).
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


def returns_of_another(context: Context) -> Iterator[GraphWarning]:
    """A Model with a scalar head is trained on returns that a critic made which nothing trains."""
    for node in context.graph.nodes:
        for wire in context.wires[id(node)] if node.operator.work == "train" else ():
            if issubclass(wire.input.schema, Returns):
                yield from _frozen_critics(context, wire)


def _frozen_critics(context: Context, wire: Wire) -> Iterator[GraphWarning]:
    trained = next(s for s in wire.node.states.values() if isinstance(s, Model))
    critics = [
        (maker, model)
        for maker in _makers_of_values(wire.port)
        for model in maker.states.values()
        if isinstance(model, Model)
    ]
    if any(trained.name in {m.name for m in (model, *moved_by(model))} for _, model in critics):
        return
    for maker, model in critics:
        if model.name in context.trained:
            continue
        problem = (
            f"its returns, and the advantages in them, are made of the values of {model.name!r}"
            f" ({maker.name!r}, {line_of(maker, wire.origin)}), which nothing trains; what"
            f" {trained.name!r} learns changes neither"
        )
        yield GraphWarning(
            rule="frozen_critic",
            where=wire.where,
            problem=problem,
            fix=f"values({trained.name}, ...), or a Model that follows {trained.name!r}",
            origin=wire.origin,
        )


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
