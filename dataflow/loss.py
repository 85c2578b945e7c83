"""Losses: what `train` minimises, as values of the language.

Owns: the declaration of a loss function and the decorator for a user's own. Does not own: what a
loss function sees and returns (loss_inputs.py), the algebra of weighted terms (loss_terms.py), any
formula (operators), the reduction of terms to a number (the train kernel).

A loss function sees packed tensors and returns unreduced terms. It never averages and never sees
padding; `train` reduces, with the denominator counted once over the whole update before the first
backward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    get_args,
    get_origin,
    overload,
)

import pyarrow as pa

from dataflow.calls import call_error, declares, refuse_unknown, require, signature_of
from dataflow.convention import Convention
from dataflow.importable_names import Declaration, declared_path
from dataflow.limits import Limit, choice, flag
from dataflow.loss_inputs import Now as Now
from dataflow.loss_inputs import Tensors as Tensors
from dataflow.loss_inputs import Terms as Terms
from dataflow.loss_terms import ROWS, make_loss
from dataflow.loss_terms import Loss as Loss
from dataflow.loss_terms import LossFunction as LossFunction
from dataflow.loss_terms import LossScope as LossScope
from dataflow.loss_terms import LossTerm as LossTerm
from dataflow.node import Port
from dataflow.operator import Input
from dataflow.schema import Completion, Schema

A = TypeVar("A", bound=Schema)
B = TypeVar("B", bound=Schema)
C = TypeVar("C", bound=Schema)
P = ParamSpec("P")
Q = ParamSpec("Q")


def loss_function(
    fn: Callable[..., Terms],
    *,
    path: str = "",
    name: str | None = None,
    scope: LossScope = "token",
    head: Literal["lm", "scalar"] = "lm",
    entropy: bool = False,
    recorded: bool = False,
    supervised: bool = False,
    on_policy: bool = False,
    correction: str = "",
    scores: bool = False,
    ids: tuple[str, ...] = (),
    zero: Mapping[str, str] | None = None,
    only_with: Mapping[str, str] | None = None,
    limits: Mapping[str, Limit] | None = None,
    conventions: Mapping[str, Convention] | None = None,
) -> LossFunction:
    """Declare a loss from its function: the first parameter is Now, those annotated Tensors[...]
    are ports.

    A port with a default of None is optional. path: of the declaration, if users call another
    function, which stands beside it; by default the function's own. Raises GraphError for a
    parameter without a usable annotation.
    """
    parameters = _parameters_after_now(fn)
    if any(parameter.name == ROWS for parameter in parameters):
        problem = f"expected another name than {ROWS!r}, with which a term is given rows of its own"
        raise call_error(f"loss {fn.__name__}.{ROWS}", problem, "another name for it")
    ports = tuple(_declare_port(fn, p) for p in parameters if p.kind is not p.KEYWORD_ONLY)
    _require_ids(f"loss {fn.__name__}", ports, ids)
    return LossFunction(
        path=path or declared_path(fn),
        name=name or fn.__name__,
        scope=scope,
        head=head,
        entropy=entropy,
        ports=ports,
        parameters=tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY),
        zero=tuple((zero or {}).items()),
        only_with=tuple((only_with or {}).items()),
        limits=tuple((limits or {}).items()),
        recorded=recorded,
        supervised=supervised,
        on_policy=on_policy,
        correction=correction,
        conventions=tuple((conventions or {}).items()),
        scores=scores,
        ids=tuple(ids),
        fn=fn,
    )


def _require_ids(where: str, ports: Sequence[Input], ids: object) -> None:
    """Raises GraphError unless ids are none, or a port and its token column of lists of ids."""
    if ids == ():
        return
    id_columns = set(_find_id_columns(ports))
    # What is no tuple may not be hashable, and would fail in the look-up.
    if isinstance(ids, tuple) and ids in id_columns:
        return
    fix = 'teacher: Tensors[TopLogprobs], ids=("teacher", "top_ids")'
    if id_columns:
        fix = f"ids={min(id_columns)}"
    expected = "a port and its column of lists of token ids"
    require(where, "ids", ids, fits=False, expected=expected, fix=fix)


def _find_id_columns(ports: Sequence[Input]) -> Iterator[tuple[str, str]]:
    for port in ports:
        for column in port.schema.columns.values():
            if column.axis == "T" and _is_list_of_ids(column.type):
                yield port.name, column.name


def _is_list_of_ids(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and pa.types.is_integer(kind.value_type)


def _parameters_after_now(fn: Callable[..., Terms]) -> list[inspect.Parameter]:
    """The parameters after the first, which is Now. Raises GraphError if a loss has no Now or does
    not return Terms.
    """
    signature = signature_of(fn, "loss", _LIKE)
    where = f"loss {fn.__name__}"
    parameters = list(signature.parameters.values())
    if not parameters or not _is_now(parameters[0]):
        first = parameters[0] if parameters else "none"
        problem = f"expected Now as its first parameter, found {first}"
        raise call_error(where, problem, _LIKE)
    returned = signature.return_annotation
    if returned not in (Terms, signature.empty):
        problem = f"expected it to return Terms, found {getattr(returned, '__name__', returned)}"
        raise call_error(where, problem, "Terms(loss), unreduced: train takes the mean")
    return parameters[1:]


def _is_now(parameter: inspect.Parameter) -> bool:
    if parameter.kind is parameter.KEYWORD_ONLY:
        return False
    return parameter.annotation in (Now, parameter.empty)


def _declare_port(fn: Callable[..., Any], parameter: inspect.Parameter) -> Input:
    schema = _schema_of(parameter.annotation)
    if schema is None:
        annotation = "none"
        if parameter.annotation is not parameter.empty:
            annotation = str(parameter.annotation)
        raise call_error(
            f"loss {fn.__name__}.{parameter.name}",
            f"expected an annotation Tensors[Schema], found {annotation}",
            "annotate ports as Tensors[Advantage] and put parameters after *",
        )
    return Input(name=parameter.name, schema=schema, optional=parameter.default is None)


def _schema_of(annotation: Any) -> type[Schema] | None:
    """The Schema in `Tensors[Schema]` or `Tensors[Schema] | None`; None in anything else."""
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Tensors:
            (schema,) = get_args(part)
            return schema if isinstance(schema, type) and issubclass(schema, Schema) else None
    return None


_LIKE = "def f(now: Now, advantage: Tensors[Advantage], *, clip: float = 0.2) -> Terms"


class LossDeclaration(Declaration, Generic[Q]):
    """A user's loss: called with Ports it returns a Loss; tests call the plain function, `.fn`."""

    def __init__(self, function: LossFunction, signature: inspect.Signature) -> None:
        self.function = function
        self.fn = function.fn
        self._signature = signature

    @overload
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> Loss: ...
    @overload
    def __call__(self, *args: Any, rows: Port[Completion], **kwargs: Any) -> Loss: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Loss:
        """Make a loss of one term. rows: those of the term, if they are not the train node's."""
        rows = kwargs.pop(ROWS, None)
        refuse_unknown(self.function.name, self._signature, args, kwargs)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        ports = {port.name: bound.arguments[port.name] for port in self.function.ports}
        params = {name: bound.arguments[name] for name in self.function.parameters}
        return make_loss(self.function, ports, params, rows=rows)


class _LossDecorator:
    def __init__(self, declare: Callable[[Callable[..., Terms]], LossFunction]) -> None:
        self._declare = declare

    @overload
    def __call__(
        self, fn: Callable[Concatenate[Now, Tensors[A], Tensors[B], Tensors[C], P], Terms]
    ) -> LossDeclaration[Concatenate[Port[A], Port[B], Port[C], P]]: ...
    @overload
    def __call__(
        self, fn: Callable[Concatenate[Now, Tensors[A], Tensors[B], P], Terms]
    ) -> LossDeclaration[Concatenate[Port[A], Port[B], P]]: ...
    @overload
    def __call__(
        self, fn: Callable[Concatenate[Now, Tensors[A], P], Terms]
    ) -> LossDeclaration[Concatenate[Port[A], P]]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[Now, P], Terms]) -> LossDeclaration[P]: ...
    def __call__(self, fn: Callable[..., Terms]) -> Any:
        function = self._declare(fn)
        signature = inspect.signature(fn)
        # A user calls it with ports and parameters; train gives it Now.
        _, *parameters = signature.parameters.values()
        return LossDeclaration(function, signature.replace(parameters=parameters))


_LIMITS = {
    "scope": choice("token", "sequence", "group"),
    "head": choice("lm", "scalar"),
    "entropy": flag(),
    "supervised": flag(),
    "on_policy": flag(),
    "scores": flag(),
}


@declares
def loss(
    *,
    scope: LossScope = "token",
    head: Literal["lm", "scalar"] = "lm",
    entropy: bool = False,
    supervised: bool = False,
    on_policy: bool = False,
    scores: bool = False,
    ids: tuple[str, ...] = (),
) -> _LossDecorator:
    """Declare a user's loss: `@loss() def f(now: Now, advantage: Tensors[Advantage], *, clip=0.2)
    -> Terms`.

    scope: what one term of the returned loss belongs to. head: which output of the Model it needs.
    entropy: whether `now.entropy` is computed. supervised: it imitates its rows, so that train
    takes temperature 1 by default, not the rollout's. on_policy: its gradient is right only for
    rows made by the weights that an update starts from (no ratio): the check warns of others.
    scores: whether `now.scores` are computed. ids: a port and its column of token ids, such as
    ("teacher", "top_ids"), at which `now.at_ids` are computed, with gradient, in the same forward.
    Ports come first and are all required; parameters follow `*`.
    """
    options = {
        "scope": scope,
        "head": head,
        "entropy": entropy,
        "supervised": supervised,
        "on_policy": on_policy,
        "scores": scores,
    }
    for name, limit in _LIMITS.items():
        option = options[name]
        require(
            "loss",
            name,
            option,
            fits=limit.accepts(option),
            expected=limit.describe(),
            fix=f"{name}={limit.suggestion(option)!r}",
        )
    declare = functools.partial(
        loss_function,
        scope=scope,
        head=head,
        entropy=entropy,
        supervised=supervised,
        on_policy=on_policy,
        scores=scores,
        ids=ids,
    )
    return _LossDecorator(declare)
