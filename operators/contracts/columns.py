"""What an operator made of generated rows, row by row, and how two of these differ.

Owns: calling the operator as its kernel does, the first faults of what it returns, comparison with
the tolerance of float32. Does not own: which rows are compared (operators.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import DataError
from dataflow.user import Columns
from operators.contracts.cases import Generated
from operators.contracts.promise import Broken, refuse_case
from operators.contracts.subject import OperatorSubject
from operators.kernels.return_checks import in_order

Made = Mapping[str, Sequence[Any]]
"""By column, each row's value: a number, an array of its tokens' numbers, or anything else."""

RELATIVE, ABSOLUTE = 1e-4, 1e-5


def close(one: Any, other: Any) -> bool:
    """Whether numbers are equal as far as float32 goes; nan equals nan."""
    return bool(np.allclose(one, other, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True))


def arguments(subject: OperatorSubject, rows: Generated) -> dict[str, Batch]:
    """The batch of each input, in memory of its own."""
    return {port.name: rows.batch(port.name) for port in subject.inputs}


def called(
    subject: OperatorSubject, rows: Generated, batches: Mapping[str, Batch] | None = None
) -> Columns[Any]:
    """What the function returns for these rows. Raises Broken."""
    given = arguments(subject, rows) if batches is None else batches
    columns = [Columns(given[port.name], port.schema) for port in subject.inputs]
    function: Any = subject.operator.function
    try:
        with np.errstate(all="ignore"):
            made = function(*columns, **(dict(subject.params) | dict(rows.params)))
    except Exception as error:  # user code may raise anything
        refuse_case(error)
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise Broken("schema", f"it raised {told}") from error
    if not isinstance(made, Columns):
        raise Broken("schema", f"it returned {type(made).__name__}, not Columns")
    return made


def output(subject: OperatorSubject, rows: Generated, *, finite: str = "finite") -> Made:
    """What it makes of these rows, in their order. finite: the promise that a number which is not
    finite breaks; empty: none. Raises Broken.
    """
    made = called(subject, rows)
    batch = _in_order(made, rows)
    _require_schema(subject, rows, batch)
    found = {name: by_row(batch, name) for name in batch.names}
    if finite:
        _require_finite(subject, rows, found, finite)
    return found


def _in_order(made: Columns[Any], rows: Generated) -> Batch:
    if not made.keyed:
        raise Broken("keys", "the rows that it returned have no keys")
    try:
        return in_order(made.batch, rows.keys)
    except DataError as error:
        raise Broken("keys", str(error).partition(" Fix:")[0].rstrip(".")) from error


def by_row(batch: Batch, name: str) -> list[Any]:
    """A column's value of each row, wherever it is."""
    if name in batch.device:
        found = batch.tensor(name)
        return [np.asarray(found[row].cpu()) for row in range(len(found))]
    kind = batch.array(name).type
    if pa.types.is_large_list(kind) and _is_numeric(kind.value_type):
        found = batch.ragged(name)
        return [found[row] for row in range(len(found))]
    return list(batch.flat(name))


def _is_numeric(kind: pa.DataType) -> bool:
    inside = kind.value_type if pa.types.is_fixed_size_list(kind) else kind
    return pa.types.is_floating(inside) or pa.types.is_integer(inside)


def _require_schema(subject: OperatorSubject, rows: Generated, batch: Batch) -> None:
    for name, column in subject.made.columns.items():
        if name not in batch.names:
            there = ", ".join(batch.names) or "none"
            raise Broken("schema", f"it returned no column {name!r}; there are: {there}")
        if column.axis == "T":
            lengths = batch.lengths(name)
            for row, mask in enumerate(rows.masks):
                if lengths[row] != len(mask):
                    found = f"{name} has {lengths[row]} values for {len(mask)} tokens"
                    raise Broken("schema", f"{place(rows, row)}: {found}")


def _require_finite(subject: OperatorSubject, rows: Generated, found: Made, promise: str) -> None:
    for name in subject.made.columns:
        for row, value in enumerate(found[name]):
            array = np.asarray(value)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise Broken(promise, f"{place(rows, row)}: {name} is {shown(value)}")


def place(rows: Generated, row: int) -> str:
    """`position 0, sample 1`."""
    return f"position {rows.position[row]}, sample {rows.sample[row]}"


def shown(value: Any) -> str:
    """A number, or those of a row's tokens."""
    array = np.asarray(value)
    if array.ndim == 0:
        return f"{value:.6g}" if array.dtype.kind == "f" else repr(value)
    return f"[{' '.join(shown(v) for v in array)}]"


def require_same(
    promise: str,
    rows: Generated,
    one: Made,
    other: Made,
    pairs: Sequence[tuple[int, int]],
    how: str,
    *,
    exact: bool = False,
    where: Sequence[Sequence[int]] | None = None,
) -> None:
    """Raise Broken if a row of `one` differs from its row of `other`. pairs: those rows. how: what
    was done to get the other. where: compare a row's tokens only where this is 1.
    """
    for name in one:
        if name not in other:
            raise Broken(promise, f"{how} it returned no column {name!r}")
        for mine, its in pairs:
            a, b = one[name][mine], other[name][its]
            if where is not None and np.ndim(a) and len(a) == len(where[mine]):
                kept = np.asarray(where[mine], dtype=bool)
                a, b = np.asarray(a)[kept], np.asarray(b)[kept]
            if not _same(a, b, exact=exact):
                found = f"{name} is {shown(a)}, and {how} {shown(b)}"
                raise Broken(promise, f"{place(rows, mine)}: {found}")


def _same(a: Any, b: Any, *, exact: bool) -> bool:
    one, other = np.asarray(a), np.asarray(b)
    if one.shape != other.shape:
        return False
    if one.dtype.kind != "f" or other.dtype.kind != "f":
        return bool((one == other).all())
    if exact:
        return bool(np.array_equal(one, other, equal_nan=True))
    return close(one, other)


def changed_inputs(subject: OperatorSubject, rows: Generated) -> Iterator[str]:
    """The inputs that a call changed, as `score.reward`."""
    before, given = arguments(subject, rows), arguments(subject, rows)
    called(subject, rows, given)
    for port, batch in given.items():
        here, there = batch.on_host().records, before[port].on_host().records
        for name in here.schema.names:
            if not here.column(name).equals(there.column(name)):
                yield f"{port}.{name}"
