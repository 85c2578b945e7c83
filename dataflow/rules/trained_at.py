"""Trained at: a stated temperature of training equals that of the log-probs in the loss.

Owns: comparing the temperature at which a train node computes log-probs with that of the sampler's
recorded ones, of `logprobs` at the rollout's temperature, and of the other side of a ratio. Does
not own: a temperature stated for a reference, which is intended, and default temperatures (a pass
of the planner).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dataflow.errors import Fault
from dataflow.loss import Loss, LossTerm
from dataflow.loss_terms import ROWS, row_sets
from dataflow.node import Node, Port
from dataflow.rows import generations, physical
from dataflow.rules.context import Context, Wire, line_of
from dataflow.schema import Logprobs

_RATIOS = ("old", "proximal")
"""Ports whose log-probs form a ratio with those of training."""


def check(context: Context) -> Iterator[Fault]:
    """Ratios of two temperatures, and references at another temperature than training that is not
    stated.
    """
    for node in context.graph.nodes:
        loss = node.params.get("loss")
        if node.operator.work != "train" or not isinstance(loss, Loss) or "rows" not in node.inputs:
            continue
        trained = {name: _trained(node, loss, name) for name in row_sets(node)}
        for term in loss.terms:
            if (at := trained.get(term.on)) is not None:
                yield from _recorded(node, term, at)
        for wire in context.wires[id(node)]:
            if (at := trained.get(wire.row_set)) is not None:
                yield from _compared(node, wire, at)


def _recorded(node: Node, term: LossTerm, trained: float) -> Iterator[Fault]:
    """A loss that compares with the sampler's log-probs."""
    if not term.recorded(node.inputs):
        return
    for maker in generations(node.inputs[term.on]):
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
    """Log-probs computed at another temperature; a reference may have its own, if stated."""
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


def _trained(node: Node, loss: Loss, row_set: str) -> float | None:
    """The temperature of training these rows; None if there is none or no number (other rules
    report it). A stated one is of the node's own rows.
    """
    stated = node.params.get("temperature")
    if stated is not None and row_set == ROWS:
        return _at(stated)
    return 1.0 if loss.on(row_set).supervised else _sampled(node.inputs[row_set])


def _sampled(rows: Port[Any]) -> float | None:
    """That of the one generation that wrote these rows' tokens; 1 if a source did."""
    found = generations(rows)
    if not found:
        return 1.0
    return _at(found[0].params.get("temperature")) if len(found) == 1 else None


def _at(temperature: Any) -> float | None:
    """Greedy rows have recorded log-probs of temperature 1."""
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    return float(temperature) or 1.0 if number else None
