"""Bytes of columns, from their declared types at the greatest lengths.

Owns: the size of a value of each type and axis. Does not own: which columns travel, and how often.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from dataflow.schema import Column
from engine.plan.cost.lengths import Lengths

TOKEN_TEXT = 4
"""Bytes of text a token: byte-pair vocabularies of natural text have 3.5 to 4.5."""

WORD = 32
"""Bytes of a short text, such as `finish`: a guess, small compared with the token columns."""

TURNS = 16
"""Turns of an episode, where the graph says nothing else."""

_OFFSET = 8
"""LargeList offsets are int64, one a row."""

_PROMPT_TEXT = ("prompt", "prompt_text")
_ANSWER_TEXT = ("completion",)
_ROW_TEXT = ("messages",)


def column_bytes(column: Column, lengths: Lengths) -> int:
    """Bytes of one row in a declared column."""
    if column.axis is not None:
        counts = {"P": lengths.prompt, "T": lengths.completion, "K": TURNS}
        return _OFFSET + counts[column.axis] * value_bytes(column.type)
    return data_bytes(column.name, column.type, lengths)


def data_bytes(name: str, kind: pa.DataType, lengths: Lengths) -> int:
    """Bytes of one row in a column of the data, or in a declared one without an axis."""
    if name in _PROMPT_TEXT:
        return _OFFSET + TOKEN_TEXT * lengths.prompt
    if name in _ANSWER_TEXT:
        return _OFFSET + TOKEN_TEXT * lengths.completion
    if name in _ROW_TEXT and pa.types.is_string(kind):
        return _OFFSET + TOKEN_TEXT * lengths.row
    return value_bytes(kind)


def value_bytes(kind: pa.DataType) -> int:
    """Bytes of one value; text and nested values at a guess (WORD a leaf)."""
    if pa.types.is_struct(kind):
        return sum(value_bytes(field.type) for field in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _OFFSET + value_bytes(kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        return kind.list_size * value_bytes(kind.value_type)
    if pa.types.is_null(kind):
        return 0
    if pa.types.is_primitive(kind):
        return max(1, kind.bit_width // 8)
    return _OFFSET + WORD


def row_bytes(columns: Mapping[str, int], names: tuple[str, ...]) -> int:
    """Bytes of one row of these columns, given the size of each."""
    return sum(columns.get(name, 0) for name in names)
