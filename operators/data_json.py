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
from operators.data_parts import COLUMNS, CONTENT, are_texts, join_texts

_PLAIN = ("role", "from", *CONTENT)
"""Fields that are texts, or wrong."""


def is_conversation_column(values: Sequence[Any]) -> bool:
    """Whether all values are lists of messages, and one has a message; nulls count for nothing."""
    rows = _without_none(values)
    return any(rows) and all(map(_is_conversation, rows))


def make_json_array(name: str, values: Sequence[Any], place: Callable[[int], str]) -> pa.Array:
    """Make an Arrow array of the values of a column. place: of a row, for errors.

    Raises DataError for a part of a message's content that is no text, in the columns that Models
    read, and what Arrow raises for values of several types.
    """
    texts = _PLAIN if name in COLUMNS else ()
    if not is_conversation_column(values):
        return _mark_column(pa.array(values), values, texts, frozenset())
    rows = values
    if name in COLUMNS or all(map(_has_texts_alone, values)):
        rows = [_join_parts(row, place, index) for index, row in enumerate(values)]
    json_names = _find_json_names(rows)
    if json_names:
        column = pa.array([_write_conversation(row, json_names) for row in rows])
    else:
        column = pa.array(rows)
    return _mark_column(column, rows, texts, json_names)


def _mark_column(
    column: Any, rows: Sequence[Any], texts: Sequence[str], written: frozenset[str]
) -> pa.Array:
    """Mark the fields that Arrow alone would change. texts: those that stay texts. written: those
    that are JSON in the column, and not yet in the rows.
    """
    kind = column.type
    if pa.types.is_struct(kind):
        fields = _mark_fields(kind, _without_none(rows), texts, written)
        if not _has_marks(fields):
            return column
        names = _json_names(fields)
        return pa.array([_write_object(row, names) for row in rows], pa.struct(fields))
    if is_messages(kind):
        objects = _without_none(chain.from_iterable(_without_none(rows)))
        fields = _mark_fields(kind.value_type, objects, texts, written)
        if not _has_marks(fields):
            return column
        names = _json_names(fields)
        conversations = [_write_conversation(row, names) for row in rows]
        return pa.array(conversations, pa.list_(pa.struct(fields)))
    if pa.types.is_list(kind) and _lacks_keys(kind, rows):
        return pa.array([_write_list(row) for row in rows], pa.list_(json_field("item")))
    return column


def _mark_fields(
    kind: Any, objects: Sequence[Any], texts: Sequence[str], written: frozenset[str]
) -> list[pa.Field]:
    """The fields of these objects, each with the mark that it needs."""
    fields: list[pa.Field] = []
    for field in kind:
        values = [each[field.name] for each in objects if field.name in each]
        is_absent = len(values) < len(objects)
        is_null = is_absent and any(each is None for each in values)
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
    return any(_lacks_keys(field.type, _pick(field.name, present)) for field in kind)


def _pick(name: str, objects: Sequence[Any]) -> list[Any]:
    return [each[name] for each in objects]


def _has_struct(kind: Any) -> bool:
    if pa.types.is_list(kind):
        return _has_struct(kind.value_type)
    return pa.types.is_struct(kind)


def _has_marks(fields: Iterable[pa.Field]) -> bool:
    return any(field.metadata for field in fields)


def _json_names(fields: Iterable[pa.Field]) -> frozenset[str]:
    return frozenset(field.name for field in fields if is_json(field))


def _without_none(values: Iterable[Any]) -> list[Any]:
    return [each for each in values if each is not None]


def _is_conversation(row: Any) -> bool:
    return isinstance(row, list) and all(map(_is_message, row))


def _is_message(element: Any) -> bool:
    return isinstance(element, dict) and ("role" in element or "from" in element)


def _join_parts(row: Any, place: Callable[[int], str], index: int) -> Any:
    """A conversation in which no content is a list of parts."""
    if not any(map(_has_parts, row or ())):
        return row
    messages: list[dict[str, Any]] = []
    for message in row:
        joined_message = dict(message)
        for name in CONTENT:
            if isinstance(message.get(name), list):
                joined_message[name] = join_texts(message[name], place(index))
        messages.append(joined_message)
    return messages


def _has_texts_alone(row: Any) -> bool:
    for message in row or ():
        for name in CONTENT:
            content = message.get(name)
            if isinstance(content, list) and not are_texts(content):
                return False
    return True


def _has_parts(message: dict[str, Any]) -> bool:
    return type(message.get("content")) is list or type(message.get("value")) is list


def _find_json_names(rows: Sequence[Any]) -> frozenset[str]:
    """Find the fields with a value that is no text."""
    names: set[str] = set()
    for message in chain.from_iterable(filter(None, rows)):
        for name, content in message.items():
            if type(content) is not str and content is not None:
                names.add(name)
    return frozenset(names.difference(_PLAIN))


def _write_conversation(row: Any, names: frozenset[str]) -> Any:
    """The messages with these fields as JSON."""
    if row is None:
        return None
    return [_write_object(message, names) for message in row]


def _write_object(fields: Any, names: frozenset[str]) -> Any:
    """The object with these fields as JSON."""
    if fields is None:
        return None
    written = dict(fields)
    for name in names.intersection(fields):
        written[name] = _write_json(fields[name])
    return written


def _write_list(row: Any) -> Any:
    """The list with each element as JSON."""
    if row is None:
        return None
    return [None if element is None else _write_json(element) for element in row]


def _write_json(element: Any) -> str:
    return json.dumps(element, ensure_ascii=False)
