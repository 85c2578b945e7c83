"""Parameters: types and ranges, schedules where they are allowed, aggregates that fit the loss.

Owns: applying the limits that operators and losses declare. Does not own: the limits
(dataflow/limits.py and the declarations), unknown names (refused at the call).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dataflow.errors import Fault, Origin
from dataflow.limits import Limit, number
from dataflow.loss_terms import LossTerm
from dataflow.model import Schedule
from dataflow.node import Node
from dataflow.rules.context import Context, loss_terms

_WEIGHT = number(like=1.0)


def check_parameter_values(context: Context) -> Iterator[Fault]:
    """Values outside their limits, misplaced schedules, aggregates that a loss lacks."""
    for node in context.graph.nodes:
        operator = node.operator
        for name, argument in node.params.items():
            limit = operator.limits.get(name)
            schedulable = name in operator.schedulable
            for problem, fix in _check_argument(name, argument, limit, schedulable=schedulable):
                yield _fault(operator.name, problem, fix, node.origin)
        for term in loss_terms(node):
            yield from _check_term(term, node)


def _fault(where: str, problem: str, fix: str, origin: Origin | None) -> Fault:
    return Fault(rule="parameters", where=where, problem=problem, fix=fix, origin=origin)


def _check_argument(
    name: str, argument: Any, limit: Limit | None, *, schedulable: bool
) -> Iterator[tuple[str, str]]:
    """What is wrong with an argument, and the fix."""
    fix = f"a plain {name}="
    if limit is not None and (suggestion := limit.suggestion(argument)) is not None:
        fix = f"{name}={suggestion!r}"
    if _has_schedule(argument) and not schedulable:
        yield f"{name} takes no schedule of the Step, found {_write(argument)}", fix
    elif limit is not None and not limit.accepts(argument):
        expected = limit.describe(argument)
        yield f"expected {name} to be {expected}, found {_write(argument)}", fix


def _has_schedule(argument: Any) -> bool:
    """Whether it is a schedule, or a pair with one."""
    if isinstance(argument, tuple):
        return any(isinstance(part, Schedule) for part in argument)
    return isinstance(argument, Schedule)


def _write(argument: Any) -> str:
    """An argument as messages write it."""
    if not isinstance(argument, Schedule):
        return f"{argument!r:.60}"
    return f"{argument.kind}({argument.start}, {argument.stop}, {argument.steps})"


def _check_term(term: LossTerm, node: Node) -> Iterator[Fault]:
    function, origin = term.function, term.origin or node.origin
    for problem, fix in _check_argument("weight", term.weight, _WEIGHT, schedulable=True):
        yield _fault(function.name, problem, fix, origin)
    limits = dict(function.limits)
    for name, argument in term.params:
        limit, schedulable = limits.get(name), function.takes_number(name)
        for problem, fix in _check_argument(name, argument, limit, schedulable=schedulable):
            yield _fault(function.name, problem, fix, origin)
    scope, aggregate = function.scope, node.params.get("aggregate")
    if scope == "token":
        return  # a number for each token can be averaged in every way
    possible = ("token_mean", "sequence_mean") if scope == "sequence" else ("token_mean",)
    if aggregate not in possible:
        problem = (
            f"a loss of scope {scope!r} is only ever averaged over its {scope}s, found"
            f" aggregate={aggregate!r} (train)"
        )
        yield _fault(function.name, problem, "leave aggregate= out", origin)
