"""Parameters: types and ranges, schedules where they are allowed, aggregates that fit the loss.

Owns: applying the limits that operators and losses declare. Does not own: the limits
(dataflow/limits.py and the declarations), unknown names (refused at the call).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dataflow.errors import Fault, Origin
from dataflow.limits import Limit, number
from dataflow.loss import Loss, LossTerm
from dataflow.model import Schedule
from dataflow.node import Node
from dataflow.rules.context import Context

_WEIGHT = number(like=1.0)


def check(context: Context) -> Iterator[Fault]:
    """Values outside their limits, misplaced schedules, aggregates that a loss lacks."""
    for node in context.graph.nodes:
        operator = node.operator
        for name, value in node.params.items():
            limit = operator.limits.get(name)
            yield from _value(
                operator.name, name, value, limit, name in operator.schedulable, node.origin
            )
        loss = node.params.get("loss")
        for term in loss.terms if isinstance(loss, Loss) else ():
            yield from _term(term, node)


def _value(
    where: str, name: str, value: Any, limit: Limit | None, schedulable: bool, origin: Origin | None
) -> Iterator[Fault]:
    like = limit.suggestion(value) if limit else None
    fix = f"{name}={like!r}" if like is not None else f"a plain {name}="
    if _scheduled(value) and not schedulable:
        problem = f"{name} takes no schedule of the Step, found {_shown(value)}"
        yield Fault(rule="parameters", where=where, problem=problem, fix=fix, origin=origin)
    elif limit is not None and not limit.accepts(value):
        problem = f"expected {name} to be {limit.expected(value)}, found {_shown(value)}"
        yield Fault(rule="parameters", where=where, problem=problem, fix=fix, origin=origin)


def _scheduled(value: Any) -> bool:
    return isinstance(value, Schedule) or (
        isinstance(value, tuple) and any(isinstance(v, Schedule) for v in value)
    )


def _shown(value: Any) -> str:
    if not isinstance(value, Schedule):
        return f"{value!r:.60}"
    return f"{value.kind}({value.start}, {value.stop}, {value.steps})"


def _term(term: LossTerm, node: Node) -> Iterator[Fault]:
    function, origin = term.function, term.origin or node.origin
    limits = dict(function.limits)
    yield from _value(function.name, "weight", term.weight, _WEIGHT, True, origin)
    for name, value in term.params:
        yield from _value(
            function.name, name, value, limits.get(name), function.takes_number(name), origin
        )
    aggregate = node.params.get("aggregate")
    own = "sequence_mean" if function.scope == "sequence" else "token_mean"
    if function.scope != "token" and aggregate not in ("token_mean", own):
        problem = (
            f"a loss of scope {function.scope!r} is only ever averaged over its {function.scope}s,"
            " found "
        )
        problem += f"aggregate={aggregate!r} (train)"
        yield Fault(
            rule="parameters",
            where=function.name,
            problem=problem,
            fix="leave aggregate= out",
            origin=origin,
        )
