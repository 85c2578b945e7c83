"""Rows for a kernel to be measured on, drawn from fixed seeds.

Owns: their numbers, by what a column is declared to be. Does not own: which rows (grid.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError
from dataflow.kernel import KernelNode
from dataflow.ragged import Ragged
from dataflow.schema import Column, Schema, TokenPrompt
from engine.plan.cost.profile import ProfileCell

_TURNS = 1
_LOGPROB = -2.0


def prompts(cell: ProfileCell, vocabulary: int) -> Batch:
    """As token ids, drawn at random, so that what prompts have in common is soon over."""
    count = -(-cell.rows // cell.samples)
    ids = _ids(np.random.default_rng(0), count * cell.prompt, vocabulary)
    columns = {"prompt": Ragged(ids, np.arange(count + 1) * cell.prompt)}
    return Batch.make(Keys.of(range(count)), columns, TokenPrompt)


def inputs(cell: ProfileCell, node: KernelNode, vocabulary: int) -> dict[str, Batch]:
    """Of each input, the columns that the node reads of finished rows. Raises DataError for a
    column of a type that cannot be drawn.
    """
    keys = Keys.of(range(-(-cell.rows // cell.samples))).expand(cell.samples)
    draw = np.random.default_rng(1)
    found: dict[str, Batch] = {}
    tokens: dict[str, Ragged] = {}
    for name, reads in node.reads.items():
        schema: type[Schema] = node.schemas[name]
        columns: dict[str, Any] = {}
        for column in (schema.columns[c] for c in reads if c in schema.columns):
            made = tokens.get(column.name)
            if made is None:
                made = _drawn(draw, column, cell, len(keys), vocabulary)
            if column.name.endswith("_ids"):  # the same in every input
                tokens[column.name] = made
            columns[column.name] = made
        found[name] = Batch.make(keys, columns, schema)
    return found


def _ids(draw: np.random.Generator, count: int, vocabulary: int) -> np.ndarray:
    return draw.integers(0, vocabulary, count).astype(np.int32)


def _drawn(
    draw: np.random.Generator, column: Column, cell: ProfileCell, rows: int, vocabulary: int
) -> Any:
    """A column of so many rows."""
    if column.axis is None:
        return _values(draw, column, rows, vocabulary)
    length = {"P": cell.prompt, "T": cell.answer, "K": _TURNS}[column.axis]
    offsets = np.arange(rows + 1) * length
    if column.name == "prompt_ids":  # all samples of a prompt have the same
        whole = _ids(draw, rows // cell.samples * length, vocabulary).reshape(-1, length)
        return Ragged(np.repeat(whole, cell.samples, axis=0).ravel(), offsets)
    return Ragged(_values(draw, column, rows * length, vocabulary), offsets)


_CONSTANT: Mapping[str, float] = {"completion_mask": 1, "version": 0, "turn": 0, "turn_end": 1}


def _values(draw: np.random.Generator, column: Column, count: int, vocabulary: int) -> Any:
    kind = column.type
    if column.name == "sign":
        return np.where(np.arange(count) % 2, -1, 1)
    if column.name.endswith("_ids") and pa.types.is_integer(kind):
        return _ids(draw, count, vocabulary)
    if column.name in _CONSTANT:
        return np.full(count, _CONSTANT[column.name], kind.to_pandas_dtype())
    if column.distribution:
        return np.full(count, _LOGPROB, np.float32)
    if pa.types.is_floating(kind):
        return draw.standard_normal(count).astype(np.float32)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return np.zeros(count, kind.to_pandas_dtype())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return [""] * count
    problem = f"expected a column of numbers or text, found {column.name} of {kind}"
    raise DataError(f"rows to measure: {problem}. Fix: profile a graph without it.")
