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


def draw_prompts(cell: ProfileCell, vocabulary: int) -> Batch:
    """Draw prompts as token ids at random, so that what they have in common is soon over."""
    count = -(-cell.rows // cell.samples)
    ids = _draw_ids(np.random.default_rng(0), count * cell.prompt, vocabulary)
    offsets = np.arange(count + 1) * cell.prompt
    columns = {"prompt": Ragged(ids, offsets)}
    return Batch.make(Keys.of(range(count)), columns, TokenPrompt)


def draw_inputs(cell: ProfileCell, node: KernelNode, vocabulary: int) -> dict[str, Batch]:
    """Draw the columns of each input that the node reads of finished rows. Raises DataError for a
    column of a type that cannot be drawn.
    """
    prompt_count = -(-cell.rows // cell.samples)
    keys = Keys.of(range(prompt_count)).expand(cell.samples)
    draw = np.random.default_rng(1)
    batches: dict[str, Batch] = {}
    token_ids: dict[str, Ragged] = {}
    for name, column_names in node.reads.items():
        schema: type[Schema] = node.schemas[name]
        columns: dict[str, Any] = {}
        for column_name in column_names:
            if column_name not in schema.columns:
                continue
            column = schema.columns[column_name]
            drawn = token_ids.get(column.name)
            if drawn is None:
                drawn = _draw_column(draw, column, cell, len(keys), vocabulary)
            # Token ids are the same in every input: these are the same rows.
            if column.name.endswith("_ids"):
                token_ids[column.name] = drawn
            columns[column.name] = drawn
        batches[name] = Batch.make(keys, columns, schema)
    return batches


def _draw_ids(draw: np.random.Generator, count: int, vocabulary: int) -> np.ndarray:
    return draw.integers(0, vocabulary, count).astype(np.int32)


def _draw_column(
    draw: np.random.Generator, column: Column, cell: ProfileCell, rows: int, vocabulary: int
) -> Any:
    """A column of so many rows."""
    if column.axis is None:
        return _draw_numbers(draw, column, rows, vocabulary)
    length = {"P": cell.prompt, "T": cell.answer, "K": _TURNS}[column.axis]
    offsets = np.arange(rows + 1) * length
    if column.name == "prompt_ids":
        # All samples of a prompt have the same ids.
        prompts = _draw_ids(draw, rows // cell.samples * length, vocabulary).reshape(-1, length)
        return Ragged(np.repeat(prompts, cell.samples, axis=0).ravel(), offsets)
    return Ragged(_draw_numbers(draw, column, rows * length, vocabulary), offsets)


_CONSTANT: Mapping[str, float] = {"completion_mask": 1, "version": 0, "turn": 0, "turn_end": 1}


def _draw_numbers(draw: np.random.Generator, column: Column, count: int, vocabulary: int) -> Any:
    """Such as a kernel accepts; what it computes with them does not matter."""
    kind = column.type
    if column.name == "sign":
        return np.where(np.arange(count) % 2, -1, 1)
    if column.name.endswith("_ids") and pa.types.is_integer(kind):
        return _draw_ids(draw, count, vocabulary)
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
