"""The types that a column of prompts may have: text, lists of messages, lists of token ids.

Owns: telling them apart, messages and other nested values as Python. Does not own: the schema
(schema.py), what becomes of each (operators).

A struct of Arrow has all fields of all rows, in one order and of one type each. Of objects that
were parsed from JSON, a field that some lack is therefore marked (`key_field`), and what Arrow
would change travels as JSON (`json_field`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

Message = dict[str, Any]
"""OpenAI style: role, content and whatever else a chat template reads."""

_JSON = b"json"
"""In the metadata of a field: its texts are JSON; of a struct's, a null is a key that is absent."""

_ALWAYS = ("role", "content")
"""Fields that a chat template sees in each message."""

_KEY = b"key"
"""In the metadata of a struct's field: a null is a key that is absent."""


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
    """A field whose values are written as JSON; in a struct, null where there is no such key."""
    return pa.field(name, pa.utf8(), metadata={_JSON: b"1"})


def is_json(field: pa.Field) -> bool:
    """Whether the values of a field are written as JSON."""
    return _JSON in (field.metadata or {})


def key_field(name: str, kind: pa.DataType) -> pa.Field:
    """A field of a struct that is null where there is no such key."""
    return pa.field(name, kind, metadata={_KEY: b"1"})


def with_json_values(column: pa.Array) -> list[Any]:
    """A column as Python; values that are written as JSON are parsed, and absent keys left out."""
    rows = column.to_pylist()
    kind = column.type
    if not has_json_values(kind):
        return rows
    if _has_json_items(kind):
        return [_parse_all(texts) for texts in rows]
    json_names, key_names = _json_names(kind), _key_names(kind)
    if not pa.types.is_struct(kind):
        objects = chain.from_iterable(filter(None, rows))
    else:
        objects = rows
    for each in filter(None, objects):
        for name in key_names:
            if each[name] is None:
                del each[name]
            elif name in json_names:
                each[name] = json.loads(each[name])
    return rows


def has_json_values(kind: pa.DataType) -> bool:
    """Whether `with_json_values` has more to do for a column of this type than Arrow does."""
    return bool(_key_names(kind)) or _has_json_items(kind)


def as_objects(column: pa.Array) -> np.ndarray:
    """Object [rows]: a column as Python, with values that are written as JSON parsed."""
    rows = np.empty(len(column), dtype=object)
    for index, row in enumerate(with_json_values(column)):
        rows[index] = row
    return rows


def messages_of(column: pa.Array) -> list[list[Message]]:
    """Lists of messages as their file has them.

    A field that a message does not have is left out, and so is one that is null. Inside a value, a
    null that stands in JSON stays; in Parquet it cannot be told from a field of other rows, and is
    left out.
    """
    json_names = _json_names(column.type)
    always = {field.name: None for field in _fields(column.type) if field.name in _ALWAYS}
    conversations: list[list[Message]] = []
    for row in with_json_values(column):
        messages = [always | _without_nulls(message, json_names) for message in row]
        conversations.append(messages)
    return conversations


def _without_nulls(message: Message, json_names: frozenset[str]) -> Message:
    """A template must see only the fields that the message has. json_names: the fields whose values
    were written as JSON, in which a null means one.
    """
    present: Message = {}
    for name, field in message.items():
        if field is not None:
            present[name] = field if name in json_names else _without_inner_nulls(field)
    return present


def _without_inner_nulls(part: Any) -> Any:
    if isinstance(part, dict):
        present = {name: inner for name, inner in part.items() if inner is not None}
        return {name: _without_inner_nulls(inner) for name, inner in present.items()}
    if isinstance(part, list):
        return [_without_inner_nulls(inner) for inner in part]
    return part


def _parse_all(texts: list[str | None] | None) -> list[Any] | None:
    """A null, of a row or of a value, stays one."""
    if texts is None:
        return None
    return [None if text is None else json.loads(text) for text in texts]


def _json_names(kind: pa.DataType) -> frozenset[str]:
    """The fields of a column's objects that are written as JSON."""
    return frozenset(field.name for field in _fields(kind) if is_json(field))


def _key_names(kind: pa.DataType) -> frozenset[str]:
    """The fields of a column's objects that are null where there is no such key."""
    marked = [field.name for field in _fields(kind) if _KEY in (field.metadata or {})]
    return _json_names(kind).union(marked)


def _fields(kind: Any) -> Iterable[pa.Field]:
    """Of the objects of a column: of its structs, or of those in its lists."""
    if pa.types.is_struct(kind):
        return kind
    return kind.value_type if is_messages(kind) else ()


def _has_json_items(kind: Any) -> bool:
    return _is_list(kind) and is_json(kind.value_field)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
