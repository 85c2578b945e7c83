"""The types that a column of prompts may have: text, lists of messages, lists of token ids.

Owns: telling them apart. Does not own: the schema (schema.py), what becomes of each (operators).
"""

from __future__ import annotations

import pyarrow as pa


def is_messages(kind: pa.DataType) -> bool:
    """Whether a column of this type has lists of messages."""
    return _is_list(kind) and pa.types.is_struct(kind.value_type)


def is_token_ids(kind: pa.DataType) -> bool:
    """Whether a column of this type has lists of token ids."""
    return _is_list(kind) and pa.types.is_integer(kind.value_type)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
