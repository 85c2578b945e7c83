"""Values parsed from JSON as an Arrow array, conversations in a form that keeps them as they are.

Owns: which values are conversations, and their fields. Does not own: the lines and records that
they are on (data_lines.py, data_csv.py), parts of a content (data_parts.py).

A struct of Arrow gives each message the fields of all messages, in one order and of one type each:
a tool call would have nulls for the arguments of other tools. In conversations, what is no text is
therefore kept as JSON (dataflow/prompt_types.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa

from dataflow.prompt_types import json_field
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
    if not is_conversation_column(values):
        return pa.array(values)
    joined = values
    if name in COLUMNS or all(map(_has_texts_alone, values)):
        joined = [_with_text(row, place, index) for index, row in enumerate(values)]
    names = _names_as_json(joined)
    if not names:
        return pa.array(joined)
    column = pa.array([_with_json(row, names) for row in joined])
    fields = [json_field(f.name) if f.name in names else f for f in column.type.value_type]
    return column.cast(pa.list_(pa.struct(fields)))


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
    if row is None:
        return None
    return [{name: _written(name, message[name], names) for name in message} for message in row]


def _written(name: str, value: Any, names: frozenset[str]) -> Any:
    if name not in names or value is None:
        return value
    return json.dumps(value, ensure_ascii=False)
