"""Versions: every reader of a trained Model has a lag bound, and reads the intended version.

Owns: lags, the derived staleness bound, intakes that must agree, recomputed log-probs. Does not
own: the range of max_lag (parameters.py), who writes (state.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dataflow.errors import Fault
from dataflow.loss_terms import row_sets
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.regions import leaders, moved_by
from dataflow.rows import makers, physical
from dataflow.rules.context import Context, Wire, fault_at, line_of
from dataflow.schema import Logprobs

_RECOMPUTED = ("old", "proximal")
"""Ports of losses that stand for the trained Model as it was before the Step."""


def check(context: Context) -> Iterator[Fault]:
    """Readers without a lag, recomputed log-probs of another Model or other rows, intakes that
    differ, an evaluation of a Model that made no rows.
    """
    for node in context.graph.nodes:
        yield from _bounded(context, node)
        if node.operator.work == "train":
            yield from _recomputed(context, node)
    yield from _evaluated(context)
    yield from _intakes(context)


def lags(context: Context) -> dict[str, int]:
    """For each node that reads a trained Model: how many versions old it may be; in an evaluation,
    0.
    """
    found = {}
    for node in context.graph.nodes:
        if _reads_trained(context, node):
            training = context.regions.of[node.name] != "evaluation"
            found[node.name] = node.params.get("max_lag", 0) if training else 0
    return found


def staleness(context: Context) -> dict[str, int]:
    """For each train node: the greatest lag of its readers upstream, by which its rows may wait."""
    lag = lags(context)
    worst: dict[int, int] = {}
    for node in context.graph.nodes:
        above = max((worst[id(p)] for p in node.parents), default=0)
        worst[id(node)] = max(above, lag.get(node.name, 0))
    return {n.name: worst[id(n)] for n in context.graph.nodes if n.operator.work == "train"}


def row_lags(context: Context) -> dict[tuple[str, str], int]:
    """For each train node and set of its rows: how many versions old the weights that wrote them
    may be. What a follower that moves every k Steps writes is up to k - 1 older than its lag says.
    """
    lag, stale = lags(context), staleness(context)
    found = {}
    for node in context.graph.nodes:
        for name, rows in row_sets(node).items():
            makers = {maker for makers in context.samplers.of(rows) for maker in makers}
            ages = [lag.get(maker.name, 0) + _rests(maker) for maker in makers]
            found[node.name, name] = max([stale[node.name], *ages])
    return found


def bounds(context: Context) -> dict[str, int]:
    """For each train node: the greatest lag of any row that it trains."""
    found = staleness(context)
    for (name, _), lag in row_lags(context).items():
        found[name] = max(found[name], lag)
    return found


def _rests(maker: Node) -> int:
    """How many Steps the Models that a node reads stay as they are, behind those that they
    follow.
    """
    return sum(
        each.every - 1
        for model in _read_models(maker)
        for each in (model, *moved_by(model))
        if each.follows is not None and each.copies is None
    )


def _read_models(node: Node) -> list[Model]:
    states = (node.states.get(param) for param in node.operator.reads)
    return [state for state in states if isinstance(state, Model)]


def _reads_trained(context: Context, node: Node) -> bool:
    return any(model.name in context.trained for model in _read_models(node))


def _bounded(context: Context, node: Node) -> Iterator[Fault]:
    if node.operator.work not in ("decode", "forward") or "max_lag" in node.params:
        return
    if _reads_trained(context, node):
        problem = "expected a parameter max_lag, since it reads a Model that is trained, found none"
        fix = f"a parameter max_lag: int = 0 of {node.operator.name}"
        yield fault_at(node, "versions", problem, fix)


def _recomputed(context: Context, node: Node) -> Iterator[Fault]:
    trained = _models(node)
    made = ((wire, maker) for wire in context.wires[id(node)] for maker in makers(wire.port))
    for wire, maker in made:
        models = _models(maker)
        if wire.name not in _RECOMPUTED or not models:
            continue
        fault = None
        if issubclass(wire.port.schema, Logprobs):
            fault = _ratio(wire, maker, models[0], trained)
        elif wire.fits:
            fault = _other_values(wire, maker, trained[0])
        if fault is not None:
            yield fault
        elif maker.operator.work == "forward" and not _same_tokens(
            context, maker.inputs["rows"], node.inputs[wire.row_set]
        ):
            trains = physical(node.inputs[wire.row_set]).label
            reads = physical(maker.inputs["rows"]).label
            problem = (
                f"{maker.name!r} ({line_of(maker, wire.origin)}) reads the tokens of {reads!r}, and"
                f" those of {trains!r} are trained"
            )
            fix = f"{maker.operator.name}({models[0]}, {trains})"
            yield wire.fault("versions", problem, fix)


def _models(node: Node) -> list[str]:
    return [s.name for s in node.states.values() if isinstance(s, Model)]


def _ratio(wire: Wire, maker: Node, model: str, trained: list[str]) -> Fault | None:
    """A ratio with another Model or version than the trained one."""
    if model not in trained:
        problem = (
            f"expected log-probs of {trained[0]!r}, the Model trained here, found those of"
            f" {model!r}"
        )
        fix = f'{wire.name}=logprobs({trained[0]}, rollout, name="{wire.name}")'
        return wire.fault("versions", problem, fix)
    if maker.params.get("max_lag"):
        problem = (
            f"{maker.name!r} may be {maker.params['max_lag']} versions old"
            f" ({line_of(maker, wire.origin)}), and a ratio needs the version that the Step starts"
            " from"
        )
        return wire.fault("versions", problem, f"max_lag=0 in {maker.name!r}")
    return None


def _other_values(wire: Wire, maker: Node, trained: str) -> Fault | None:
    """Values of another critic; one may be kept close to those of a slow copy of itself."""
    model = next(state for state in maker.states.values() if isinstance(state, Model))
    if trained in {each.name for each in (model, *leaders(model))}:
        return None
    problem = (
        f"expected values of {trained!r}, the Model trained here, or of one that follows it, found"
        f" those of {model.name!r}"
    )
    return wire.fault("versions", problem, f"{wire.name}=values({trained}, rollout)")


def _same_tokens(context: Context, a: Port[Any], b: Port[Any]) -> bool:
    """Whether two ports have the same token rows; if their rows differ, lineage.py reports it."""
    mine, theirs = context.domains.of(a), context.domains.of(b)
    one = mine is not None and theirs is not None and mine.unselected is theirs.unselected
    return physical(a) == physical(b) or not one


def _evaluated(context: Context) -> Iterator[Fault]:
    """An evaluation of a Model that made none of the scored rows. One bit per Model, passed down
    from node to node.
    """
    bits = {m.name: 1 << i for i, m in enumerate(context.models)}
    read: dict[int, int] = {}
    for node in context.graph.nodes:
        above = 0
        for parent in node.parents:
            above |= read[id(parent)]
        own = _models(node)
        if node.operator.work == "evaluate" and own and not above & bits[own[0]]:
            shown = next(iter(node.inputs.values())).label
            problem = f"expected rows made by {own[0]!r} above {shown!r}, found none that read it"
            fix = f"evaluate the Model that made them, or generate({own[0]}, prompts(test))"
            yield fault_at(node, "versions", problem, fix)
        read[id(node)] = sum(bits[name] for name in set(own)) | above


def _intakes(context: Context) -> Iterator[Fault]:
    """Train nodes that share rows share one intake (L6)."""
    for source in context.sources:
        trains = [s for s in context.fed[id(source)] if s.operator.work == "train"]
        for node in trains[1:]:
            first, mine, theirs = (
                trains[0],
                node.params.get("intake"),
                trains[0].params.get("intake"),
            )
            if mine != theirs:
                problem = (
                    f"intake={mine!r}, and {first.name} ({line_of(first, node.origin)}) has"
                    f" intake={theirs!r} "
                )
                problem += f"on the rows of the same source {source.name!r}"
                fix = f"intake={theirs!r} in both"
                yield fault_at(node, "versions", problem, fix)
