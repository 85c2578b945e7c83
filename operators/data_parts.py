"""Messages whose content is a list of parts, as OpenAI writes them: `[{"type": "text", ...}]`.

Owns: joining parts that are text, and refusing all others (images, audio). Does not own: reading
files (data_files.py), which columns have messages (data_shapes.py).

Parts are joined without a character between them, as chat templates that read parts join them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from dataflow.errors import DataError
from dataflow.prompt_types import is_messages

pc: Any = pyarrow.compute
"""Its functions are made as it is imported, so no type checker knows them."""

COLUMNS = ("prompt", "completion", "messages", "conversations", "chosen", "rejected")
"""Columns whose messages are read by Models; others may have parts that are no text."""

CONTENT = ("content", "value")
"""Fields of messages that may have parts; the second is ShareGPT's."""


def join_texts(parts: Sequence[Any], where: str) -> str:
    """Join the texts of a message's parts. Raises DataError, naming the first that is no text."""
    texts: list[str] = []
    for part in parts:
        if not _is_text_part(part):
            raise DataError(_describe_refusal(where, _describe_part(part)))
        texts.append(part["text"])
    return "".join(texts)


def are_texts(parts: Sequence[Any]) -> bool:
    """Whether all parts of a message are text."""
    return all(map(_is_text_part, parts))


def _is_text_part(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def has_parts(kind: pa.DataType) -> bool:
    """Whether a column of this type has messages whose content is a list of parts."""
    return bool(_names_of_parts(kind))


def type_of_joined(kind: Any) -> pa.DataType:
    """The type of a column after `join_column_parts`."""
    names = _names_of_parts(kind)
    fields: list[pa.Field] = []
    for field in kind.value_type:
        if field.name in names:
            fields.append(pa.field(field.name, pa.utf8()))
        else:
            fields.append(field)
    list_of = pa.large_list if pa.types.is_large_list(kind) else pa.list_
    return list_of(pa.struct(fields))


def join_column_parts(column: Any) -> pa.Array:
    """Join the parts of each message to its content. All parts have to be text."""
    messages = column.flatten()
    names = _names_of_parts(column.type)
    arrays: list[pa.Array] = []
    for field in messages.type:
        contents = messages.field(field.name)
        if field.name in names:
            contents = _join_lists(contents)
        arrays.append(contents)
    fields = list(type_of_joined(column.type).value_type)  # type: ignore[attr-defined]
    texts = pa.StructArray.from_arrays(arrays, fields=fields)
    return make_lists_like(column, texts, list_lengths(column))


def list_lengths(column: Any) -> np.ndarray:
    """int64 [rows]: values of each list; 0 for null."""
    return pc.fill_null(column.value_lengths(), 0).to_numpy(False).astype(np.int64)


def make_lists_like(column: Any, values: pa.Array, lengths: np.ndarray) -> pa.Array:
    """Make lists of these lengths, null where the column is."""
    kind, offset_type = pa.ListArray, pa.int32()
    if pa.types.is_large_list(column.type):
        kind, offset_type = pa.LargeListArray, pa.int64()
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), offset_type)
    return kind.from_arrays(offsets, values, mask=column.is_null())


def refuse_other_parts(column: Any, name: str, place: Callable[[int], str]) -> None:
    """Raise DataError for a part that is no text. The parts of the column may lack their text."""
    other = _find_other_part(column)
    if other is not None:
        row, description = other
        raise DataError(_describe_refusal(f"{place(row)}: {name}", description))


def has_other_parts(column: Any) -> bool:
    """Whether a column of messages has a part that is no text."""
    return _find_other_part(column) is not None


def _find_other_part(column: Any) -> tuple[int, str] | None:
    """The row of the first part that is no text, and the part in words."""
    messages, message_rows = column.flatten(), column.value_parent_indices().to_numpy()
    for field in _names_of_parts(column.type):
        lists = messages.field(field)
        parts, part_messages = lists.flatten(), lists.value_parent_indices().to_numpy()
        is_other = pc.fill_null(pc.not_equal(parts.field("type"), "text"), True)
        if parts.type.get_field_index("text") >= 0:
            is_other = pc.or_(is_other, parts.field("text").is_null())
        others = np.flatnonzero(is_other.to_numpy(False))
        if len(others):
            first = others[0]
            row = int(message_rows[part_messages[first]])
            return row, _describe_part(parts[first].as_py())
    return None


def refuse_other_parts_in(files: Sequence[Path], name: str) -> None:
    """Raise DataError for a part that is no text; reads only the types of the parts of Parquet."""
    for path in files:
        with pq.ParquetFile(path) as file:
            columns = (file.schema.column(i).path for i in range(len(file.schema.names)))
            type_columns = [column for column in columns if _is_type_of_part(column, name)]
            table = file.read(columns=type_columns)
        if type_columns:
            types = table.column(name).combine_chunks()
            refuse_other_parts(types, name, lambda row, path=path: f"{path}: row {row}")


def _is_type_of_part(column: str, name: str) -> bool:
    """Whether a leaf of a Parquet schema has the types of the parts of this column."""
    if not (column.startswith(f"{name}.") and column.endswith(".type")):
        return False
    return any(f".{field}." in column for field in CONTENT)


def _names_of_parts(kind: Any) -> list[str]:
    """The fields of messages whose content is a list of parts."""
    if not is_messages(kind):
        return []
    fields = (field for field in kind.value_type if field.name in CONTENT)
    return [field.name for field in fields if _is_parts(field.type)]


def _is_parts(kind: Any) -> bool:
    if not is_messages(kind):
        return False
    return "type" in {field.name for field in kind.value_type}


def _join_lists(lists: Any) -> pa.Array:
    """The text of each list; null where the list is."""
    texts = lists.flatten().field("text").cast(pa.utf8())
    return pc.binary_join(make_lists_like(lists, texts, list_lengths(lists)), "")


def _describe_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is None:
        return f"{part!r:.60}"
    if kind == "text":
        return "a part of type 'text' without a text"
    return f"a part of type {kind!r:.60}"


def _describe_refusal(where: str, description: str) -> str:
    return (
        f'{where}: expected content as text, or as parts {{"type": "text", "text": ...}}, found'
        f" {description}. Fix: leave the row out, or give its text alone; images and other media"
        " are not read."
    )
