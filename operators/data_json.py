"""Values parsed from JSON as an Arrow array, nested ones in a form that keeps them as they are.

Owns: which values are conversations, and which fields of objects Arrow would change. Does not own:
the lines and records that they are on (data_lines.py, data_csv.py), parts of a content
(data_parts.py), what a mark on a field means (dataflow/prompt_types.py).

A struct of Arrow gives each object the fields of all, in one order and of one type each: a tool
call would have nulls for the arguments of other tools. A field that some objects lack is therefore
marked. It is kept as JSON if objects in it differ, too, or if it is null elsewhere; and so is, in
conversations, all that is no text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa

from dataflow.prompt_types import is_json, is_messages, json_field, key_field
from operators.data_parts import COLUMNS, CONTENT, are_texts, joined_text

_PLAIN = ("role", "from", *CONTENT)
"""Fields that are texts, or wrong."""


def is_conversation_column(values: Sequence[Any]) -> bool:
    """Whether all values are lists of messages, and one has a message; nulls count for nothing."""
    rows = [value for value in values if value is not None]
    return any(rows) and all(map(_is_conversation, rows))


def json_array(name: str, values: Sequence[Any], place: Callable[[int], str]) -> pa.Array:
    """The values of a column as Arrow. place: of a row, for errors.

    Raises DataError for a part of a message's content that is no text, in the columns that Models
    read, and what Arrow raises for values of several types.
    """
    texts = _PLAIN if name in COLUMNS else ()
    if not is_conversation_column(values):
        return _with_marks(pa.array(values), values, texts, frozenset())
    joined = values
    if name in COLUMNS or all(map(_has_texts_alone, values)):
        joined = [_with_text(row, place, index) for index, row in enumerate(values)]
    names = _names_as_json(joined)
    column = pa.array([_with_json(row, names) for row in joined] if names else joined)
    return _with_marks(column, joined, texts, names)


def _with_marks(
    column: Any, rows: Sequence[Any], texts: Sequence[str], written: frozenset[str]
) -> pa.Array:
    """The column with marks on fields that Arrow alone would change. texts: those that stay texts.
    written: those that are JSON in the column, and not yet in the rows.
    """
    kind = column.type
    if pa.types.is_struct(kind):
        fields = _marked(kind, _without_none(rows), texts, written)
        if not _has_marks(fields):
            return column
        names = _json_names(fields)
        return pa.array([_object_with_json(row, names) for row in rows], pa.struct(fields))
    if is_messages(kind):
        objects = _without_none(chain.from_iterable(_without_none(rows)))
        fields = _marked(kind.value_type, objects, texts, written)
        if not _has_marks(fields):
            return column
        names = _json_names(fields)
        return pa.array([_with_json(row, names) for row in rows], pa.list_(pa.struct(fields)))
    if pa.types.is_list(kind) and _lacks_keys(kind, rows):
        return pa.array([_items_as_json(row) for row in rows], pa.list_(json_field("item")))
    return column


def _marked(
    kind: Any, objects: Sequence[Any], texts: Sequence[str], written: frozenset[str]
) -> list[pa.Field]:
    """The fields of these objects, each with the mark that it needs."""
    fields = []
    for field in kind:
        values = [each[field.name] for each in objects if field.name in each]
        is_absent = len(values) < len(objects)
        is_null = is_absent and any(value is None for value in values)
        needs_json = is_null or _lacks_keys(field.type, values)
        if field.name in written or (needs_json and field.name not in texts):
            fields.append(json_field(field.name))
        elif is_absent and not is_null:
            fields.append(key_field(field.name, field.type))
        else:
            fields.append(field)
    return fields


def _lacks_keys(kind: Any, values: Sequence[Any]) -> bool:
    """Whether one of the objects in these values has not all fields of its struct."""
    if not _has_struct(kind):
        return False
    present = _without_none(values)
    if pa.types.is_list(kind):
        return _lacks_keys(kind.value_type, list(chain.from_iterable(present)))
    if any(len(each) < kind.num_fields for each in present):
        return True
    return any(_lacks_keys(field.type, [each[field.name] for each in present]) for field in kind)


def _has_struct(kind: Any) -> bool:
    if pa.types.is_list(kind):
        return _has_struct(kind.value_type)
    return pa.types.is_struct(kind)


def _has_marks(fields: Iterable[pa.Field]) -> bool:
    return any(field.metadata for field in fields)


def _json_names(fields: Iterable[pa.Field]) -> frozenset[str]:
    return frozenset(field.name for field in fields if is_json(field))


def _without_none(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or "from" in value)


def _with_text(row: Any, place: Callable[[int], str], index: int) -> Any:
    """A conversation in which no content is a list of parts."""
    if not any(map(_has_parts, row or ())):
        return row
    messages = []
    for message in row:
        lists = [name for name in CONTENT if isinstance(message.get(name), list)]
        texts = {name: joined_text(message[name], place(index)) for name in lists}
        messages.append({**message, **texts})
    return messages


def _has_texts_alone(row: Any) -> bool:
    contents = (message.get(name) for message in row or () for name in CONTENT)
    return all(are_texts(content) for content in contents if isinstance(content, list))


def _has_parts(message: dict[str, Any]) -> bool:
    return type(message.get("content")) is list or type(message.get("value")) is list


def _names_as_json(rows: Sequence[Any]) -> frozenset[str]:
    """Fields with a value that is no text."""
    names: set[str] = set()
    for message in chain.from_iterable(filter(None, rows)):
        for name, value in message.items():
            if type(value) is not str and value is not None:
                names.add(name)
    return frozenset(names.difference(_PLAIN))


def _with_json(row: Any, names: frozenset[str]) -> Any:
    return None if row is None else [_object_with_json(each, names) for each in row]


def _object_with_json(each: Any, names: frozenset[str]) -> Any:
    if each is None:
        return None
    return {name: _as_json(v) if name in names else v for name, v in each.items()}


def _items_as_json(row: Any) -> Any:
    return None if row is None else [None if item is None else _as_json(item) for item in row]


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
