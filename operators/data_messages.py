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
    column_with_text,
    has_other_parts,
    has_parts,
    kind_with_text,
    list_lengths,
    lists_like,
    refuse_other_parts,
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
    item = kind.value_type
    names = {field.name for field in item} if pa.types.is_struct(item) else set()
    return set(_FIELDS) <= names and not names & set(_FIELDS.values())


def columns_in_messages(columns: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """The columns of a source whose rows go through `table_in_messages`."""
    plain = {
        name: kind_with_text(kind) if has_parts(kind) else kind for name, kind in columns.items()
    }
    found = {
        name: _as_chat(kind) if name in COLUMNS and is_sharegpt(kind) else kind
        for name, kind in plain.items()
    }
    if CONVERSATIONS in found and "messages" not in found and is_chat(found[CONVERSATIONS]):
        found = {"messages" if n == CONVERSATIONS else n: kind for n, kind in found.items()}
    return found


def table_in_messages(table: pa.Table, place: Callable[[int], str]) -> pa.Table:
    """The table with ShareGPT's lists as messages, parts of a content as its text, and
    `conversations` under the name `messages`. place: of a row, for errors.

    Raises DataError for a role that is none of ROLES, and for a part that is no text.
    """
    for index, field in enumerate(table.schema):
        if has_parts(field.type):
            column = table.column(index).combine_chunks()
            if field.name in COLUMNS:
                refuse_other_parts(column, field.name, place)
            if not has_other_parts(column):
                table = table.set_column(index, field.name, column_with_text(column))
    for index, field in enumerate(table.schema):
        if field.name in COLUMNS and is_sharegpt(field.type):
            chat = _translated(table.column(index).combine_chunks(), field.name, place)
            table = table.set_column(index, field.name, chat)
    kinds = {field.name: field.type for field in table.schema}
    return table.rename_columns(list(columns_in_messages(kinds)))


def columns_with_prompt(columns: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """The columns of a source of prompts whose rows go through `table_with_prompt`."""
    if "prompt" in columns or not is_chat(columns.get("messages", pa.null())):
        return dict(columns)
    return {"prompt": columns["messages"], **columns}


def table_with_prompt(table: pa.Table) -> pa.Table:
    """The table with a column `prompt`; without one it is `messages`, up to the last turn if that
    is the assistant's: what is to be answered again.
    """
    kinds = {field.name: field.type for field in table.schema}
    if "prompt" in kinds or "prompt" not in columns_with_prompt(kinds):
        return table
    column: Any = table.column("messages").combine_chunks()
    lengths = list_lengths(column)
    messages, ends = column.flatten(), np.cumsum(lengths) - 1
    said = np.flatnonzero(lengths)
    roles = messages.field("role").take(pa.array(ends[said]))
    answered = said[pc.fill_null(pc.equal(roles, "assistant"), False).to_numpy(False)]
    keep = np.ones(len(messages), dtype=bool)
    keep[ends[answered]] = False
    lengths[answered] -= 1
    prompt = lists_like(column, messages.filter(pa.array(keep)), lengths)
    return table.add_column(0, "prompt", prompt)


def _as_chat(kind: Any) -> pa.DataType:
    fields = [f.with_name(_FIELDS.get(f.name, f.name)) for f in kind.value_type]
    of = pa.large_list if pa.types.is_large_list(kind) else pa.list_
    return of(pa.struct(fields))


def _translated(column: Any, name: str, place: Callable[[int], str]) -> pa.Array:
    """ShareGPT's messages with our fields and roles."""
    messages = column.flatten()
    spoken = messages.field("from")
    index = pc.index_in(spoken, pa.array(list(ROLES), spoken.type))
    unknown = pc.and_(spoken.is_valid(), index.is_null()).to_numpy(False)
    if unknown.any():
        at = int(np.flatnonzero(unknown)[0])
        row = int(column.value_parent_indices()[at].as_py())
        raise DataError(
            f"{place(row)}: {name}: expected `from` to be {', '.join(ROLES)}, found"
            f" {spoken[at].as_py()!r:.60}. Fix: one of these for each message, or messages with"
            " role and content."
        )
    roles = pa.array(list(ROLES.values()), spoken.type).take(index)
    arrays = [roles if f.name == "from" else messages.field(f.name) for f in messages.type]
    fields = list(_as_chat(column.type).value_type)  # type: ignore[attr-defined]
    return lists_like(
        column, pa.StructArray.from_arrays(arrays, fields=fields), list_lengths(column)
    )
