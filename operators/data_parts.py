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

CONTENT = ("content", "value")
"""Fields of messages that may have parts; the second is ShareGPT's."""

_TEXT = {"type", "text"}


def joined_text(parts: Sequence[Any], where: str) -> str:
    """The text of a message's parts. Raises DataError, naming the first that is no text."""
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise DataError(_other_part(where, _kind_of(part)))
        if not isinstance(part.get("text"), str):
            raise DataError(_other_part(where, "a part of type 'text' without a text"))
        texts.append(part["text"])
    return "".join(texts)


def has_parts(kind: pa.DataType) -> bool:
    """Whether a column of this type has messages whose content is a list of parts."""
    return bool(_parts_fields(kind))


def kind_with_text(kind: Any) -> pa.DataType:
    """The type of a column after `column_with_text`."""
    names = _parts_fields(kind)
    fields = [pa.field(f.name, pa.utf8()) if f.name in names else f for f in kind.value_type]
    return _list_of(kind)(pa.struct(fields))


def column_with_text(column: Any, name: str, place: Callable[[int], str]) -> pa.Array:
    """Messages with the text of their parts as content. place: of a row, for errors.

    Raises DataError, naming the first part that is no text.
    """
    refuse_other_parts(column, name, place)
    messages = column.flatten()
    names = _parts_fields(column.type)
    arrays = []
    for field in messages.type:
        values = messages.field(field.name)
        arrays.append(_joined(values) if field.name in names else values)
    fields = list(kind_with_text(column.type).value_type)  # type: ignore[attr-defined]
    texts = pa.StructArray.from_arrays(arrays, fields=fields)
    lengths = pc.fill_null(column.value_lengths(), 0).to_numpy(False)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), column.offsets.type)
    return type(column).from_arrays(offsets, texts, mask=column.is_null())


def refuse_other_parts(column: Any, name: str, place: Callable[[int], str]) -> None:
    """Raise DataError for a part that is no text. The parts of the column may lack their text."""
    messages, rows = column.flatten(), column.value_parent_indices().to_numpy()
    for field in _parts_fields(column.type):
        lists = messages.field(field)
        parts, owners = lists.flatten(), lists.value_parent_indices().to_numpy()
        kinds = parts.field("type")
        wrong = pc.fill_null(pc.not_equal(kinds, "text"), True)
        silent = pa.array(np.zeros(len(parts), bool))
        if parts.type.get_field_index("text") >= 0:
            silent = parts.field("text").is_null()
        found = np.flatnonzero(pc.or_(wrong, silent).to_numpy(False))
        if len(found):
            part = parts[found[0]].as_py()
            shown = _kind_of(part)
            if part["type"] == "text":
                shown = "a part of type 'text' without a text"
            where = f"{place(int(rows[owners[found[0]]]))}: {name}"
            raise DataError(_other_part(where, shown))


def refuse_other_parts_in(files: Sequence[Path], name: str) -> None:
    """Raise DataError for a part that is no text; reads only the types of the parts of Parquet."""
    for path in files:
        with pq.ParquetFile(path) as file:
            paths = [file.schema.column(i).path for i in range(len(file.schema.names))]
            kinds = [p for p in paths if p.startswith(f"{name}.") and p.endswith(".type")]
            leaves = [p for p in kinds if any(f".{field}." in p for field in CONTENT)]
            types = file.read(columns=leaves).column(name).combine_chunks() if leaves else None
        if types is not None:
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
    texts = lists.flatten().field("text")
    lengths = pc.fill_null(lists.value_lengths(), 0).to_numpy(False)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    found = pa.LargeListArray.from_arrays(offsets, texts.cast(pa.utf8()), mask=lists.is_null())
    return pc.binary_join(found, "")


def _list_of(kind: pa.DataType) -> Any:
    return pa.large_list if pa.types.is_large_list(kind) else pa.list_


def _kind_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    return f"a part of type {kind!r:.60}" if kind is not None else f"{part!r:.60}"


def _other_part(where: str, found: str) -> str:
    return (
        f'{where}: expected content as text, or as parts {{"type": "text", "text": ...}}, found'
        f" {found}. Fix: leave the row out, or give its text alone; images and other media are"
        " not read."
    )
