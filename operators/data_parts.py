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


def joined_text(parts: Sequence[Any], where: str) -> str:
    """The text of a message's parts. Raises DataError, naming the first that is no text."""
    texts = []
    for part in parts:
        if not _is_text_part(part):
            raise DataError(_other_part(where, _kind_of(part)))
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
    return bool(_parts_fields(kind))


def kind_with_text(kind: Any) -> pa.DataType:
    """The type of a column after `column_with_text`."""
    names = _parts_fields(kind)
    fields = [pa.field(f.name, pa.utf8()) if f.name in names else f for f in kind.value_type]
    list_of = pa.large_list if pa.types.is_large_list(kind) else pa.list_
    return list_of(pa.struct(fields))


def column_with_text(column: Any) -> pa.Array:
    """Messages with the text of their parts as content. All parts have to be text."""
    messages = column.flatten()
    names = _parts_fields(column.type)
    arrays = []
    for field in messages.type:
        values = messages.field(field.name)
        arrays.append(_joined(values) if field.name in names else values)
    fields = list(kind_with_text(column.type).value_type)  # type: ignore[attr-defined]
    texts = pa.StructArray.from_arrays(arrays, fields=fields)
    return lists_like(column, texts, list_lengths(column))


def list_lengths(column: Any) -> np.ndarray:
    """int64 [rows]: values of each list; 0 for null."""
    return pc.fill_null(column.value_lengths(), 0).to_numpy(False).astype(np.int64)


def lists_like(column: Any, values: pa.Array, lengths: np.ndarray) -> pa.Array:
    """Lists of these lengths, null where the column is."""
    large = pa.types.is_large_list(column.type)
    kind = pa.LargeListArray if large else pa.ListArray
    offsets = pa.array(
        np.concatenate([[0], np.cumsum(lengths)]), pa.int64() if large else pa.int32()
    )
    return kind.from_arrays(offsets, values, mask=column.is_null())


def refuse_other_parts(column: Any, name: str, place: Callable[[int], str]) -> None:
    """Raise DataError for a part that is no text. The parts of the column may lack their text."""
    other = _first_other_part(column)
    if other is not None:
        row, shown = other
        raise DataError(_other_part(f"{place(row)}: {name}", shown))


def has_other_parts(column: Any) -> bool:
    """Whether a column of messages has a part that is no text."""
    return _first_other_part(column) is not None


def _first_other_part(column: Any) -> tuple[int, str] | None:
    """The row of the first part that is no text, and the part in words."""
    messages, rows = column.flatten(), column.value_parent_indices().to_numpy()
    for field in _parts_fields(column.type):
        lists = messages.field(field)
        parts, owners = lists.flatten(), lists.value_parent_indices().to_numpy()
        wrong = pc.fill_null(pc.not_equal(parts.field("type"), "text"), True)
        if parts.type.get_field_index("text") >= 0:
            wrong = pc.or_(wrong, parts.field("text").is_null())
        odd = np.flatnonzero(wrong.to_numpy(False))
        if len(odd):
            part = parts[odd[0]].as_py()
            return int(rows[owners[odd[0]]]), _kind_of(part)
    return None


def refuse_other_parts_in(files: Sequence[Path], name: str) -> None:
    """Raise DataError for a part that is no text; reads only the types of the parts of Parquet."""
    for path in files:
        with pq.ParquetFile(path) as file:
            paths = [file.schema.column(i).path for i in range(len(file.schema.names))]
            kinds = [p for p in paths if p.startswith(f"{name}.") and p.endswith(".type")]
            leaves = [p for p in kinds if any(f".{field}." in p for field in CONTENT)]
            table = file.read(columns=leaves)
        if leaves:
            types = table.column(name).combine_chunks()
            refuse_other_parts(types, name, lambda row, path=path: f"{path}: row {row}")


def _parts_fields(kind: Any) -> list[str]:
    fields = kind.value_type if is_messages(kind) else ()
    return [field.name for field in fields if field.name in CONTENT and _is_parts(field.type)]


def _is_parts(kind: Any) -> bool:
    if not is_messages(kind):
        return False
    return "type" in {field.name for field in kind.value_type}


def _joined(lists: Any) -> pa.Array:
    """The text of each list; null where the list is."""
    texts = lists.flatten().field("text").cast(pa.utf8())
    return pc.binary_join(lists_like(lists, texts, list_lengths(lists)), "")


def _kind_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is None:
        return f"{part!r:.60}"
    if kind == "text":
        return "a part of type 'text' without a text"
    return f"a part of type {kind!r:.60}"


def _other_part(where: str, shown: str) -> str:
    return (
        f'{where}: expected content as text, or as parts {{"type": "text", "text": ...}}, found'
        f" {shown}. Fix: leave the row out, or give its text alone; images and other media are"
        " not read."
    )
