"""A user's own operators: plain functions on columns.

Owns: the decorator, and Columns, the view of a batch that such a function receives and
returns. Does not own: the kernel that calls it (operators/kernels/host.py).
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

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys
from dataflow.calls import call_error, declares, refuse_unknown, require, signature_of
from dataflow.convention import Convention
from dataflow.errors import GraphError, nearest
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
            tensor = self.batch.tensor(name)
            # Arrow holds only the lengths of a device column; null where a row has one value.
            is_flat = pa.types.is_null(self.batch.records.schema.field(name).type)
            return tensor.values if is_flat else tensor
        kind = self.batch.array(name).type
        if _is_token_column(kind):
            return self.batch.ragged(name)
        return self.batch.flat(name)

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
        all_columns: dict[str, Any] = {}
        for name in self.batch.names:
            on_device = name in self.batch.device
            all_columns[name] = self[name] if on_device else self.batch.array(name)
        all_columns |= columns
        batch = Batch.make(self.batch.keys, all_columns, self.schema)
        return Columns(batch, self.schema, keyed=self.keyed)

    @staticmethod
    def make(schema: type[S], *, like: Columns[Any] | None = None, **columns: Any) -> Columns[S]:
        """New columns on the rows of `like`, in order; without it, for tests, on rows at positions
        0, 1, ... An operator that returns those is refused: they are no rows of the run.
        """
        if like is None:
            first_column = next(iter(columns.values()))
            keys, keyed = Keys.of(range(len(first_column))), False
        else:
            keys, keyed = like.keys, like.keyed
        return Columns(Batch.make(keys, columns, schema), schema, keyed=keyed)


def _is_token_column(kind: pa.DataType) -> bool:
    """Whether it has a list of plain values a row; those of structs and of JSON are objects."""
    if not pa.types.is_large_list(kind) and not pa.types.is_list(kind):
        return False
    return not pa.types.is_struct(kind.value_type) and not has_json_values(kind)


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
        call = self._signature.bind(*args, **kwargs)
        call.apply_defaults()
        input_names = [declared.name for declared in self.operator.inputs]
        params = {name: arg for name, arg in call.arguments.items() if name not in input_names}
        inputs = {name: call.arguments[name] for name in input_names}
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
        inputs = tuple(self._declare_input(fn, parameter) for parameter in positional)
        if not inputs:
            raise _annotation_error(fn, "its first parameter", "no port at all")
        names = [declared.name for declared in inputs]
        self._require_ports(fn, names)
        _require_parents(fn, names, self._parent)
        output = _schema_of(fn, "the return value", typed.return_annotation)
        operator = Operator(
            path=declared_path(fn),
            name=fn.__name__,
            work="host",
            scope=self._scope,
            rows=Same(inputs[0].name),
            inputs=inputs,
            outputs=(output,),
            kernels={"host": HOST_KERNEL},
            keeps=self._choose_keeps(fn, output),
            function=fn,
        )
        return OperatorDeclaration(operator, inspect.signature(fn))

    def _require_ports(self, fn: Callable[..., Any], names: Sequence[str]) -> None:
        """Raises GraphError if `reads` names anything but a port of the operator."""
        for port in self._reads:
            if port not in names:
                near = nearest(port, names) or names[0]
                problem = f"reads names {port!r}, which is no port of it; ports: {', '.join(names)}"
                raise call_error(f"operator {fn.__name__}", problem, f'reads={{"{near}": [...]}}')

    def _choose_keeps(self, fn: Callable[..., Any], output: type[Schema]) -> Keeps | None:
        """What it keeps of a group: two rows for a Preference. Raises GraphError if keeps= cannot
        be verified.
        """
        keeps: Keeps | None = self._keeps
        if issubclass(output, Preference):
            keeps = keeps or "pairs"
        if keeps is None:
            return None
        choices = get_args(Keeps)
        if keeps not in choices:
            near = nearest(str(keeps), choices) or "groups"
            problem = f"expected keeps= one of {', '.join(map(repr, choices))}, found {keeps!r}"
            fix = f"keeps={near!r}"
        elif not issubclass(output, Keep):
            kind = output.__name__
            problem = f"expected no keeps= on what returns no Keep, found {keeps!r} on a {kind}"
            fix = "return Columns[Keep], or leave keeps= out"
        elif keeps != "rows" and self._scope == "row":
            problem = (
                f"it says what stays of a group ({keeps}), and scope='row' does not see whole"
                " groups"
            )
            fix = "@operator(scope='group')"
        else:
            return keeps
        raise call_error(f"operator {fn.__name__}", problem, fix)

    def _declare_input(self, fn: Callable[..., Any], parameter: inspect.Parameter) -> Input:
        name = parameter.name
        schema = _schema_of(fn, name, parameter.annotation)
        rows: Literal["rows", "parent"] = "parent" if name in self._parent else "rows"
        ancestors = tuple(self._reads.get(name, ()))
        return Input(name=name, schema=schema, rows=rows, ancestors=ancestors)


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
    whole_episodes: bool = False,
    kernel: str = HOST_KERNEL,
) -> Operator:
    """Declare one of this project's own operators from its function on columns.

    columns: for each input, the columns that the function really reads (default: all that its
    schema declares). parent: inputs on an ancestor's rows. keeps, limits, normalises,
    conventions, repeats, whole_episodes: as in Operator. kernel: module:Class of one that also
    reports metrics.
    """
    typed = inspect.signature(fn, eval_str=True)
    inputs: list[Input] = []
    for parameter in typed.parameters.values():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            declared = Input(
                name=parameter.name,
                schema=_schema_of(fn, parameter.name, parameter.annotation),
                rows="parent" if parameter.name in parent else "rows",
                columns=(columns or {}).get(parameter.name),
            )
            inputs.append(declared)
    if inputs:
        first_name = inputs[0].name
    else:
        assert variadic is not None, "it has rows of an input"
        first_name = f"{variadic.name}0"
    return Operator(
        path=path,
        name=name,
        work="host",
        scope=scope,
        rows=Same(first_name),
        inputs=tuple(inputs),
        variadic=variadic,
        outputs=(_schema_of(fn, "the return value", typed.return_annotation),),
        kernels={"host": kernel},
        keeps=keeps,
        limits=limits or {},
        normalises=normalises,
        conventions=conventions or {},
        repeats=repeats,
        whole_episodes=whole_episodes,
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
    fits, expected = _SCOPE.accepts(scope), _SCOPE.describe()
    fix = f"scope={_SCOPE.suggestion(scope)!r}"
    require("operator", "scope", scope, fits=fits, expected=expected, fix=fix)
    columns_by_port = {} if reads is None else reads
    expected, fix = "lists of column names by port", 'reads={"rollout": ["answer"]}'
    fits = _are_names_by_port(columns_by_port)
    require("operator", "reads", reads, fits=fits, expected=expected, fix=fix)
    parents = (parent,) if isinstance(parent, str) else parent
    expected, fix = "names of ports", 'parent="before"'
    require("operator", "parent", parent, fits=_are_names(parents), expected=expected, fix=fix)
    return _OperatorDecorator(scope, columns_by_port, keeps, tuple(parents))


def _are_names_by_port(reads: object) -> bool:
    if not isinstance(reads, Mapping):
        return False
    return all(isinstance(port, str) and _are_names(names) for port, names in reads.items())


def _are_names(names: object) -> bool:
    """A string is not a list of names, though it is a sequence of strings."""
    if not isinstance(names, Sequence) or isinstance(names, str):
        return False
    return all(isinstance(name, str) for name in names)


def _require_parents(fn: Callable[..., Any], ports: Sequence[str], parents: Sequence[str]) -> None:
    """Raises GraphError for a parent that is not a port of the operator, or is its first."""
    for name in parents:
        if name not in ports[1:]:
            why = "is no port of it"
            if name in ports:
                why = "is its first port, whose rows it has"
            problem = f"expected parent= to name ports after the first, found {name!r}, which {why}"
            others = ", ".join(ports[1:])
            fix = f"one of: {others}" if others else "leave parent= out"
            raise call_error(f"operator {fn.__name__}", problem, fix)


def _schema_of(fn: Callable[..., Any], what: str, annotation: Any) -> type[Schema]:
    """The Schema in an annotation Columns[Schema]. Raises GraphError for any other annotation."""
    if get_origin(annotation) is Columns:
        schema = get_args(annotation)[0]
        if isinstance(schema, type) and issubclass(schema, Schema):
            return schema
    is_missing = annotation is inspect.Parameter.empty
    raise _annotation_error(fn, what, "none" if is_missing else str(annotation))


def _annotation_error(fn: Callable[..., Any], what: str, annotation: str) -> GraphError:
    problem = f"expected {what} annotated Columns[Schema], found {annotation}"
    return call_error(f"operator {fn.__name__}", problem, _LIKE)
