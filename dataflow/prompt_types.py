"""The types that a column of prompts may have: text, lists of messages, lists of token ids.

Owns: telling them apart, and messages as Python. Does not own: the schema (schema.py), what becomes
of each (operators).

A struct of Arrow has all fields of all rows, in one order and of one type each. Of messages that
were parsed from JSON, whatever is no text therefore travels as JSON (`json_field`).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

Message = dict[str, Any]
"""OpenAI style: role, content and whatever else a chat template reads."""

_JSON = b"json"
"""In the metadata of a field: its texts are JSON."""


def is_messages(kind: pa.DataType) -> bool:
    """Whether a column of this type has lists of messages."""
    return _is_list(kind) and pa.types.is_struct(kind.value_type)


def is_conversations(kind: pa.DataType) -> bool:
    """Whether a column of this type has lists of messages with role and content."""
    if not is_messages(kind):
        return False
    return {"role", "content"} <= {field.name for field in kind.value_type}


def is_token_ids(kind: pa.DataType) -> bool:
    """Whether a column of this type has lists of token ids."""
    return _is_list(kind) and pa.types.is_integer(kind.value_type)


def json_field(name: str) -> pa.Field:
    """A field of messages whose values are written as JSON."""
    return pa.field(name, pa.utf8(), metadata={_JSON: b"1"})


def with_json_values(column: pa.Array) -> list[Any]:
    """A column as Python; in lists of messages, values that are written as JSON are parsed."""
    rows = column.to_pylist()
    names = _json_names(column.type)
    if not names:
        return rows
    for row in rows:
        for message in row or ():
            for name in names:
                if message[name] is not None:
                    message[name] = json.loads(message[name])
    return rows


def has_json_values(kind: pa.DataType) -> bool:
    """Whether a column of this type has messages with values that are written as JSON."""
    return bool(_json_names(kind))


def as_objects(column: pa.Array) -> np.ndarray:
    """Object [rows]: a column as Python, with values that are written as JSON parsed."""
    rows = np.empty(len(column), dtype=object)
    for index, row in enumerate(with_json_values(column)):
        rows[index] = row
    return rows


def messages_of(column: pa.Array) -> list[list[Message]]:
    """Lists of messages as their file has them.

    A field that a message does not have is null in Arrow, and left out. Inside a value, a null that
    stands in JSON stays; in Parquet it cannot be told from a field of other rows, and is left out.
    """
    parsed = _json_names(column.type)
    rows = with_json_values(column)
    return [[_without_nulls(message, parsed) for message in row] for row in rows]


def _without_nulls(message: Message, parsed: frozenset[str]) -> Message:
    """A template must see only the fields that the message has; role and content always."""
    shown: Message = {}
    for name, value in message.items():
        if value is not None or name in ("role", "content"):
            shown[name] = value if name in parsed else _without_inner_nulls(value)
    return shown


def _without_inner_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        present = {name: inner for name, inner in value.items() if inner is not None}
        return {name: _without_inner_nulls(inner) for name, inner in present.items()}
    if isinstance(value, list):
        return [_without_inner_nulls(inner) for inner in value]
    return value


def _json_names(kind: pa.DataType) -> frozenset[str]:
    fields = kind.value_type if is_messages(kind) else ()
    return frozenset(field.name for field in fields if _JSON in (field.metadata or {}))


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
