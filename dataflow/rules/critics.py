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
from dataflow.rules.context import Context, Wire, line_of, node_models
from dataflow.schema import Advantage, Returns, Values


def frozen_critics(context: Context) -> Iterator[GraphWarning]:
    """A critic is trained, and what it learns, or what the policy learns from, are the values of
    another one that nothing trains.
    """
    wires: list[Wire] = []
    for node in context.graph.nodes:
        if node.operator.work == "train":
            wires += context.wires[id(node)]
    critic_wires = [wire for wire in wires if issubclass(wire.input.schema, Returns)]
    warnings: list[GraphWarning] = []
    for wire in critic_wires:
        warnings += _check_returns(context, wire)
    yield from warnings
    # Returns that were warned of have the same advantages in them: once is enough.
    if critic_wires and not warnings:
        trained = _trained_model(critic_wires[0])
        for wire in wires:
            if wire not in critic_wires and issubclass(wire.input.schema, Advantage):
                yield from _check_advantages(context, wire, trained)


def _check_returns(context: Context, wire: Wire) -> Iterator[GraphWarning]:
    """Returns of a trained critic that are made of another one's values alone."""
    trained = _trained_model(wire)
    critics = list(_find_critics(wire))
    for _, model in critics:
        if trained.name in {each.name for each in (model, *moved_by(model))}:
            return
    for maker, model in critics:
        if model.name not in context.trained:
            problem = (
                f"its returns, and the advantages in them, are made of the values of {model.name!r}"
                f" ({maker.name!r}, {line_of(maker, wire.origin)}), which nothing trains; what"
                f" {trained.name!r} learns changes neither"
            )
            yield _warning(wire, problem, trained)


def _check_advantages(context: Context, wire: Wire, trained: Model) -> Iterator[GraphWarning]:
    """Advantages that are made of values of critics none of which is trained. trained: the critic
    that is.
    """
    critics = list(_find_critics(wire))
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
    fix = f"values({trained.name}, ...), or a Model that follows {trained.name!r}"
    return wire.warning("frozen_critic", problem, fix)


def _trained_model(wire: Wire) -> Model:
    return node_models(wire.node)[0]


def _find_critics(wire: Wire) -> Iterator[tuple[Node, Model]]:
    """The nodes that made the values in an advantage, with their Models."""
    for maker in _makers_of_values(wire.port):
        for model in node_models(maker):
            yield maker, model


def _makers_of_values(port: Port) -> Iterator[Node]:
    """The nodes that made the values in an advantage, through what shapes it."""
    stack, visited = [port], set[int]()
    while stack:
        for maker in makers(stack.pop()):
            if id(maker) in visited:
                continue
            visited.add(id(maker))
            for above in maker.inputs.values():
                if issubclass(above.schema, Values):
                    yield from makers(above)
                elif issubclass(above.schema, Advantage):
                    stack.append(above)
