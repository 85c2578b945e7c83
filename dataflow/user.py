"""A user's own operators: plain functions on columns.

Owns: the decorator, and Columns, the view of a batch that such a function receives and
returns. Does not own: the kernel that calls it (operators/kernels/host.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_args, get_origin, overload

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys
from dataflow.calls import call_error, call_site, declares, refuse_unknown, require, signature_of
from dataflow.convention import Convention
from dataflow.errors import Fault, GraphError, nearest
from dataflow.importable_names import Declaration, declared_path
from dataflow.limits import Limit, choice
from dataflow.node import Node, Port
from dataflow.operator import Input, Keeps, Operator, Same, Scope
from dataflow.prompt_types import has_json_values
from dataflow.schema import Keep, Preference, Schema

S = TypeVar("S", bound=Schema)
S_co = TypeVar("S_co", bound=Schema, covariant=True)
A = TypeVar("A", bound=Schema)
B = TypeVar("B", bound=Schema)
C = TypeVar("C", bound=Schema)
D = TypeVar("D", bound=Schema)
R = TypeVar("R")
P = ParamSpec("P")
Q = ParamSpec("Q")

HOST_KERNEL = "operators.kernels.host:ColumnFunction"


class Columns(Generic[S_co]):
    """The columns of one port as NumPy views, rows by (position, sample).

    `c["reward"]` is an array [rows]; a token column is a Ragged (values, offsets); text is an
    object array. Memory is read-only. For a column declared `device` the array, or the Ragged's
    values, is a torch tensor on its device: it must not be written to, and is returned in the same
    form. `groups` numbers the group of each row from 0. Return one with `score.set(reward=...)`, or
    `Columns.make(Reward, like=score, reward=...)`.
    """

    __slots__ = ("batch", "keyed", "schema")

    def __init__(self, batch: Batch, schema: type[S_co], *, keyed: bool = True) -> None:
        self.batch = batch
        self.schema = schema
        self.keyed = keyed
        """Whether the keys are those of a run's rows, not numbers that replace them in a test."""

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, name: str) -> Any:
        if name in self.batch.device:
            found = self.batch.tensor(name)
            return (
                found.values
                if pa.types.is_null(self.batch.records.schema.field(name).type)
                else found
            )
        kind = self.batch.array(name).type
        is_list = pa.types.is_large_list(kind) or pa.types.is_list(kind)
        return (
            self.batch.ragged(name)
            if is_list and not pa.types.is_struct(kind.value_type) and not has_json_values(kind)
            else self.batch.flat(name)
        )

    @property
    def keys(self) -> Keys:
        """The rows' keys."""
        return self.batch.keys

    @property
    def groups(self) -> np.ndarray:
        """int64 [rows]: 0 for the rows of the first prompt, 1 for those of the next, and so on."""
        return np.unique(self.batch.keys.position, return_inverse=True)[1]

    def set(self, **columns: Any) -> Columns[S_co]:
        """The same rows with these columns added; one of the same name is replaced."""
        kept = {
            name: self[name] if name in self.batch.device else self.batch.array(name)
            for name in self.batch.names
        }
        return Columns(
            Batch.make(self.batch.keys, kept | columns, self.schema), self.schema, keyed=self.keyed
        )

    @staticmethod
    def make(schema: type[S], *, like: Columns[Any] | None = None, **columns: Any) -> Columns[S]:
        """New columns on the rows of `like`, in order; without it, for tests, on rows at positions
        0, 1, ... An operator that returns those is refused: they are no rows of the run.
        """
        rows = len(next(iter(columns.values()))) if like is None else len(like)
        keys = Keys.of(range(rows)) if like is None else like.keys
        return Columns(
            Batch.make(keys, columns, schema), schema, keyed=like is not None and like.keyed
        )


class OperatorDeclaration(Declaration, Generic[Q, R]):
    """A user's operator: called with Ports it returns a Port; `.fn` is the plain function, for
    tests.
    """

    def __init__(
        self, operator: Operator, signature: inspect.Signature, name: str | None = None
    ) -> None:
        assert operator.function is not None
        self.operator = operator
        self.fn = operator.function
        self._signature = signature
        self._name = name or operator.name

    def named(self, name: str) -> OperatorDeclaration[Q, R]:
        """The same operator for a second use in one graph: `diverse.named("diverse_2")(rollout,
        score)`.
        """
        return OperatorDeclaration(self.operator, self._signature, name)

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R:
        refuse_unknown(self.operator.name, self._signature, args, kwargs)
        given = self._signature.bind(*args, **kwargs)
        given.apply_defaults()
        names = [i.name for i in self.operator.inputs]
        params = {k: v for k, v in given.arguments.items() if k not in names}
        inputs = {name: given.arguments[name] for name in names}
        port: Any = Node(self.operator, self._name, inputs=inputs, params=params).port()
        return port


class _OperatorDecorator:
    def __init__(
        self,
        scope: Scope,
        reads: Mapping[str, str | Sequence[str]],
        keeps: Keeps | None,
        parent: tuple[str, ...],
    ) -> None:
        self._scope: Scope = scope
        self._reads = reads
        self._keeps: Keeps | None = keeps
        self._parent = parent

    @overload
    def __call__(
        self,
        fn: Callable[Concatenate[Columns[A], Columns[B], Columns[C], Columns[D], P], Columns[S]],
    ) -> OperatorDeclaration[Concatenate[Port[A], Port[B], Port[C], Port[D], P], Port[S]]: ...
    @overload
    def __call__(
        self, fn: Callable[Concatenate[Columns[A], Columns[B], Columns[C], P], Columns[S]]
    ) -> OperatorDeclaration[Concatenate[Port[A], Port[B], Port[C], P], Port[S]]: ...
    @overload
    def __call__(
        self, fn: Callable[Concatenate[Columns[A], Columns[B], P], Columns[S]]
    ) -> OperatorDeclaration[Concatenate[Port[A], Port[B], P], Port[S]]: ...
    @overload
    def __call__(
        self, fn: Callable[Concatenate[Columns[A], P], Columns[S]]
    ) -> OperatorDeclaration[Concatenate[Port[A], P], Port[S]]: ...
    def __call__(self, fn: Callable[..., Any]) -> Any:
        typed = signature_of(fn, "operator", _LIKE)
        positional = [p for p in typed.parameters.values() if p.kind is not p.KEYWORD_ONLY]
        inputs = tuple(self._input(fn, p) for p in positional)
        if not inputs:
            raise _annotation(fn, "its first parameter", "no port at all")
        names = [i.name for i in inputs]
        for port in self._reads:
            if port not in names:
                near = nearest(port, names)
                problem = f"reads names {port!r}, which is no port of it; ports: {', '.join(names)}"
                raise call_error(
                    f"operator {fn.__name__}", problem, f'reads={{"{near or names[0]}": [...]}}'
                )
        _require_parents(fn, names, self._parent)
        made = _schema(fn, "the return value", typed.return_annotation)
        operator = Operator(
            path=declared_path(fn),
            name=fn.__name__,
            work="host",
            scope=self._scope,
            rows=Same(inputs[0].name),
            inputs=inputs,
            outputs=(made,),
            kernels={"host": HOST_KERNEL},
            keeps=self._promised(fn, made),
            function=fn,
        )
        return OperatorDeclaration(operator, inspect.signature(fn))

    def _promised(self, fn: Callable[..., Any], made: type[Schema]) -> Keeps | None:
        """What it keeps of a group: two rows for a Preference. Raises GraphError if keeps= cannot
        be verified.
        """
        keeps: Keeps | None = self._keeps
        if issubclass(made, Preference):
            keeps = keeps or "pairs"
        if keeps is None:
            return None
        if keeps not in get_args(Keeps):
            near = nearest(str(keeps), get_args(Keeps)) or "groups"
            problem, fix = (
                f"expected keeps= one of {', '.join(map(repr, get_args(Keeps)))}, found {keeps!r}",
                f"keeps={near!r}",
            )
        elif not issubclass(made, Keep):
            problem = (
                f"expected no keeps= on what returns no Keep, found {keeps!r} on a {made.__name__}"
            )
            fix = "return Columns[Keep], or leave keeps= out"
        elif keeps != "rows" and self._scope == "row":
            problem = (
                f"it says what stays of a group ({keeps}), and scope='row' does not see whole"
                " groups"
            )
            fix = "@operator(scope='group')"
        else:
            return keeps
        where = f"operator {fn.__name__}"
        raise GraphError(
            Fault(rule="call", where=where, problem=problem, fix=fix, origin=call_site())
        )

    def _input(self, fn: Callable[..., Any], parameter: inspect.Parameter) -> Input:
        name, schema = parameter.name, _schema(fn, parameter.name, parameter.annotation)
        ancestors = tuple(self._reads.get(name, ()))
        return Input(
            name=name,
            schema=schema,
            rows="parent" if name in self._parent else "rows",
            ancestors=ancestors,
        )


def column_operator(
    fn: Callable[..., Any],
    path: str,
    *,
    name: str,
    scope: Scope = "row",
    columns: Mapping[str, tuple[str, ...]] | None = None,
    parent: Sequence[str] = (),
    variadic: Input | None = None,
    keeps: Keeps | None = None,
    limits: Mapping[str, Limit] | None = None,
    normalises: Any = "",
    conventions: Mapping[str, Convention] | None = None,
    repeats: tuple[str, ...] = (),
    kernel: str = HOST_KERNEL,
) -> Operator:
    """Declare one of this project's own operators from its function on columns.

    columns: for each input, the columns that the function really reads (default: all that its
    schema declares). parent: inputs on an ancestor's rows. keeps, limits, normalises,
    conventions, repeats: as in Operator. kernel: module:Class of one that also reports metrics.
    """
    typed = inspect.signature(fn, eval_str=True)
    inputs = []
    for p in typed.parameters.values():
        if p.kind is p.POSITIONAL_OR_KEYWORD:
            reads = (columns or {}).get(p.name)
            relation = "parent" if p.name in parent else "rows"
            inputs.append(
                Input(
                    name=p.name,
                    schema=_schema(fn, p.name, p.annotation),
                    rows=relation,
                    columns=reads,
                )
            )
    first = inputs[0] if inputs else variadic
    assert first is not None
    return Operator(
        path=path,
        name=name,
        work="host",
        scope=scope,
        rows=Same(first.name if inputs else f"{first.name}0"),
        inputs=tuple(inputs),
        variadic=variadic,
        outputs=(_schema(fn, "the return value", typed.return_annotation),),
        kernels={"host": kernel},
        keeps=keeps,
        limits=limits or {},
        normalises=normalises,
        conventions=conventions or {},
        repeats=repeats,
        function=fn,
    )


_LIKE = "def f(rollout: Columns[Rollout], *, weight: float = 0.1) -> Columns[Reward]"
_SCOPE = choice("row", "group", "batch")


@declares
def operator(
    *,
    scope: Scope = "row",
    reads: Mapping[str, str | Sequence[str]] | None = None,
    keeps: Keeps | None = None,
    parent: str | Sequence[str] = (),
) -> _OperatorDecorator:
    """Declare an operator from a function on columns; its rows are those of its first port.

    `@operator(scope="group") def diverse(rollout: Columns[Rollout], score: Columns[Reward], *,
    weight: float = 0.1) -> Columns[Reward]`. scope: the smallest set of rows it must see at once.
    reads: dataset columns that it needs besides a port's own, `{"rollout": ["answer"]}`. keeps: for
    one that returns a Keep, what `select` leaves of a group: `groups` (each whole or not at all, so
    that group operators may follow), `pairs` (two rows: what a Preference means) or `rows` (any,
    the default); a run that finds otherwise stops, naming node and group. parent: ports whose rows
    are ancestors of the first port's, such as the turn before: each row sees its ancestor's
    columns.
    """
    fix = f"scope={_SCOPE.suggestion(scope)!r}"
    require(
        "operator", "scope", scope, fits=_SCOPE.accepts(scope), expected=_SCOPE.expected(), fix=fix
    )
    given = {} if reads is None else reads
    fits = isinstance(given, Mapping) and all(
        isinstance(port, str) and _are_names(n) for port, n in given.items()
    )
    expected, fix = "lists of column names by port", 'reads={"rollout": ["answer"]}'
    require("operator", "reads", reads, fits=fits, expected=expected, fix=fix)
    parents = (parent,) if isinstance(parent, str) else parent
    require(
        "operator",
        "parent",
        parent,
        fits=_are_names(parents),
        expected="names of ports",
        fix='parent="before"',
    )
    return _OperatorDecorator(scope, given, keeps, tuple(parents))


def _are_names(value: object) -> bool:
    """A string is not a list of names, though it is a sequence of strings."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(name, str) for name in value)
    )


def _require_parents(fn: Callable[..., Any], ports: Sequence[str], parents: Sequence[str]) -> None:
    """Raises GraphError for a parent that is not a port of the operator, or is its first."""
    for name in parents:
        if name not in ports[1:]:
            found = "is its first port, whose rows it has" if name in ports else "is no port of it"
            others = ", ".join(ports[1:])
            problem = (
                f"expected parent= to name ports after the first, found {name!r}, which {found}"
            )
            raise call_error(
                f"operator {fn.__name__}",
                problem,
                f"one of: {others}" if others else "leave parent= out",
            )


def _schema(fn: Callable[..., Any], what: str, annotation: Any) -> type[Schema]:
    of = get_args(annotation)[:1] if get_origin(annotation) is Columns else ()
    if not (of and isinstance(of[0], type) and issubclass(of[0], Schema)):
        raise _annotation(
            fn, what, "none" if annotation is inspect.Parameter.empty else str(annotation)
        )
    return of[0]


def _annotation(fn: Callable[..., Any], what: str, found: str) -> GraphError:
    return GraphError(
        Fault(
            rule="call",
            where=f"operator {fn.__name__}",
            problem=f"expected {what} annotated Columns[Schema], found {found}",
            fix=_LIKE,
            origin=call_site(),
        )
    )
