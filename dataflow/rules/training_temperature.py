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
from dataflow.rows import makers
from dataflow.rules.context import Context, Wire, line_of
from dataflow.samplers import Samplers, temperature_of
from dataflow.schema import Logprobs

_RATIOS = ("old", "proximal")
"""Ports whose log-probs form a ratio with those of training."""


BySample = tuple[float, ...]
"""A temperature for each sample of a prompt."""


def check(context: Context) -> Iterator[Fault]:
    """Ratios of two temperatures, and references at another temperature than training that is not
    stated.
    """
    samplers = context.samplers
    for node in context.graph.nodes:
        loss = node.params.get("loss")
        if node.operator.work != "train" or not isinstance(loss, Loss) or "rows" not in node.inputs:
            continue
        trained = {name: _trained(samplers, node, loss, name) for name in row_sets(node)}
        for term in loss.terms:
            if (at := trained.get(term.on)) is not None:
                yield from _recorded(samplers, node, term, at)
        for wire in context.wires[id(node)]:
            if (at := trained.get(wire.row_set)) is not None:
                yield from _compared(samplers, node, wire, at)


def _recorded(samplers: Samplers, node: Node, term: LossTerm, trained: BySample) -> Iterator[Fault]:
    """A loss that compares with the sampler's log-probs."""
    if not term.recorded(node.inputs):
        return
    rows = node.inputs[term.on]
    for found, mine in zip(samplers.of(rows), trained, strict=False):
        for maker in found:
            at = temperature_of(maker.params.get("temperature"))
            if at is None or at == mine:
                continue
            problem = (
                f"compares with the log-probs of {maker.name!r} ({line_of(maker, node.origin)}),"
                " recorded at "
            )
            problem += (
                f"temperature={at}, and {node.name} is at {mine}: their ratio is of two"
                " distributions"
            )
            fix = f"leave temperature= out of {node.name!r}"
            if samplers.all_at(rows, at):
                fix += f", or temperature={at}"
            yield Fault(
                rule="trained_at",
                where=term.function.name,
                problem=problem,
                fix=fix,
                origin=node.origin,
            )
            return


def _compared(samplers: Samplers, node: Node, wire: Wire, trained: BySample) -> Iterator[Fault]:
    """Log-probs computed at another temperature; a reference may have its own, if stated."""
    if not issubclass(wire.input.schema, Logprobs):
        return
    for maker, at, mine in _pairs(samplers, wire.port, trained):
        stated = maker.params["temperature"] is not None
        if at == mine or (stated and wire.name not in _RATIOS):
            continue
        where = "" if stated else ", that of its rows,"
        problem = (
            f"{maker.name!r} ({line_of(maker, wire.origin)}) has log-probs at"
            f" temperature={at}{where} and {node.name} is at {mine}: they are of two distributions"
        )
        fix = (
            f"leave temperature= out of {(maker if stated else node).name!r}, or"
            f" temperature={mine} in {maker.name!r}"
        )
        yield wire.fault("trained_at", problem, fix)
        return


def _pairs(
    samplers: Samplers, port: Port[Any], trained: BySample
) -> Iterator[tuple[Node, float, float]]:
    """(node, its temperature, that of training) for each sample whose log-probs `logprobs` made."""
    begin = 0
    for maker in makers(port):
        rows = maker.inputs.get("rows")
        width = len(samplers.of(rows)) if rows is not None else 0
        if rows is None or not width:
            return  # of rows that nobody can compare
        if maker.operator.log_probs and "temperature" in maker.params:
            own = temperature_of(maker.params["temperature"])
            at = samplers.temperatures(rows) if own is None else (own,) * width
            mine = trained[begin : begin + width]
            yield from ((maker, a, m) for a, m in zip(at or (), mine, strict=False))
        begin += width


def _trained(samplers: Samplers, node: Node, loss: Loss, row_set: str) -> BySample | None:
    """The temperature of training these rows; None if there is none or no number (other rules
    report it). A stated one is of the node's own rows.
    """
    rows, stated = node.inputs[row_set], node.params.get("temperature")
    own = stated is not None and row_set == ROWS
    if not own and not loss.on(row_set).supervised:
        return samplers.temperatures(rows)
    one = temperature_of(stated) if own else 1.0
    return None if one is None else (one,) * len(samplers.of(rows))
