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

ValuesByColumn = Mapping[str, Sequence[Any]]
"""By column, each row's value: a number, an array of its tokens' numbers, or anything else."""

RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""How far apart float32 numbers may be that count as equal."""


def are_close(one: Any, other: Any) -> bool:
    """Whether numbers are equal as far as float32 goes; nan equals nan."""
    return bool(np.allclose(one, other, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True))


def make_batches(subject: OperatorSubject, rows: Generated) -> dict[str, Batch]:
    """Make the batch of each input, in memory of its own."""
    return {port.name: rows.make_batch(port.name) for port in subject.inputs}


def call_operator(
    subject: OperatorSubject, rows: Generated, batches: Mapping[str, Batch] | None = None
) -> Columns[Any]:
    """Call the function on these rows. Raises Broken if it raises, or returns no Columns."""
    if batches is None:
        batches = make_batches(subject, rows)
    columns = [Columns(batches[port.name], port.schema) for port in subject.inputs]
    function: Any = subject.operator.function
    try:
        with np.errstate(all="ignore"):
            returned = function(*columns, **(dict(subject.params) | dict(rows.params)))
    except Exception as error:  # user code may raise anything
        refuse_case(error)
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise Broken("schema", f"it raised {problem}") from error
    if not isinstance(returned, Columns):
        raise Broken("schema", f"it returned {type(returned).__name__}, not Columns")
    return returned


def compute_output(
    subject: OperatorSubject, rows: Generated, *, finite: str = "finite"
) -> ValuesByColumn:
    """Compute what the operator makes of these rows, in their order. finite: the promise that a
    number which is not finite breaks; empty: none. Raises Broken.
    """
    returned = call_operator(subject, rows)
    batch = _arrange_as(rows, returned)
    _require_schema(subject, rows, batch)
    output = {name: read_rows(batch, name) for name in batch.names}
    if finite:
        _require_finite(subject, rows, output, finite)
    return output


def _arrange_as(rows: Generated, returned: Columns[Any]) -> Batch:
    if not returned.keyed:
        raise Broken("keys", "the rows that it returned have no keys")
    try:
        return in_order(returned.batch, rows.keys)
    except DataError as error:
        raise Broken("keys", drop_fix(error)) from error


def drop_fix(error: Exception) -> str:
    """The problem that an error names, without its fix and its full stop."""
    return str(error).partition(" Fix:")[0].rstrip(".")


def read_rows(batch: Batch, name: str) -> list[Any]:
    """Read a column's value of each row, wherever it is."""
    if name in batch.device:
        tensors = batch.tensor(name)
        return [np.asarray(tensors[row].cpu()) for row in range(len(tensors))]
    kind = batch.array(name).type
    if pa.types.is_large_list(kind) and _is_numeric(kind.value_type):
        lists = batch.ragged(name)
        return [lists[row] for row in range(len(lists))]
    return list(batch.flat(name))


def _is_numeric(kind: pa.DataType) -> bool:
    if pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return pa.types.is_floating(kind) or pa.types.is_integer(kind)


def _require_schema(subject: OperatorSubject, rows: Generated, batch: Batch) -> None:
    for name, column in subject.output_schema.columns.items():
        if name not in batch.names:
            columns = ", ".join(batch.names) or "none"
            raise Broken("schema", f"it returned no column {name!r}; there are: {columns}")
        if column.axis == "T":
            _require_token_counts(rows, name, batch.lengths(name))


def _require_token_counts(rows: Generated, name: str, lengths: np.ndarray) -> None:
    for row, mask in enumerate(rows.masks):
        if lengths[row] != len(mask):
            problem = f"{name} has {lengths[row]} values for {len(mask)} tokens"
            raise Broken("schema", f"{describe_place(rows, row)}: {problem}")


def _require_finite(
    subject: OperatorSubject, rows: Generated, output: ValuesByColumn, promise: str
) -> None:
    for name in subject.output_schema.columns:
        for row, numbers in enumerate(output[name]):
            array = np.asarray(numbers)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                problem = f"{name} is {format_numbers(numbers)}"
                raise Broken(promise, f"{describe_place(rows, row)}: {problem}")


def describe_place(rows: Generated, row: int) -> str:
    """Name a row by its keys: `position 0, sample 1`."""
    return f"position {rows.position[row]}, sample {rows.sample[row]}"


def format_numbers(numbers: Any) -> str:
    """Format a number, or those of a row's tokens."""
    array = np.asarray(numbers)
    if array.ndim == 0:
        return f"{numbers:.6g}" if array.dtype.kind == "f" else repr(numbers)
    return f"[{' '.join(map(format_numbers, array))}]"


def require_same(
    promise: str,
    rows: Generated,
    one: ValuesByColumn,
    other: ValuesByColumn,
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
        for row, other_row in pairs:
            a, b = one[name][row], other[name][other_row]
            if where is not None:
                a, b = _pick_tokens(a, b, where[row])
            if not _are_same(a, b, exact=exact):
                a_text, b_text = format_numbers(a), format_numbers(b)
                problem = f"{name} is {a_text}, and {how} {b_text}"
                raise Broken(promise, f"{describe_place(rows, row)}: {problem}")


def _pick_tokens(a: Any, b: Any, mask: Sequence[int]) -> tuple[Any, Any]:
    """Both where the mask is 1, if they have a number for each token."""
    if not np.ndim(a) or len(a) != len(mask):
        return a, b
    is_picked = np.asarray(mask, dtype=bool)
    return np.asarray(a)[is_picked], np.asarray(b)[is_picked]


def _are_same(a: Any, b: Any, *, exact: bool) -> bool:
    one, other = np.asarray(a), np.asarray(b)
    if one.shape != other.shape:
        return False
    if one.dtype.kind != "f" or other.dtype.kind != "f":
        return bool((one == other).all())
    if exact:
        return bool(np.array_equal(one, other, equal_nan=True))
    return are_close(one, other)


def find_changed_inputs(subject: OperatorSubject, rows: Generated) -> Iterator[str]:
    """Find the inputs that a call changed, as `score.reward`."""
    untouched, passed = make_batches(subject, rows), make_batches(subject, rows)
    call_operator(subject, rows, passed)
    for port, batch in passed.items():
        after = batch.on_host().records
        before = untouched[port].on_host().records
        for name in after.schema.names:
            if not after.column(name).equals(before.column(name)):
                yield f"{port}.{name}"
