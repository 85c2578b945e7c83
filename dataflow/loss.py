"""Losses: what `train` minimises, as values of the language.

Owns: the declaration of a loss function and the decorator for a user's own. Does not own: what a
loss function sees and returns (loss_inputs.py), the algebra of weighted terms (loss_terms.py), any
formula (operators), the reduction of terms to a number (the train kernel).

A loss function sees packed tensors and returns unreduced terms. It never averages and never sees
padding; `train` reduces, with the denominator counted once over the whole update before the first
backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
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

from dataflow.calls import call_site, declares, refuse_unknown, refused, require, signature_of
from dataflow.convention import Convention
from dataflow.errors import Fault, GraphError
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

    A port with a default of None is optional. path: of the declaration, beside which the function
    stands that users call; by default the function's own. Raises GraphError for a parameter without
    a usable annotation.
    """
    values = _after_now(fn)
    if any(value.name == ROWS for value in values):
        problem = f"expected another name than {ROWS!r}, with which a term is given rows of its own"
        raise refused(f"loss {fn.__name__}.{ROWS}", problem, "another name for it")
    ports = tuple(_port(fn, p) for p in values if p.kind is not p.KEYWORD_ONLY)
    _require_ids(f"loss {fn.__name__}", ports, ids)
    return LossFunction(
        path=path or declared_path(fn),
        name=name or fn.__name__,
        scope=scope,
        head=head,
        entropy=entropy,
        ports=ports,
        parameters=tuple(p.name for p in values if p.kind is p.KEYWORD_ONLY),
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
    known = {
        (port.name, column.name)
        for port in ports
        for column in port.schema.columns.values()
        if column.axis == "T" and _lists_of_ids(column.type)
    }
    if ids != () and (not isinstance(ids, tuple) or ids not in known):
        expected = "a port and its column of lists of token ids"
        fix = (
            f"ids={min(known)}"
            if known
            else 'teacher: Tensors[TopLogprobs], ids=("teacher", "top_ids")'
        )
        require(where, "ids", ids, fits=False, expected=expected, fix=fix)


def _lists_of_ids(kind: pa.DataType) -> bool:
    lists = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
    return lists and pa.types.is_integer(kind.value_type)


def _after_now(fn: Callable[..., Terms]) -> list[inspect.Parameter]:
    """The parameters after the first, which is Now. Raises GraphError if a loss has no Now or does
    not return Terms.
    """
    signature = signature_of(fn, "loss", _LIKE)
    where = f"loss {fn.__name__}"
    first, *values = signature.parameters.values() or (None,)
    if (
        first is None
        or first.kind is first.KEYWORD_ONLY
        or first.annotation not in (Now, first.empty)
    ):
        raise refused(where, f"expected Now as its first parameter, found {first or 'none'}", _LIKE)
    if signature.return_annotation not in (Terms, signature.empty):
        shown = getattr(signature.return_annotation, "__name__", signature.return_annotation)
        fix = "Terms(loss), unreduced: train takes the mean"
        raise refused(where, f"expected it to return Terms, found {shown}", fix)
    return values


def _port(fn: Callable[..., Any], parameter: inspect.Parameter) -> Input:
    kinds = [
        a
        for a in (parameter.annotation, *get_args(parameter.annotation))
        if get_origin(a) is Tensors
    ]
    of = get_args(kinds[0])[:1] if kinds else ()
    if not (of and isinstance(of[0], type) and issubclass(of[0], Schema)):
        where = f"loss {fn.__name__}.{parameter.name}"
        problem = f"expected an annotation Tensors[Schema], found {_shown(parameter)}"
        fix = "annotate ports as Tensors[Advantage] and put parameters after *"
        raise GraphError(
            Fault(rule="call", where=where, problem=problem, fix=fix, origin=call_site())
        )
    optional = parameter.default is None
    return Input(name=parameter.name, schema=of[0], optional=optional)


def _shown(parameter: inspect.Parameter) -> str:
    return "none" if parameter.annotation is parameter.empty else str(parameter.annotation)


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
        """rows: those of the term, if they are not the train node's."""
        rows = kwargs.pop(ROWS, None)
        refuse_unknown(self.function.name, self._signature, args, kwargs)
        given = self._signature.bind(*args, **kwargs)
        given.apply_defaults()
        ports = {i.name: given.arguments[i.name] for i in self.function.ports}
        params = {p: given.arguments[p] for p in self.function.parameters}
        return make_loss(self.function, ports, params, rows=rows)


class _LossDecorator:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

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
        function, signature = loss_function(fn, **self._options), inspect.signature(fn)
        return LossDeclaration(
            function, signature.replace(parameters=list(signature.parameters.values())[1:])
        )


_OPTIONS = {
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
    for name, limit in _OPTIONS.items():
        given, fix = options[name], f"{name}={limit.suggestion(options[name])!r}"
        require("loss", name, given, fits=limit.accepts(given), expected=limit.expected(), fix=fix)
    return _LossDecorator(options | {"ids": ids})
