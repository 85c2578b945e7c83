"""Trained at: a stated temperature of training is that of the log-probs that the loss compares
with.

Owns: the temperature at which a train node computes log-probs, against that of the sampler's
recorded ones, and of `logprobs` that follow the rollout or that a ratio is made with. Does not own:
a temperature stated for a reference, which is meant, nor which one a node gets where none is stated
(a pass of the planner).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dataflow.errors import Fault
from dataflow.loss import Loss, LossTerm
from dataflow.node import Node, Port
from dataflow.rows import generations, physical
from dataflow.rules.context import Context, Wire, line_of
from dataflow.schema import Logprobs

_RATIOS = ("old", "proximal")
"""Ports whose log-probs are divided into those of training."""


def check(context: Context) -> Iterator[Fault]:
    """Ratios of two temperatures, and references at another one than training that nobody
    stated.
    """
    for node in context.graph.nodes:
        loss = node.params.get("loss")
        if node.operator.work != "train" or not isinstance(loss, Loss) or "rows" not in node.inputs:
            continue
        trained = _trained(node, loss)
        if trained is None:
            continue
        for term in loss.terms:
            yield from _recorded(node, term, trained)
        for wire in context.wires[id(node)]:
            yield from _compared(node, wire, trained)


def _recorded(node: Node, term: LossTerm, trained: float) -> Iterator[Fault]:
    """A loss that falls back to the sampler's log-probs."""
    if not term.function.recorded or f"{term.label}.old" in node.inputs:
        return
    for maker in generations(node.inputs["rows"]):
        at = _at(maker.params.get("temperature"))
        if at is not None and at != trained:
            problem = (
                f"compares with the log-probs of {maker.name!r} ({line_of(maker, node.origin)}),"
                " recorded at "
            )
            problem += (
                f"temperature={at}, and {node.name} is at {trained}: their ratio is of two"
                " distributions"
            )
            fix = f"leave temperature= out of {node.name!r}, or temperature={at}"
            yield Fault(
                rule="trained_at",
                where=term.function.name,
                problem=problem,
                fix=fix,
                origin=node.origin,
            )
            return


def _compared(node: Node, wire: Wire, trained: float) -> Iterator[Fault]:
    """A port of log-probs that are computed at another temperature; a reference may have one of its
    own, if stated.
    """
    maker = physical(wire.port).node
    if not issubclass(wire.input.schema, Logprobs) or not _has_temperature(maker):
        return
    stated = maker.params["temperature"] is not None
    if stated and wire.name not in _RATIOS:
        return
    at = _at(maker.params["temperature"]) if stated else _sampled(maker.inputs["rows"])
    if at is None or at == trained:
        return
    where = "" if stated else ", that of its rows,"
    problem = (
        f"{maker.name!r} ({line_of(maker, wire.origin)}) has log-probs at temperature={at}{where}"
        " and "
    )
    problem += f"{node.name} is at {trained}: they are of two distributions"
    fix = (
        f"leave temperature= out of {(maker if stated else node).name!r}, or temperature={trained}"
        f" in {maker.name!r}"
    )
    yield wire.fault("trained_at", problem, fix)


def _has_temperature(maker: Node) -> bool:
    return bool(maker.operator.log_probs) and "temperature" in maker.params


def _trained(node: Node, loss: Loss) -> float | None:
    """The temperature of training; None where it is nobody's, or no number (other rules say so)."""
    stated = node.params.get("temperature")
    if stated is not None:
        return _at(stated)
    return 1.0 if loss.supervised else _sampled(node.inputs["rows"])


def _sampled(rows: Port[Any]) -> float | None:
    """That of the one generation that wrote the tokens of these rows; 1 where a source did."""
    found = generations(rows)
    if not found:
        return 1.0
    return _at(found[0].params.get("temperature")) if len(found) == 1 else None


def _at(temperature: Any) -> float | None:
    """Greedy rows have log-probs of temperature 1 on record."""
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    return float(temperature) or 1.0 if number else None
