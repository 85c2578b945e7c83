"""Subjects: the operator or the loss that a function of Ports makes.

Owns: calling it with stand-ins for its ports, and reading what it makes of them. Does not own: what
it promises (operators.py, losses.py), rows (generate.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args, get_origin

from dataflow.errors import GraphError, nearest
from dataflow.limits import Limit
from dataflow.loss import Loss, LossDeclaration, LossTerm
from dataflow.node import Node, Port
from dataflow.operator import Fresh, Input, Operator
from dataflow.schema import Schema
from dataflow.testing import ContractError
from dataflow.top_logprobs import TopLogprobs
from dataflow.user import OperatorDeclaration

_TOP = 3
"""Tokens of a TopLogprobs of which any number will do."""


_ROWS = "rows"
"""A loss's optional rows of its own: which rows they are is nothing to its formula."""


@dataclass(frozen=True, slots=True)
class _PortParameter:
    """A parameter that takes a Port, or any number of them."""

    schema: type[Schema]
    optional: bool = False
    many: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPort:
    """An input: its declaration, and the schema of what it gets."""

    name: str
    input: Input
    schema: type[Schema]


Settled = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
"""What the target makes of these values of free parameters; None if it refuses them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSubject:
    """An operator on columns. free: parameters whose values may be any within the limit."""

    name: str
    operator: Operator
    inputs: tuple[InputPort, ...]
    made: type[Schema]
    params: Mapping[str, Any]
    free: Mapping[str, Limit]
    settled: Settled


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSubject:
    """A loss of one term or several; inputs by `label.port`, free parameters by `label.name`."""

    name: str
    loss: Loss
    inputs: tuple[InputPort, ...]
    free: Mapping[str, Limit]
    settled: Settled

    @property
    def scopes(self) -> set[str]:
        """Those of its terms."""
        return {term.function.scope for term in self.loss.terms}

    @property
    def scalar(self) -> bool:
        """Whether it needs a Model with head="scalar"."""
        return any(term.function.head == "scalar" for term in self.loss.terms)


Subject = OperatorSubject | LossSubject


def subject_of(
    target: Callable[..., Any], parameters: Mapping[str, Any], ports: Mapping[str, type[Schema]]
) -> Subject:
    """Call the target with stand-ins. Raises ContractError, GraphError."""
    name = named(target)
    known, free = _signature(name, target)
    _require_known(name, known, free, parameters, ports)
    made = _called(target, known, ports, parameters)

    def settled(drawn: Mapping[str, Any]) -> Mapping[str, Any] | None:
        own = {label.rpartition(".")[2]: value for label, value in drawn.items()}
        try:
            found = _params(_called(target, known, ports, {**parameters, **own}))
        except GraphError:
            return None
        return {label: found[label] for label in drawn}

    if isinstance(made, Loss):
        return _loss(name, made, set(free) - set(parameters), settled)
    if isinstance(made, Port):
        return _operator(name, made.node, set(free) - set(parameters), settled)
    raise _refused(name, f"expected what it returns to be a Port or a Loss, found {made!r:.60}", "")


def _params(made: Port[Any] | Loss) -> dict[str, Any]:
    """The parameters of a node by name, of a loss's terms by `label.name`."""
    if isinstance(made, Port):
        return made.node.params
    terms = [_spoken(term) for term in made.bound()[0].terms]
    return {f"{term.label}.{name}": value for term in terms for name, value in term.params}


def _require_known(
    name: str,
    known: Mapping[str, _PortParameter],
    free: Mapping[str, Any],
    parameters: Mapping[str, Any],
    ports: Mapping[str, type[Schema]],
) -> None:
    """Raises ContractError for names that the target does not have, and values that it lacks."""
    for port in ports:
        if port not in known:
            raise _refused(name, f"no port {port!r}", nearest(port, known) or ", ".join(known))
    for parameter in parameters:
        if parameter not in free:
            fix = nearest(parameter, free) or f"one of: {', '.join(free) or '(it has none)'}"
            raise _refused(name, f"no parameter {parameter!r}", fix)
    needed = [p for p, default in free.items() if default is inspect.Parameter.empty]
    for parameter in needed:
        if parameter not in parameters:
            problem = f"expected a value for {parameter!r}, which has no default, found none"
            fix = f"contract({name}, {parameter}=...), or --set {parameter}=..."
            raise _refused(name, problem, fix)


def _called(
    target: Callable[..., Any],
    known: Mapping[str, _PortParameter],
    ports: Mapping[str, type[Schema]],
    parameters: Mapping[str, Any],
) -> Any:
    """What the target makes of stand-ins for all of its ports; if it refuses the optional ones, for
    those that it needs.
    """

    def call(wanted: Mapping[str, _PortParameter]) -> Any:
        flat, given = [], dict[str, Any]()
        for name, port in wanted.items():
            made = stand_in(name, ports.get(name, port.schema))
            if port.many:
                flat += [made, stand_in(f"{name}_2", made.schema)]
            else:
                given[name] = made
        return target(*flat, **given, **parameters)

    needed = {name: port for name, port in known.items() if not port.optional or name in ports}
    try:
        return call(known)
    except GraphError:
        if len(needed) == len(known):
            raise
    return call(needed)


def named(target: Any) -> str:
    """What a target is called."""
    if isinstance(target, OperatorDeclaration):
        return target.operator.name
    if isinstance(target, LossDeclaration):
        return target.function.name
    if not inspect.isfunction(target):
        found = f"{type(target).__name__} {target!r:.60}"
        raise _refused("contract", f"expected an operator or a loss, found {found}", "")
    return target.__name__


def _signature(name: str, target: Any) -> tuple[dict[str, _PortParameter], dict[str, Any]]:
    """The ports, and the parameters with their defaults."""
    if isinstance(target, OperatorDeclaration):
        inputs = target.operator.inputs
        return {i.name: _PortParameter(i.schema) for i in inputs}, _defaults(target.operator)
    if isinstance(target, LossDeclaration):
        inputs = target.function.ports
        params = _keywords(inspect.signature(target.fn))
        return {i.name: _PortParameter(i.schema) for i in inputs}, params
    try:
        signature = inspect.signature(target, eval_str=True)
    except NameError as error:
        problem = f"its annotations name {error.name!r}, which is not found"
        raise _refused(name, problem, f"import {error.name} in its file") from None
    ports = {}
    for parameter in signature.parameters.values():
        schema = _port_schema(parameter.annotation)
        optional = parameter.default is None
        if schema is not None and not (optional and parameter.name == _ROWS):
            many = parameter.kind is parameter.VAR_POSITIONAL
            ports[parameter.name] = _PortParameter(schema, optional=optional, many=many)
    if not ports and signature.return_annotation is not Loss:
        problem = "expected an operator or a loss, found a function without Ports"
        raise _refused(name, problem, "")
    other = [p.name for p in signature.parameters.values() if _is_state(p) and p.name not in ports]
    if other:
        problem = f"expected an operator on columns, found one that needs {other[0]!r}, no Port"
        raise _refused(name, problem, "")
    return ports, {p: d for p, d in _keywords(signature).items() if p not in (*ports, _ROWS)}


def _is_state(parameter: inspect.Parameter) -> bool:
    """Whether it is given by position and must be: a Port, a Model, a function."""
    needed = parameter.default is parameter.empty
    return needed and parameter.kind is parameter.POSITIONAL_OR_KEYWORD


def _defaults(operator: Operator) -> dict[str, Any]:
    assert operator.function is not None
    return _keywords(inspect.signature(operator.function))


def _keywords(signature: inspect.Signature) -> dict[str, Any]:
    kept = (p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY)
    return {p.name: p.default for p in kept}


def _port_schema(annotation: Any) -> type[Schema] | None:
    """The schema of `Port[S]` or `Port[S] | None`; S may be a type variable with a bound."""
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is Port:
            (found,) = get_args(kind)
            found = found.__bound__ if isinstance(found, TypeVar) else found
            return found if isinstance(found, type) and issubclass(found, Schema) else Schema
    return None


def stand_in(name: str, schema: type[Schema]) -> Port[Any]:
    """A Port that carries this schema."""
    if issubclass(schema, TopLogprobs) and not schema.k:
        schema = TopLogprobs.of(_TOP)
    rows = Operator(
        path="operators.contracts.subject:rows",
        name="rows",
        work="source",
        rows=Fresh(),
        outputs=(schema,),
    )
    return Node(rows, name).port()


def _operator(name: str, node: Node, open_names: set[str], settled: Settled) -> OperatorSubject:
    operator = node.operator
    if operator.function is None:
        problem = (
            f"expected an operator on columns, found one with a kernel of its own ({operator.work})"
        )
        raise _refused(name, problem, "")
    _require_stand_ins(name, node.inputs)
    inputs = tuple(
        InputPort(name=key, input=operator.input(key), schema=port.schema)
        for key, port in node.inputs.items()
    )
    free = {p: limit for p, limit in operator.limits.items() if p in open_names}
    params = {p: _resolved(value, operator.limits.get(p)) for p, value in node.params.items()}
    return OperatorSubject(
        name=name,
        operator=operator,
        inputs=inputs,
        made=node.schemas[0],
        params=params,
        free=free,
        settled=settled,
    )


def _loss(name: str, made: Loss, open_names: set[str], settled: Settled) -> LossSubject:
    loss, given = made.bound()
    loss = Loss(tuple(_spoken(term) for term in loss.terms))
    _require_stand_ins(name, given)
    inputs, free = [], {}
    for term in loss.terms:
        declared = {port.name: port for port in term.function.ports}
        for key, port in given.items():
            label, _, short = key.rpartition(".")
            if label == term.label:
                inputs.append(InputPort(name=key, input=declared[short], schema=port.schema))
        limits = dict(term.function.limits)
        free |= {f"{term.label}.{p}": limit for p, limit in limits.items() if p in open_names}
    return LossSubject(name=name, loss=loss, inputs=tuple(inputs), free=free, settled=settled)


def _spoken(term: LossTerm) -> LossTerm:
    """The term with a dialect."""
    limits = dict(term.function.limits)
    params = tuple((name, _resolved(value, limits.get(name))) for name, value in term.params)
    return replace(term, params=params)


def _resolved(value: Any, limit: Limit | None) -> Any:
    """A dialect that nothing names is the first."""
    unnamed = value is None and limit is not None and limit.kind == "choice" and not limit.optional
    return limit.choices[0] if unnamed and limit else value


def _require_stand_ins(name: str, inputs: Mapping[str, Port[Any]]) -> None:
    for key, port in inputs.items():
        if port.node.operator.name != "rows":
            problem = (
                f"expected one operator on the ports that it is given, found {key!r} made by"
                f" {port.node.operator.name!r}"
            )
            raise _refused(name, problem, "a contract for each operator")


def _refused(name: str, problem: str, fix: str) -> ContractError:
    like = "an operator on columns (@operator), or a loss (@loss)"
    return ContractError(f"{name}: {problem}. Fix: {fix or like}.")
