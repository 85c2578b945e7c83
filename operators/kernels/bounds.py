"""Values that no column of its kind can have, where an operator returned them.

Owns: bounds of columns, and versions of tokens that are newer than what they were made of. Does not
own: which bounds a column has (dataflow/schema.py), values that are not finite (host.py), ids that
one Model does not know (text.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.column import Column
from dataflow.schema import Schema

ROUNDING = 1e-3
"""How far a float may be outside: log-probs in float32 are off by less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """The first row with such a value, and what is wrong with it."""

    row: int
    text: str


def find_out_of_bounds(
    output: Batch, schema: type[Schema], read: Collection[str]
) -> Outside | None:
    """Find the first value outside of its column's bounds; None if there is none. read: the
    columns that somebody reads. Columns on a device are not looked at.
    """
    for name in read:
        column = schema.columns.get(name)
        if column is None or name in output.device or name not in output.names:
            continue
        if column.least is None and column.most is None:
            continue
        outside = _find_in_column(output, column)
        if outside is not None:
            return outside
    return None


def _find_in_column(output: Batch, column: Column) -> Outside | None:
    values = _flat_numbers(output.array(column.name))
    slack = ROUNDING if values.dtype.kind == "f" else 0.0
    wrong = np.zeros(len(values), dtype=bool)
    if column.least is not None:
        wrong |= values < column.least - slack
    if column.most is not None:
        wrong |= values > column.most + slack
    if not wrong.any():
        return None
    first = int(np.argmax(wrong))
    row, token = _place(output, column.name, first)
    text = (
        f"column {column.name!r}: expected {_bounds(column)}, found {values[first]:g}{token}. Fix:"
        f" {_fix(column)}"
    )
    return Outside(row=row, text=text)


def find_newer_than_inputs(output: Batch, inputs: Mapping[str, Batch]) -> Outside | None:
    """Find the first token of a version that none of the inputs' tokens has reached; None if there
    is none, or if no input has versions.
    """
    if "version" not in output.names:
        return None
    versioned = [batch for batch in inputs.values() if "version" in batch.names]
    input_versions = [_flat_numbers(batch.array("version")) for batch in versioned]
    newest_of_each = [int(versions.max()) for versions in input_versions if len(versions)]
    if not newest_of_each:
        return None
    newest = max(newest_of_each)
    versions = _flat_numbers(output.array("version"))
    wrong = versions > newest
    if not wrong.any():
        return None
    first = int(np.argmax(wrong))
    row, token = _place(output, "version", first)
    text = (
        f"column 'version': expected at most {newest}, the newest version of its inputs, found"
        f" {versions[first]}{token}. Fix: the version of the weights that made the token"
    )
    return Outside(row=row, text=text)


def _flat_numbers(array: pa.Array) -> np.ndarray:
    """[values]: those of all rows, one after another."""
    if pa.types.is_large_list(array.type):
        array = array.flatten()
    return array.to_numpy(zero_copy_only=False)


def _place(output: Batch, name: str, index: int) -> tuple[int, str]:
    """The row that a value belongs to, and in words its token."""
    if not pa.types.is_large_list(output.array(name).type):
        return index, ""
    offsets = output.ragged(name).offsets
    row = int(np.searchsorted(offsets, index, side="right")) - 1
    return row, f" at token {index - int(offsets[row])}"


def _bounds(column: Column) -> str:
    if column.least is None:
        return f"at most {column.most:g}"
    if column.most is None:
        return f"at least {column.least:g}"
    return f"{column.least:g} to {column.most:g}"


def _fix(column: Column) -> str:
    if column.distribution:
        return "log-probs of torch.log_softmax, in float32"
    if column.name.endswith("_ids") or column.name == "prompt":
        return "ids of the Model's tokenizer"
    return "values within these bounds"
