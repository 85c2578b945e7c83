"""Sources: prompts to answer and demonstrations to imitate.

Owns: which row of the data is at each source position, and producing it. Does not own: finding and
parsing files (operators/data_files.py), preferences (preferences.py), which positions are requested
and when (the engine's admission).

A row depends only on the seed, the node's name and its position, so it can be produced at any time,
again, and in any process; the only state is the cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.batch import Batch, ragged
from dataflow.errors import DataError
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.prompt_types import Message, is_json, is_messages, is_token_ids, messages_of
from dataflow.randomness import stream_seed
from dataflow.schema import Completion, Prompt, Schema
from operators import data_files, data_shapes
from operators.kernels.conversations import encode_conversations
from operators.kernels.overlong import RowRoom
from operators.kernels.text import Pairs, Tokenizer, load_tokenizer

_KEPT_EPOCHS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """The rows of a source, all in memory."""

    name: str
    shape: data_shapes.Shape
    table: pa.Table

    def __len__(self) -> int:
        return len(self.table)

    def place(self, row: int) -> str:
        """Where a row is, for errors; of data of which all rows are read."""
        return data_files.row_place(self.name, None, row)

    def take(self, index: np.ndarray) -> pa.RecordBatch:
        """These rows, in this order; repeats are allowed."""
        found = self.table.take(pa.array(index))
        arrays = [found.column(name).combine_chunks() for name in found.column_names]
        return pa.RecordBatch.from_arrays(arrays, names=found.column_names)

    def select(self, names: Iterable[str]) -> SourceRows:
        """Only these columns. Raises DataError that lists the columns there are."""
        wanted = list(dict.fromkeys(names))
        for name in wanted:
            if name not in self.table.column_names:
                raise DataError(
                    f"{self.name}: no column {name!r}, data has:"
                    f" {', '.join(self.table.column_names)}"
                )
        return replace(self, table=self.table.select(wanted).combine_chunks())


class Order:
    """Which row is at which position: epoch after epoch, each shuffled or in file order."""

    def __init__(self, rows: int, seed: int, name: str, shuffle: bool) -> None:
        self._rows, self._seed, self._name, self._shuffle = rows, seed, name, shuffle
        self._kept: dict[int, np.ndarray] = {}

    def at(self, positions: np.ndarray) -> np.ndarray:
        """int64 [positions]: row indices."""
        epochs, index = np.divmod(positions, self._rows)
        if not self._shuffle:
            return index
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            index[here] = self._permutation(epoch)[index[here]]
        return index

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._kept:
            while len(self._kept) >= _KEPT_EPOCHS:
                self._kept.pop(next(iter(self._kept)))
            key = int(stream_seed(self._seed, f"{self._name}/epoch {epoch}"))
            self._kept[epoch] = np.random.Generator(np.random.Philox(key=key)).permutation(
                self._rows
            )
        return self._kept[epoch]


class DataCursor:
    """A source's place in its data: `_data` in the order `_order`, both set as it opens."""

    _data: SourceRows
    _order: Order
    _next = 0

    @property
    def rows(self) -> int:
        """Rows in the data: positions in one epoch."""
        return len(self._data)

    def _taken(self, chunk: Chunk) -> pa.RecordBatch:
        """The rows of the chunk's positions, which are produced from now on."""
        if len(chunk.keys):
            self._next = max(self._next, int(chunk.keys.position.max()) + 1)
        return self._data.take(self._order.at(chunk.keys.position))

    def _places(self, chunk: Chunk) -> Callable[[int], str]:
        """Where each row of the chunk is in the data, for errors."""
        rows = self._order.at(chunk.keys.position)
        return lambda index: self._data.place(int(rows[index]))

    def position(self) -> int:
        """The first position that was not produced yet."""
        return self._next

    def seek(self, position: int) -> None:
        """Continue at a position that `position` returned."""
        self._next = position

    def close(self) -> None:
        """Nothing to close."""


class Prompts(DataCursor):
    """Kernel of `prompts`: one row of Prompt per position, with the dataset columns that are read.

    params: data, split, shuffle. The order is a permutation per epoch; with shuffle=False, the
    file's. models: for prompts by token ids that somebody reads as text, `tokenizer`, the Model
    whose directory has it.
    """

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Read the data. Raises DataError if it has no prompts or lacks a column that is read."""
        rows = open_rows(node.params["data"], node.params.get("split"))
        self._told = "prompt_text" in node.returns and "prompt_text" not in rows.table.column_names
        wanted = [name for name in node.returns if name != "prompt_text" or not self._told]
        self._data = rows.select(("prompt", *wanted))
        if self._told:
            self._tokenizer = load_tokenizer(node.models["tokenizer"].base)
        self._order = Order(len(rows), session.seed, node.name, node.params.get("shuffle", True))

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch: the rows of the chunk's positions. Another attempt gives the same row."""
        found = self._taken(chunk)
        columns: dict[str, Any] = dict(zip(found.schema.names, found.columns, strict=True))
        if self._told:
            columns["prompt_text"] = pa.array(self._tokenizer.decode(ragged(columns["prompt"])))
        yield Batch.make(chunk.keys, columns, Prompt)


class Demonstrations(DataCursor):
    """Kernel of `demonstrations`: one row of Completion per position, already tokenized.

    params: data, split, shuffle, assistant_only, overlong. models: `tokenizer`, the Model whose
    directory has it. The data has `prompt` with `completion` (texts, or message lists), or
    `messages`, or `text`; text.py says what each becomes.
    """

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Read data and tokenizer. Raises DataError if either is malformed, or if the first row
        cannot be tokenized.
        """
        self._also = columns_asked_for(node, Completion)
        self._data = open_demonstrations(node.params["data"], node.params.get("split"), self._also)
        self._order = Order(
            len(self._data), session.seed, node.name, node.params.get("shuffle", True)
        )
        model = node.models["tokenizer"]
        self._tokenizer, self._session = load_tokenizer(model.base), session
        self._tokenizer.eos()  # raises if there is none: every demonstration ends with it
        self._room = RowRoom.of(node, model.name)
        self._assistant_only = node.params.get("assistant_only", True)
        self._tokenized(self._data.take(np.arange(1)), self._data.place)

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch: the rows of the chunk's positions."""
        found = self._taken(chunk)
        pairs = self._tokenized(found, self._places(chunk))
        given = (pairs.completion, pairs.mask)
        stay, prompt, (completion, mask) = self._room.fitted(
            pairs.prompt, given, chunk.keys, self._session
        )
        whole = len(stay) == len(found) and completion is pairs.completion
        texts = (
            self._tokenizer.without_end(found.column("completion").to_pylist())
            if whole and _has_text_answers(found)
            else self._tokenizer.decode(completion)
        )
        columns = {"prompt_ids": prompt, "completion_ids": completion, "completion_mask": mask}
        columns |= {name: found.column(name).take(pa.array(stay)) for name in self._also}
        if len(stay):
            yield Batch.make(chunk.keys.take(stay), {**columns, "completion": texts}, Completion)

    def _tokenized(self, found: pa.RecordBatch, place: Callable[[int], str]) -> Pairs:
        return tokenized_demonstrations(
            self._tokenizer, self._data.shape, found, self._assistant_only, place
        )


def tokenized_demonstrations(
    tokenizer: Tokenizer,
    shape: data_shapes.Shape,
    found: pa.RecordBatch,
    assistant_only: bool,
    place: Callable[[int], str],
) -> Pairs:
    """The prompt and completion of each row. place: of a row, for errors.

    Raises DataError for a row that cannot be tokenized.
    """
    if shape == "text":
        return tokenizer.encode_texts(found.column("text").to_pylist())
    if _has_text_answers(found):
        return tokenizer.encode_pairs(
            found.column("prompt").to_pylist(), found.column("completion").to_pylist()
        )
    if shape == "messages":
        turns = messages_of(found.column("messages"))
        first = [_first_answer(row, index, place) for index, row in enumerate(turns)]
    else:
        asked = messages_of(found.column("prompt"))
        answered = messages_of(found.column("completion"))
        turns = [[*a, *b] for a, b in zip(asked, answered, strict=True)]
        first = [len(row) for row in asked]
    return encode_conversations(tokenizer, turns, first, assistant_only, place)


def columns_asked_for(node: KernelNode, made: type[Schema]) -> tuple[str, ...]:
    """The columns of the data that somebody reads, besides those that the source makes."""
    return tuple(name for name in node.returns if name not in made.columns)


def open_rows(data: str, split: str | None = None) -> SourceRows:
    """The rows for `prompts`: of Parquet, JSONL or CSV, a task, or a data set of the hub.

    Raises DataError naming the file, and the columns or the line found.
    """
    table = data_files.read_prompts(data, split)
    shape = data_shapes.prompt_shape(data, types_of(table))
    refuse_nulls(data, split, table, "prompt")
    refuse_silent_messages(data, split, table, "prompt")
    kind = table.schema.field("prompt").type
    if is_token_ids(kind):
        _refuse_odd_ids(data, split, table)
        kind = IDS
    elif not is_messages(kind):
        kind = pa.utf8()
    prompts = table.column("prompt").cast(kind)
    table = table.set_column(table.column_names.index("prompt"), "prompt", prompts)
    return SourceRows(name=data, shape=shape, table=table)


IDS = pa.large_list(pa.field("item", pa.int32(), nullable=False))
"""Prompts by token ids, as they travel."""


def _refuse_odd_ids(data: str, split: str | None, table: pa.Table) -> None:
    """Raise DataError for a prompt without token ids, with a null, or with what is no id."""
    column: Any = table.column("prompt").combine_chunks()
    ids, row = column.flatten(), column.value_parent_indices().to_numpy()
    missing = ids.is_null().to_numpy(zero_copy_only=False)
    values = ids.fill_null(0).to_numpy(zero_copy_only=False)
    odd = (values < 0) | (values > np.iinfo(np.int32).max)
    wrong = {
        "found none": np.flatnonzero(column.value_lengths().to_numpy() == 0),
        "found null": row[missing],
        f"found {values[odd][0] if odd.any() else ''}": row[odd],
    }
    for found, rows in wrong.items():
        if len(rows):
            where = data_files.row_place(data, split, int(rows[0]))
            raise DataError(
                f"{where}: prompt: expected token ids, whole numbers from 0 on, {found}. Fix: leave"
                " the row out, or write the ids that a tokenizer gives."
            )


def open_demonstrations(
    data: str, split: str | None = None, also: Iterable[str] = ()
) -> SourceRows:
    """The rows for `demonstrations`, with the columns that make one, and those that are read.

    Raises DataError naming the file and the columns found.
    """
    table = data_files.read_table(data, split)
    shape = data_shapes.demonstration_shape(data, types_of(table))
    names = ("prompt", "completion") if shape in ("trl", "verl") else (shape,)
    for name in names:
        refuse_nulls(data, split, table, name)
        refuse_silent_messages(data, split, table, name)
    if "prompt" in names and _is_messages(table, "prompt") != _is_messages(table, "completion"):
        kinds = ", ".join(f"{name}: {table.schema.field(name).type}" for name in names)
        raise DataError(
            f"{data}: expected prompt and completion both as text or both as messages, found"
            f" {kinds}."
        )
    return SourceRows(name=data, shape=shape, table=table).select((*names, *also))


def types_of(table: pa.Table) -> dict[str, pa.DataType]:
    """The columns of a table."""
    return {field.name: field.type for field in table.schema}


def _is_messages(table: pa.Table | pa.RecordBatch, name: str) -> bool:
    return is_messages(table.schema.field(name).type)


def _has_text_answers(found: pa.RecordBatch) -> bool:
    return "completion" in found.schema.names and not _is_messages(found, "completion")


def refuse_nulls(data: str, split: str | None, table: pa.Table, name: str) -> None:
    """Raise DataError for a null, naming its row."""
    column = table.column(name)
    if column.null_count:
        where = data_files.row_place(data, split, pc.index(column.is_null(), True).as_py())
        fix = f"leave such rows out, or give each a {name}"
        raise DataError(
            f"{where}: expected a {name}, found null ({column.null_count} of {len(table)} rows)."
            f" Fix: {fix}."
        )


def refuse_silent_messages(data: str, split: str | None, table: pa.Table, name: str) -> None:
    """Raise DataError for no messages, or one without role or content (tool calls excepted)."""
    if not _is_messages(table, name):
        return
    column: Any = table.column(name).combine_chunks()
    messages, row = column.flatten(), column.value_parent_indices().to_numpy()
    silent = _nulls(messages, "content")
    if messages.type.get_field_index("tool_calls") >= 0:
        silent &= _nulls(messages, "tool_calls")
    wrong = {
        "expected messages, found none": np.flatnonzero(column.value_lengths().to_numpy() == 0),
        "expected a role in each message, found null": row[_nulls(messages, "role")],
        "expected content in each message, found null": row[silent],
    }
    for told, rows in wrong.items():
        if len(rows):
            where = data_files.row_place(data, split, int(rows[0]))
            raise DataError(
                f"{where}: {name}: {told}. Fix: leave the row out, or give it what is missing."
            )


def _nulls(messages: Any, field: str) -> np.ndarray:
    """bool [messages]."""
    values = messages.field(field)
    missing = values.is_null().to_numpy(zero_copy_only=False)
    if is_json(messages.type.field(field)):
        missing = missing | np.array([text == "null" for text in values.to_pylist()], dtype=bool)
    return missing


def _first_answer(turns: Sequence[Message], row: int, place: Callable[[int], str]) -> int:
    """place: asked for a wrong row alone, as it reads the file."""
    first = next((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), 0)
    if not first:
        raise DataError(
            f"{place(row)}: expected messages in which an assistant answers, found"
            f" {turns!r:.120}. Fix: leave the row out."
        )
    return first
