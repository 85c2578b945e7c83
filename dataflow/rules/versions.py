"""Versions: every reader of a trained Model has a lag bound, and reads the intended version.

Owns: lags, the derived staleness bound, intakes that must agree, recomputed log-probs. Does not
own: the range of max_lag (parameters.py), who writes (state.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from dataflow.errors import Fault
from dataflow.loss_terms import row_sets
from dataflow.node import Node, Port
from dataflow.regions import leaders, moved_by
from dataflow.rows import makers, physical_port
from dataflow.rules.context import (
    Context,
    Wire,
    fault_at,
    line_of,
    list_read_models,
    node_models,
)
from dataflow.schema import Logprobs

_RECOMPUTED = ("old", "proximal")
"""Ports of losses that stand for the trained Model as it was before the Step."""


def check_read_versions(context: Context) -> Iterator[Fault]:
    """Readers without a lag, recomputed log-probs of another Model or other rows, intakes that
    differ, an evaluation of a Model that made no rows.
    """
    for node in context.graph.nodes:
        yield from _check_bound(context, node)
        if node.operator.work == "train":
            yield from _check_recomputed(context, node)
    yield from _check_evaluations(context)
    yield from _check_intakes(context)


def lags(context: Context) -> dict[str, int]:
    """For each node that reads a trained Model: how many versions old it may be; in an evaluation,
    0.
    """
    lag_by_node: dict[str, int] = {}
    for node in context.graph.nodes:
        if not _reads_trained(context, node):
            continue
        lag_by_node[node.name] = 0
        if context.regions.of[node.name] != "evaluation":
            lag_by_node[node.name] = node.params.get("max_lag", 0)
    return lag_by_node


def staleness(context: Context) -> dict[str, int]:
    """For each train node: the greatest lag of its readers upstream, by which its rows may wait."""
    lag_by_node = lags(context)
    greatest: dict[int, int] = {}
    stale: dict[str, int] = {}
    # A node's parents stand before it in the graph, so that their lags are known.
    for node in context.graph.nodes:
        above = max((greatest[id(parent)] for parent in node.parents), default=0)
        greatest[id(node)] = max(above, lag_by_node.get(node.name, 0))
        if node.operator.work == "train":
            stale[node.name] = greatest[id(node)]
    return stale


def row_lags(context: Context) -> dict[tuple[str, str], int]:
    """For each train node and set of its rows: how many versions old the weights that wrote them
    may be. What a follower that moves every k Steps writes is up to k - 1 older than its lag says.
    """
    lag_by_node, stale = lags(context), staleness(context)
    lag_by_rows: dict[tuple[str, str], int] = {}
    for node in context.graph.nodes:
        for name, rows in row_sets(node).items():
            ages = [stale[node.name]]
            for maker in chain.from_iterable(context.samplers.of(rows)):
                ages.append(lag_by_node.get(maker.name, 0) + _count_resting_steps(maker))
            lag_by_rows[node.name, name] = max(ages)
    return lag_by_rows


def bounds(context: Context) -> dict[str, int]:
    """For each train node: the greatest lag of any row that it trains."""
    bound_by_node = staleness(context)
    for (name, _), lag in row_lags(context).items():
        bound_by_node[name] = max(bound_by_node[name], lag)
    return bound_by_node


def _count_resting_steps(maker: Node) -> int:
    """How many Steps the Models that a node reads stay as they are, behind those that they
    follow.
    """
    steps = 0
    for model in list_read_models(maker):
        for follower in (model, *moved_by(model)):
            if follower.follows is not None and follower.copies is None:
                steps += follower.every - 1
    return steps


def _reads_trained(context: Context, node: Node) -> bool:
    return any(model.name in context.trained for model in list_read_models(node))


def _check_bound(context: Context, node: Node) -> Iterator[Fault]:
    if node.operator.work not in ("decode", "forward") or "max_lag" in node.params:
        return
    if _reads_trained(context, node):
        problem = "expected a parameter max_lag, since it reads a Model that is trained, found none"
        fix = f"a parameter max_lag: int = 0 of {node.operator.name}"
        yield fault_at(node, "versions", problem, fix)


def _check_recomputed(context: Context, node: Node) -> Iterator[Fault]:
    for wire in context.wires[id(node)]:
        if wire.name not in _RECOMPUTED:
            continue
        for maker in makers(wire.port):
            if node_models(maker):
                yield from _check_maker(context, wire, maker)


def _check_maker(context: Context, wire: Wire, maker: Node) -> Iterator[Fault]:
    """maker: what computed the log-probs or values of this wire."""
    trained = _names_of_models(wire.node)
    model = _names_of_models(maker)[0]
    fault = None
    if issubclass(wire.port.schema, Logprobs):
        fault = _find_ratio_fault(wire, maker, model, trained)
    elif wire.fits:
        fault = _find_values_fault(wire, maker, trained[0])
    if fault is not None:
        yield fault
    elif maker.operator.work == "forward":
        trained_rows, read_rows = wire.node.inputs[wire.row_set], maker.inputs["rows"]
        if _have_same_tokens(context, read_rows, trained_rows):
            return
        trains, reads = physical_port(trained_rows).label, physical_port(read_rows).label
        problem = (
            f"{maker.name!r} ({line_of(maker, wire.origin)}) reads the tokens of {reads!r}, and"
            f" those of {trains!r} are trained"
        )
        yield wire.fault("versions", problem, f"{maker.operator.name}({model}, {trains})")


def _names_of_models(node: Node) -> list[str]:
    return [model.name for model in node_models(node)]


def _find_ratio_fault(wire: Wire, maker: Node, model: str, trained: list[str]) -> Fault | None:
    """A ratio with another Model or version than the trained one."""
    if model not in trained:
        problem = (
            f"expected log-probs of {trained[0]!r}, the Model trained here, found those of"
            f" {model!r}"
        )
        fix = f'{wire.name}=logprobs({trained[0]}, rollout, name="{wire.name}")'
        return wire.fault("versions", problem, fix)
    max_lag = maker.params.get("max_lag")
    if max_lag:
        problem = (
            f"{maker.name!r} may be {max_lag} versions old"
            f" ({line_of(maker, wire.origin)}), and a ratio needs the version that the Step starts"
            " from"
        )
        return wire.fault("versions", problem, f"max_lag=0 in {maker.name!r}")
    return None


def _find_values_fault(wire: Wire, maker: Node, trained: str) -> Fault | None:
    """Values of another critic; one may be kept close to those of a slow copy of itself."""
    model = node_models(maker)[0]
    if trained in {each.name for each in (model, *leaders(model))}:
        return None
    problem = (
        f"expected values of {trained!r}, the Model trained here, or of one that follows it, found"
        f" those of {model.name!r}"
    )
    return wire.fault("versions", problem, f"{wire.name}=values({trained}, rollout)")


def _have_same_tokens(context: Context, port: Port[Any], other: Port[Any]) -> bool:
    """Whether two ports have the same token rows; if their rows differ, lineage.py reports it."""
    if physical_port(port) == physical_port(other):
        return True
    domain, other_domain = context.domains.of(port), context.domains.of(other)
    if domain is None or other_domain is None:
        return True
    return domain.rows_before_selection is not other_domain.rows_before_selection


def _check_evaluations(context: Context) -> Iterator[Fault]:
    """An evaluation of a Model that made none of the scored rows. One bit per Model, passed down
    from node to node.
    """
    bits = {model.name: 1 << i for i, model in enumerate(context.models)}
    masks: dict[int, int] = {}
    for node in context.graph.nodes:
        above = 0
        for parent in node.parents:
            above |= masks[id(parent)]
        names = _names_of_models(node)
        if node.operator.work == "evaluate" and names and not above & bits[names[0]]:
            label = next(iter(node.inputs.values())).label
            problem = f"expected rows made by {names[0]!r} above {label!r}, found none that read it"
            fix = f"evaluate the Model that made them, or generate({names[0]}, prompts(test))"
            yield fault_at(node, "versions", problem, fix)
        masks[id(node)] = above
        for name in names:
            masks[id(node)] |= bits[name]


def _check_intakes(context: Context) -> Iterator[Fault]:
    """Train nodes that share rows share one intake (L6)."""
    for source in context.sources:
        trains = [sink for sink in context.fed[id(source)] if sink.operator.work == "train"]
        if not trains:
            continue
        first = trains[0]
        first_intake = first.params.get("intake")
        for node in trains[1:]:
            intake = node.params.get("intake")
            if intake != first_intake:
                problem = (
                    f"intake={intake!r}, and {first.name} ({line_of(first, node.origin)}) has"
                    f" intake={first_intake!r} on the rows of the same source {source.name!r}"
                )
                yield fault_at(node, "versions", problem, f"intake={first_intake!r} in both")
