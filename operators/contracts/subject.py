"""Subjects: the operator or the loss that a function of Ports makes.

Owns: calling it with stand-ins for its ports, and reading what it makes of them. Does not own: what
it promises (operators.py, losses.py), rows (generate.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
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


SettleParams = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
"""What the target makes of these values of free parameters; None if it refuses them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSubject:
    """An operator on columns. free: parameters whose values may be any within the limit."""

    name: str
    operator: Operator
    inputs: tuple[InputPort, ...]
    output_schema: type[Schema]
    params: Mapping[str, Any]
    free: Mapping[str, Limit]
    settle: SettleParams


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSubject:
    """A loss of one term or several; inputs by `label.port`, free parameters by `label.name`."""

    name: str
    loss: Loss
    inputs: tuple[InputPort, ...]
    free: Mapping[str, Limit]
    settle: SettleParams

    @property
    def scopes(self) -> set[str]:
        """Those of its terms."""
        return {term.function.scope for term in self.loss.terms}

    @property
    def scalar(self) -> bool:
        """Whether it needs a Model with head="scalar"."""
        return any(term.function.head == "scalar" for term in self.loss.terms)


Subject = OperatorSubject | LossSubject


def make_subject(
    target: Callable[..., Any], parameters: Mapping[str, Any], ports: Mapping[str, type[Schema]]
) -> Subject:
    """Make the subject by calling the target with stand-ins. Raises ContractError, GraphError."""
    name = name_target(target)
    known_ports, defaults = _read_signature(name, target)
    _require_known(name, known_ports, defaults, parameters, ports)
    returned = _call_target(target, known_ports, ports, parameters)

    def settle(drawn: Mapping[str, Any]) -> Mapping[str, Any] | None:
        # Drawn by `label.name` for a loss; its function takes the name alone.
        drawn_by_name = {label.rpartition(".")[2]: drawn[label] for label in drawn}
        try:
            called = _call_target(target, known_ports, ports, {**parameters, **drawn_by_name})
            params = _list_params(called)
        except GraphError:
            return None
        return {label: params[label] for label in drawn}

    open_names = set(defaults) - set(parameters)
    if isinstance(returned, Loss):
        return _make_loss_subject(name, returned, open_names, settle)
    if isinstance(returned, Port):
        return _make_operator_subject(name, returned.node, open_names, settle)
    problem = f"expected what it returns to be a Port or a Loss, found {returned!r:.60}"
    raise _refusal(name, problem, "")


def _list_params(returned: Port[Any] | Loss) -> dict[str, Any]:
    """The parameters of a node by name, of a loss's terms by `label.name`."""
    if isinstance(returned, Port):
        return returned.node.params
    params: dict[str, Any] = {}
    for term in returned.bound()[0].terms:
        for name, setting in _settle_dialect(term).params:
            params[f"{term.label}.{name}"] = setting
    return params


def _require_known(
    name: str,
    known_ports: Mapping[str, _PortParameter],
    defaults: Mapping[str, Any],
    parameters: Mapping[str, Any],
    ports: Mapping[str, type[Schema]],
) -> None:
    """Raise ContractError for names that the target does not have, and values that it lacks."""
    for port in ports:
        if port not in known_ports:
            fix = nearest(port, known_ports) or ", ".join(known_ports)
            raise _refusal(name, f"no port {port!r}", fix)
    for parameter in parameters:
        if parameter not in defaults:
            names = ", ".join(defaults) or "(it has none)"
            fix = nearest(parameter, defaults) or f"one of: {names}"
            raise _refusal(name, f"no parameter {parameter!r}", fix)
    for parameter, default in defaults.items():
        if default is inspect.Parameter.empty and parameter not in parameters:
            problem = f"expected a value for {parameter!r}, which has no default, found none"
            fix = f"contract({name}, {parameter}=...), or --set {parameter}=..."
            raise _refusal(name, problem, fix)


def _call_target(
    target: Callable[..., Any],
    known_ports: Mapping[str, _PortParameter],
    ports: Mapping[str, type[Schema]],
    parameters: Mapping[str, Any],
) -> Any:
    """Call the target with stand-ins for all of its ports; if it refuses the optional ones, for
    those that it needs.
    """

    def call_with(port_parameters: Mapping[str, _PortParameter]) -> Any:
        by_position: list[Port[Any]] = []
        by_name: dict[str, Port[Any]] = {}
        for name, port_parameter in port_parameters.items():
            port = stand_in(name, ports.get(name, port_parameter.schema))
            if port_parameter.many:
                by_position += [port, stand_in(f"{name}_2", port.schema)]
            else:
                by_name[name] = port
        return target(*by_position, **(by_name | dict(parameters)))

    needed_ports: dict[str, _PortParameter] = {}
    for name, port_parameter in known_ports.items():
        if not port_parameter.optional or name in ports:
            needed_ports[name] = port_parameter
    try:
        return call_with(known_ports)
    except GraphError:
        if len(needed_ports) == len(known_ports):
            raise
    return call_with(needed_ports)


def name_target(target: Any) -> str:
    """The name of a target: that of its declaration, else its function's."""
    if isinstance(target, OperatorDeclaration):
        return target.operator.name
    if isinstance(target, LossDeclaration):
        return target.function.name
    if not inspect.isfunction(target):
        described = f"{type(target).__name__} {target!r:.60}"
        raise _refusal("contract", f"expected an operator or a loss, found {described}", "")
    return target.__name__


def _read_signature(name: str, target: Any) -> tuple[dict[str, _PortParameter], dict[str, Any]]:
    """The ports, and the parameters with their defaults."""
    if isinstance(target, OperatorDeclaration):
        function = target.operator.function
        assert function is not None
        defaults = _keyword_defaults(inspect.signature(function))
        return _port_parameters(target.operator.inputs), defaults
    if isinstance(target, LossDeclaration):
        defaults = _keyword_defaults(inspect.signature(target.fn))
        return _port_parameters(target.function.ports), defaults
    try:
        signature = inspect.signature(target, eval_str=True)
    except NameError as error:
        problem = f"its annotations name {error.name!r}, which is not found"
        raise _refusal(name, problem, f"import {error.name} in its file") from None
    ports: dict[str, _PortParameter] = {}
    for parameter in signature.parameters.values():
        schema = _port_schema(parameter.annotation)
        optional = parameter.default is None
        if schema is not None and not (optional and parameter.name == _ROWS):
            many = parameter.kind is parameter.VAR_POSITIONAL
            ports[parameter.name] = _PortParameter(schema, optional=optional, many=many)
    if not ports and signature.return_annotation is not Loss:
        problem = "expected an operator or a loss, found a function without Ports"
        raise _refusal(name, problem, "")
    _refuse_states(name, signature, ports)
    defaults = _keyword_defaults(signature)
    for port in (*ports, _ROWS):
        defaults.pop(port, None)
    return ports, defaults


def _port_parameters(inputs: Sequence[Input]) -> dict[str, _PortParameter]:
    return {port.name: _PortParameter(port.schema) for port in inputs}


def _refuse_states(name: str, signature: inspect.Signature, ports: Collection[str]) -> None:
    for parameter in signature.parameters.values():
        if _is_state(parameter) and parameter.name not in ports:
            problem = (
                f"expected an operator on columns, found one that needs {parameter.name!r}, no Port"
            )
            raise _refusal(name, problem, "")


def _is_state(parameter: inspect.Parameter) -> bool:
    """Whether it is given by position and must be: a Port, a Model, a function."""
    is_needed = parameter.default is parameter.empty
    return is_needed and parameter.kind is parameter.POSITIONAL_OR_KEYWORD


def _keyword_defaults(signature: inspect.Signature) -> dict[str, Any]:
    keyword_only = (p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY)
    return {parameter.name: parameter.default for parameter in keyword_only}


def _port_schema(annotation: Any) -> type[Schema] | None:
    """The schema of `Port[S]` or `Port[S] | None`; S may be a type variable with a bound."""
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is Port:
            (schema,) = get_args(kind)
            if isinstance(schema, TypeVar):
                schema = schema.__bound__
            if isinstance(schema, type) and issubclass(schema, Schema):
                return schema
            return Schema
    return None


def stand_in(name: str, schema: type[Schema]) -> Port[Any]:
    """Make a Port that carries this schema."""
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


def _make_operator_subject(
    name: str, node: Node, open_names: set[str], settle: SettleParams
) -> OperatorSubject:
    operator = node.operator
    if operator.function is None:
        problem = (
            f"expected an operator on columns, found one with a kernel of its own ({operator.work})"
        )
        raise _refusal(name, problem, "")
    _require_stand_ins(name, node.inputs)
    inputs: list[InputPort] = []
    for key, port in node.inputs.items():
        inputs.append(InputPort(name=key, input=operator.input(key), schema=port.schema))
    free = {p: limit for p, limit in operator.limits.items() if p in open_names}
    params: dict[str, Any] = {}
    for param, setting in node.params.items():
        params[param] = _settle_choice(setting, operator.limits.get(param))
    return OperatorSubject(
        name=name,
        operator=operator,
        inputs=tuple(inputs),
        output_schema=node.schemas[0],
        params=params,
        free=free,
        settle=settle,
    )


def _make_loss_subject(
    name: str, returned: Loss, open_names: set[str], settle: SettleParams
) -> LossSubject:
    bound, ports = returned.bound()
    loss = Loss(tuple(_settle_dialect(term) for term in bound.terms))
    _require_stand_ins(name, ports)
    inputs: list[InputPort] = []
    free: dict[str, Limit] = {}
    for term in loss.terms:
        declared = {port.name: port for port in term.function.ports}
        for key, port in ports.items():
            label, _, short = key.rpartition(".")
            if label == term.label:
                inputs.append(InputPort(name=key, input=declared[short], schema=port.schema))
        for param, limit in dict(term.function.limits).items():
            if param in open_names:
                free[f"{term.label}.{param}"] = limit
    return LossSubject(name=name, loss=loss, inputs=tuple(inputs), free=free, settle=settle)


def _settle_dialect(term: LossTerm) -> LossTerm:
    """The term with a dialect."""
    limits = dict(term.function.limits)
    params = ((name, _settle_choice(setting, limits.get(name))) for name, setting in term.params)
    return replace(term, params=tuple(params))


def _settle_choice(setting: Any, limit: Limit | None) -> Any:
    """The first choice for a setting that is left open; a dialect that nothing names is such."""
    if setting is not None or limit is None:
        return setting
    if limit.kind == "choice" and not limit.optional:
        return limit.choices[0]
    return setting


def _require_stand_ins(name: str, inputs: Mapping[str, Port[Any]]) -> None:
    for key, port in inputs.items():
        if port.node.operator.name != "rows":
            problem = (
                f"expected one operator on the ports that it is given, found {key!r} made by"
                f" {port.node.operator.name!r}"
            )
            raise _refusal(name, problem, "a contract for each operator")


def _refusal(name: str, problem: str, fix: str) -> ContractError:
    fix = fix or "an operator on columns (@operator), or a loss (@loss)"
    return ContractError(f"{name}: {problem}. Fix: {fix}.")
