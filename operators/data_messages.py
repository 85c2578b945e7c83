"""Conversations in users' data: ShareGPT's form, and prompts out of whole conversations.

Owns: turning `from` and `value` into role and content, and which turns of a conversation are the
prompt. Does not own: content as a list of parts (data_parts.py), reading files (data_files.py),
chat templates (kernels/text.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from dataflow.errors import DataError
from operators.data_parts import (
    COLUMNS,
    has_other_parts,
    has_parts,
    join_column_parts,
    list_lengths,
    make_lists_like,
    refuse_other_parts,
    type_of_joined,
)
from operators.data_shapes import is_chat

pc: Any = pyarrow.compute
"""Its functions are made as it is imported, so no type checker knows them."""

CONVERSATIONS = "conversations"

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""ShareGPT's `from` -> the role of a message."""

_FIELDS = {"from": "role", "value": "content"}


def is_sharegpt(kind: pa.DataType) -> bool:
    """Whether a column of this type has lists of messages with `from` and `value`."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    message = kind.value_type
    if not pa.types.is_struct(message):
        return False
    names = {field.name for field in message}
    return set(_FIELDS) <= names and not names & set(_FIELDS.values())


def columns_in_messages(columns: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """The columns of a source whose rows go through `table_in_messages`."""
    kinds: dict[str, pa.DataType] = {}
    for name, kind in columns.items():
        if has_parts(kind):
            kind = type_of_joined(kind)
        if name in COLUMNS and is_sharegpt(kind):
            kind = _chat_type(kind)
        kinds[name] = kind
    if "messages" in kinds or not is_chat(kinds.get(CONVERSATIONS, pa.null())):
        return kinds
    # In its place: a table's columns are renamed in the order of these.
    return {"messages" if name == CONVERSATIONS else name: kinds[name] for name in kinds}


def table_in_messages(table: pa.Table, place: Callable[[int], str]) -> pa.Table:
    """Rewrite ShareGPT's lists as messages, parts of a content as its text, and
    `conversations` under the name `messages`. place: of a row, for errors.

    Raises DataError for a role that is none of ROLES, and for a part that is no text.
    """
    for index, field in enumerate(table.schema):
        if has_parts(field.type):
            column = table.column(index).combine_chunks()
            if field.name in COLUMNS:
                refuse_other_parts(column, field.name, place)
            if not has_other_parts(column):
                table = table.set_column(index, field.name, join_column_parts(column))
    for index, field in enumerate(table.schema):
        if field.name in COLUMNS and is_sharegpt(field.type):
            chat = _translate(table.column(index).combine_chunks(), field.name, place)
            table = table.set_column(index, field.name, chat)
    kinds = {field.name: field.type for field in table.schema}
    return table.rename_columns(list(columns_in_messages(kinds)))


def columns_with_prompt(columns: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """The columns of a source of prompts whose rows go through `table_with_prompt`."""
    if "prompt" in columns or not is_chat(columns.get("messages", pa.null())):
        return dict(columns)
    return {"prompt": columns["messages"], **columns}


def table_with_prompt(table: pa.Table) -> pa.Table:
    """Add a column `prompt` to a table without one: its `messages`, up to the last turn if that is
    the assistant's, which is to be answered again.
    """
    kinds = {field.name: field.type for field in table.schema}
    if "prompt" in kinds or "prompt" not in columns_with_prompt(kinds):
        return table
    column: Any = table.column("messages").combine_chunks()
    lengths = list_lengths(column)
    messages, last_messages = column.flatten(), np.cumsum(lengths) - 1
    rows = np.flatnonzero(lengths)
    last_roles = messages.field("role").take(pa.array(last_messages[rows]))
    is_answered = pc.fill_null(pc.equal(last_roles, "assistant"), False)
    answered_rows = rows[is_answered.to_numpy(False)]
    is_prompt = np.ones(len(messages), dtype=bool)
    is_prompt[last_messages[answered_rows]] = False
    lengths[answered_rows] -= 1
    prompt = make_lists_like(column, messages.filter(pa.array(is_prompt)), lengths)
    return table.add_column(0, "prompt", prompt)


def _chat_type(kind: Any) -> pa.DataType:
    """The type of a column after `_translate`."""
    fields = [field.with_name(_FIELDS.get(field.name, field.name)) for field in kind.value_type]
    list_of = pa.large_list if pa.types.is_large_list(kind) else pa.list_
    return list_of(pa.struct(fields))


def _translate(column: Any, name: str, place: Callable[[int], str]) -> pa.Array:
    """ShareGPT's messages with our fields and roles."""
    messages = column.flatten()
    speakers = messages.field("from")
    index = pc.index_in(speakers, pa.array(list(ROLES), speakers.type))
    # A null is no role, and no mistake: it stays null.
    is_unknown = pc.and_(speakers.is_valid(), index.is_null()).to_numpy(False)
    if is_unknown.any():
        first = int(np.flatnonzero(is_unknown)[0])
        row = int(column.value_parent_indices()[first].as_py())
        raise DataError(
            f"{place(row)}: {name}: expected `from` to be {', '.join(ROLES)}, found"
            f" {speakers[first].as_py()!r:.60}. Fix: one of these for each message, or messages"
            " with role and content."
        )
    roles = pa.array(list(ROLES.values()), speakers.type).take(index)
    arrays: list[pa.Array] = []
    for field in messages.type:
        if field.name == "from":
            arrays.append(roles)
        else:
            arrays.append(messages.field(field.name))
    fields = list(_chat_type(column.type).value_type)  # type: ignore[attr-defined]
    translated = pa.StructArray.from_arrays(arrays, fields=fields)
    return make_lists_like(column, translated, list_lengths(column))
