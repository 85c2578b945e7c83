"""How many tokens the prompts of a source can have, before anything tokenises them.

Owns: this bound, the bytes of prompts, what tells that files have changed. Does not own: reading
the data (data_files.py), tokens (kernels/text.py), counting them (kernels/token_counts.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from dataflow.errors import DataError
from dataflow.prompt_types import is_messages, is_token_ids
from operators import tasks
from operators.data_files import read_prompts, source_files

pc: Any = pyarrow.compute
"""Its functions are made as it is imported, so no type checker knows them."""

MARKS = 16
"""Tokens that a chat template or a tokenizer writes around a text: a beginning, a role, an end."""

Stamp = tuple[str, int, int]
"""Of a file: its path, when it was written, its size; of rows in no file: their digest."""

TEMPLATE = 1024
"""Tokens that a chat template writes of its own accord, a default system prompt among them."""


def longest_prompt(source: str, split: str | None) -> int | None:
    """The most tokens of a prompt. Of text it is a bound: no tokenizer makes more tokens of a text
    than it has bytes. None for a procedural task, and if the source cannot be read.
    """
    if tasks.is_task(source):
        return None
    try:
        return _find_longest(source, split, stamp_sources(source_files(source, split)))
    except (DataError, OSError, pa.ArrowInvalid):
        # Reported where its columns are read.
        return None


def stamp_sources(sources: Iterable[Path | str]) -> tuple[Stamp, ...]:
    """Stamp each source: what differs once one of these files has been written anew. Raises
    OSError.
    """
    return tuple(map(_stamp_source, sources))


def _stamp_source(source: Path | str) -> Stamp:
    if isinstance(source, str):
        return source, 0, 0
    status = source.stat()
    return str(source), status.st_mtime_ns, status.st_size


@lru_cache(maxsize=8)
def _find_longest(source: str, split: str | None, stamps: tuple[Stamp, ...]) -> int:
    """stamps: so that plans of the same files read them once."""
    column = read_prompts(source, split).column("prompt").combine_chunks()
    if is_token_ids(column.type):
        return _find_most(pc.list_value_length(column))
    marks = TEMPLATE if is_messages(column.type) else MARKS
    return _find_most(count_prompt_bytes(column)) + marks


def count_prompt_bytes(column: Any) -> Any:
    """Count the bytes of each prompt of a column that is no token ids; of a conversation with the
    marks around each message.
    """
    if is_messages(column.type):
        return _count_message_bytes(column)
    return pc.binary_length(column.cast(pa.large_utf8()))


def _count_message_bytes(column: Any) -> Any:
    """Count the bytes of each conversation, with the marks around each message."""
    texts = column.flatten()
    sizes = pa.array([MARKS] * len(texts), pa.int64())
    for field in texts.type:
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            length = pc.binary_length(texts.field(field.name)).cast(pa.int64())
            sizes = pc.add(sizes, pc.fill_null(length, 0))
    rows = pa.table({"row": pc.list_parent_indices(column), "size": sizes})
    return rows.group_by("row").aggregate([("size", "sum")]).column("size_sum")


def _find_most(lengths: Any) -> int:
    return int(pc.max(lengths).as_py() or 0)
