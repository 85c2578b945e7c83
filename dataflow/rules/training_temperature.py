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


Temperatures = tuple[float, ...]
"""One for each sample of a prompt."""


def check_training_temperature(context: Context) -> Iterator[Fault]:
    """Ratios of two temperatures, and references at another temperature than training that is not
    stated.
    """
    samplers = context.samplers
    for node in context.graph.nodes:
        loss = node.params.get("loss")
        if node.operator.work != "train" or not isinstance(loss, Loss) or ROWS not in node.inputs:
            continue
        trained_at = {name: _find_trained(samplers, node, loss, name) for name in row_sets(node)}
        for term in loss.terms:
            if (temperatures := trained_at.get(term.on)) is not None:
                yield from _check_recorded(samplers, node, term, temperatures)
        for wire in context.wires[id(node)]:
            if (temperatures := trained_at.get(wire.row_set)) is not None:
                yield from _check_computed(samplers, node, wire, temperatures)


def _check_recorded(
    samplers: Samplers, node: Node, term: LossTerm, temperatures: Temperatures
) -> Iterator[Fault]:
    """A loss that compares with the sampler's log-probs. temperatures: those of training."""
    if not term.reads_recorded(node.inputs):
        return
    rows = node.inputs[term.on]
    for makers_of_sample, trained in zip(samplers.of(rows), temperatures, strict=False):
        for maker in makers_of_sample:
            recorded = temperature_of(maker.params.get("temperature"))
            if recorded is None or recorded == trained:
                continue
            problem = (
                f"compares with the log-probs of {maker.name!r} ({line_of(maker, node.origin)}),"
                f" recorded at temperature={recorded}, and {node.name} is at {trained}: their ratio"
                " is of two distributions"
            )
            fix = f"leave temperature= out of {node.name!r}"
            if samplers.all_at(rows, recorded):
                fix += f", or temperature={recorded}"
            where, origin = term.function.name, node.origin
            yield Fault(rule="trained_at", where=where, problem=problem, fix=fix, origin=origin)
            return


def _check_computed(
    samplers: Samplers, node: Node, wire: Wire, temperatures: Temperatures
) -> Iterator[Fault]:
    """Log-probs computed at another temperature; a reference may have its own, if stated.
    temperatures: those of training.
    """
    if not issubclass(wire.input.schema, Logprobs):
        return
    for maker, computed, trained in _pair_temperatures(samplers, wire.port, temperatures):
        is_stated = maker.params["temperature"] is not None
        if computed == trained or (is_stated and wire.name not in _RATIOS):
            continue
        stating_node, whose = maker, ""
        if not is_stated:
            stating_node, whose = node, ", that of its rows,"
        problem = (
            f"{maker.name!r} ({line_of(maker, wire.origin)}) has log-probs at"
            f" temperature={computed}{whose} and {node.name} is at {trained}: they are of two"
            " distributions"
        )
        fix = (
            f"leave temperature= out of {stating_node.name!r}, or"
            f" temperature={trained} in {maker.name!r}"
        )
        yield wire.fault("trained_at", problem, fix)
        return


def _pair_temperatures(
    samplers: Samplers, port: Port[Any], temperatures: Temperatures
) -> Iterator[tuple[Node, float, float]]:
    """(node, its temperature, that of training) for each sample whose log-probs `logprobs` made."""
    begin = 0
    for maker in makers(port):
        rows = maker.inputs.get("rows")
        if rows is None or not samplers.of(rows):
            return  # of rows that nobody can compare
        width = len(samplers.of(rows))
        if maker.operator.log_probs and "temperature" in maker.params:
            stated = temperature_of(maker.params["temperature"])
            if stated is None:
                computed_at = samplers.temperatures(rows) or ()
            else:
                computed_at = (stated,) * width
            trained_at = temperatures[begin : begin + width]
            for computed, trained in zip(computed_at, trained_at, strict=False):
                yield maker, computed, trained
        begin += width


def _find_trained(samplers: Samplers, node: Node, loss: Loss, row_set: str) -> Temperatures | None:
    """The temperature of training these rows; None if there is none or no number (other rules
    report it). A stated one is of the node's own rows.
    """
    rows, stated = node.inputs[row_set], node.params.get("temperature")
    temperature: float | None = 1.0  # that of imitation
    if stated is not None and row_set == ROWS:
        temperature = temperature_of(stated)
    elif not loss.on(row_set).supervised:
        return samplers.temperatures(rows)
    return None if temperature is None else (temperature,) * len(samplers.of(rows))
