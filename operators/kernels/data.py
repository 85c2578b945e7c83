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

from dataflow.batch import Batch, as_ragged
from dataflow.errors import DataError
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.operator import DATA_ROW
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
        table = self.table.take(pa.array(index))
        arrays = [table.column(name).combine_chunks() for name in table.column_names]
        return pa.RecordBatch.from_arrays(arrays, names=table.column_names)

    def select(self, names: Iterable[str]) -> SourceRows:
        """Only these columns. Raises DataError that lists the columns there are."""
        unique_names = list(dict.fromkeys(names))
        for name in unique_names:
            if name not in self.table.column_names:
                raise DataError(
                    f"{self.name}: no column {name!r}, data has:"
                    f" {', '.join(self.table.column_names)}"
                )
        return replace(self, table=self.table.select(unique_names).combine_chunks())


class Order:
    """Which row is at which position: epoch after epoch, each shuffled or in file order."""

    def __init__(self, rows: int, seed: int, name: str, shuffle: bool) -> None:
        self._rows = rows
        self._seed = seed
        self._name = name
        self._shuffle = shuffle
        self._permutations: dict[int, np.ndarray] = {}

    def at(self, positions: np.ndarray) -> np.ndarray:
        """int64 [positions]: row indices."""
        epochs, index = np.divmod(positions, self._rows)
        if not self._shuffle:
            return index
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            index[in_epoch] = self._permutation(epoch)[index[in_epoch]]
        return index

    def _permutation(self, epoch: int) -> np.ndarray:
        """int64 [rows]; that of an epoch asked for long ago is drawn again, the same."""
        if epoch not in self._permutations:
            while len(self._permutations) >= _KEPT_EPOCHS:
                oldest = next(iter(self._permutations))
                self._permutations.pop(oldest)
            key = int(stream_seed(self._seed, f"{self._name}/epoch {epoch}"))
            generator = np.random.Generator(np.random.Philox(key=key))
            self._permutations[epoch] = generator.permutation(self._rows)
        return self._permutations[epoch]


class DataCursor:
    """A source's place in its data: `_data` in the order `_order`, both set as it opens."""

    _data: SourceRows
    _order: Order
    _next = 0

    def _begin(self, source: SourceRows, node: KernelNode, seed: int) -> None:
        """Begin at the first position of these rows, in the node's own order."""
        self._data = source
        shuffle = node.params.get("shuffle", True)
        self._order = Order(len(source), seed, node.name, shuffle)

    @property
    def rows(self) -> int:
        """Rows in the data: positions in one epoch."""
        return len(self._data)

    def _take(self, chunk: Chunk) -> pa.RecordBatch:
        """Take the rows of the chunk's positions, which count as produced from now on."""
        if len(chunk.keys):
            self._next = max(self._next, int(chunk.keys.position.max()) + 1)
        return self._data.take(self._order.at(chunk.keys.position))

    def _row_columns(self, chunk: Chunk, names: Iterable[str]) -> dict[str, pa.Array]:
        """Which rows of the data the chunk's positions stand for, if that is among these names."""
        if DATA_ROW not in names:
            return {}
        return {DATA_ROW: pa.array(self._order.at(chunk.keys.position), pa.int64())}

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
        has_text = "prompt_text" in rows.table.column_names
        self._decodes_text = "prompt_text" in node.returns and not has_text
        self._returns = node.returns
        not_in_data = {DATA_ROW} if has_text else {DATA_ROW, "prompt_text"}
        columns_to_read = [name for name in node.returns if name not in not_in_data]
        self._begin(rows.select(("prompt", *columns_to_read)), node, session.seed)
        if self._decodes_text:
            self._tokenizer = load_tokenizer(node.models["tokenizer"].base)

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch: the rows of the chunk's positions. Another attempt gives the same row."""
        rows = self._take(chunk)
        columns: dict[str, Any] = dict(zip(rows.schema.names, rows.columns, strict=True))
        columns |= self._row_columns(chunk, self._returns)
        if self._decodes_text:
            prompt_ids = as_ragged(columns["prompt"])
            columns["prompt_text"] = pa.array(self._tokenizer.decode(prompt_ids))
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
        self._returns = node.returns
        self._extra_columns = list_data_columns(node, Completion)
        source = open_demonstrations(
            node.params["data"], node.params.get("split"), self._extra_columns
        )
        self._begin(source, node, session.seed)
        model = node.models["tokenizer"]
        self._tokenizer = load_tokenizer(model.base)
        self._session = session
        self._tokenizer.eos()  # raises if there is none: every demonstration ends with it
        self._room = RowRoom.of(node, model.name)
        self._assistant_only = node.params.get("assistant_only", True)
        # The first row now, so that data of a wrong form stops the run before its first Step.
        self._tokenize(self._data.take(np.arange(1)), self._data.place)

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch: the rows of the chunk's positions."""
        rows = self._take(chunk)
        pairs = self._tokenize(rows, self._places(chunk))
        fitting_rows, prompt, (completion, mask) = self._room.fit(
            pairs.prompt, (pairs.completion, pairs.mask), chunk.keys, self._session
        )
        all_fit = len(fitting_rows) == len(rows) and completion is pairs.completion
        if all_fit and _has_text_answers(rows):
            texts = self._tokenizer.strip_ends(rows.column("completion").to_pylist())
        else:
            texts = self._tokenizer.decode(completion)
        columns: dict[str, Any] = {
            "prompt_ids": prompt,
            "completion_ids": completion,
            "completion_mask": mask,
        }
        for name in self._extra_columns:
            columns[name] = rows.column(name).take(pa.array(fitting_rows))
        for name, array in self._row_columns(chunk, self._returns).items():
            columns[name] = array.take(pa.array(fitting_rows))
        columns["completion"] = texts
        if len(fitting_rows):
            yield Batch.make(chunk.keys.take(fitting_rows), columns, Completion)

    def _tokenize(self, rows: pa.RecordBatch, place: Callable[[int], str]) -> Pairs:
        return tokenize_demonstrations(
            self._tokenizer, self._data.shape, rows, self._assistant_only, place
        )


def tokenize_demonstrations(
    tokenizer: Tokenizer,
    shape: data_shapes.Shape,
    rows: pa.RecordBatch,
    assistant_only: bool,
    place: Callable[[int], str],
) -> Pairs:
    """Tokenize the prompt and completion of each row. place: of a row, for errors.

    Raises DataError for a row that cannot be tokenized.
    """
    if shape == "text":
        return tokenizer.encode_texts(rows.column("text").to_pylist())
    if _has_text_answers(rows):
        prompt_texts = rows.column("prompt").to_pylist()
        completion_texts = rows.column("completion").to_pylist()
        return tokenizer.encode_pairs(prompt_texts, completion_texts)
    if shape == "messages":
        turns = messages_of(rows.column("messages"))
        first = [_find_first_answer(row, index, place) for index, row in enumerate(turns)]
    else:
        prompts = messages_of(rows.column("prompt"))
        completions = messages_of(rows.column("completion"))
        turns = [[*before, *after] for before, after in zip(prompts, completions, strict=True)]
        first = [len(prompt) for prompt in prompts]
    return encode_conversations(tokenizer, turns, first, assistant_only, place)


def list_data_columns(node: KernelNode, produced: type[Schema]) -> tuple[str, ...]:
    """The columns of the data that somebody reads, besides those that the source produces."""
    columns_made = {*produced.columns, DATA_ROW}
    return tuple(name for name in node.returns if name not in columns_made)


def open_rows(dataset: str, split: str | None = None) -> SourceRows:
    """Read the rows for `prompts`: of Parquet, JSONL or CSV, a task, or a data set of the hub.

    Raises DataError naming the file, and the columns or the line found.
    """
    table = data_files.read_prompts(dataset, split)
    shape = data_shapes.prompt_shape(dataset, types_of(table))
    refuse_nulls(dataset, split, table, "prompt")
    refuse_silent_messages(dataset, split, table, "prompt")
    kind = table.schema.field("prompt").type
    if is_token_ids(kind):
        _refuse_odd_ids(dataset, split, table)
        kind = IDS
    elif not is_messages(kind):
        kind = pa.utf8()
    prompts = table.column("prompt").cast(kind)
    table = table.set_column(table.column_names.index("prompt"), "prompt", prompts)
    return SourceRows(name=dataset, shape=shape, table=table)


IDS = pa.large_list(pa.field("item", pa.int32(), nullable=False))
"""Prompts by token ids, as they travel."""


def _refuse_odd_ids(dataset: str, split: str | None, table: pa.Table) -> None:
    """Raise DataError for a prompt without token ids, with a null, or with what is no id."""
    column: Any = table.column("prompt").combine_chunks()
    ids = column.flatten()
    row = column.value_parent_indices().to_numpy()
    missing = ids.is_null().to_numpy(zero_copy_only=False)
    numbers = ids.fill_null(0).to_numpy(zero_copy_only=False)
    odd = (numbers < 0) | (numbers > np.iinfo(np.int32).max)
    rows_by_problem = {
        "found none": np.flatnonzero(column.value_lengths().to_numpy() == 0),
        "found null": row[missing],
    }
    if odd.any():
        rows_by_problem[f"found {numbers[odd][0]}"] = row[odd]
    for problem, rows in rows_by_problem.items():
        if len(rows):
            where = data_files.row_place(dataset, split, int(rows[0]))
            raise DataError(
                f"{where}: prompt: expected token ids, whole numbers from 0 on, {problem}. Fix:"
                " leave the row out, or write the ids that a tokenizer gives."
            )


def open_demonstrations(
    dataset: str, split: str | None = None, also: Iterable[str] = ()
) -> SourceRows:
    """Read the rows for `demonstrations`. Their columns are those that make one, and `also`.

    Raises DataError naming the file and the columns found.
    """
    table = data_files.read_table(dataset, split)
    shape = data_shapes.demonstration_shape(dataset, types_of(table))
    names = ("prompt", "completion") if shape in ("trl", "verl") else (shape,)
    for name in names:
        refuse_nulls(dataset, split, table, name)
        refuse_silent_messages(dataset, split, table, name)
    if "prompt" in names and _is_messages(table, "prompt") != _is_messages(table, "completion"):
        kinds = [f"{name}: {table.schema.field(name).type}" for name in names]
        raise DataError(
            f"{dataset}: expected prompt and completion both as text or both as messages, found"
            f" {', '.join(kinds)}."
        )
    return SourceRows(name=dataset, shape=shape, table=table).select((*names, *also))


def types_of(table: pa.Table) -> dict[str, pa.DataType]:
    """The type of each column of a table."""
    return {field.name: field.type for field in table.schema}


def _is_messages(table: pa.Table | pa.RecordBatch, name: str) -> bool:
    return is_messages(table.schema.field(name).type)


def _has_text_answers(rows: pa.RecordBatch) -> bool:
    return "completion" in rows.schema.names and not _is_messages(rows, "completion")


def refuse_nulls(dataset: str, split: str | None, table: pa.Table, name: str) -> None:
    """Raise DataError for a null, naming its row."""
    column = table.column(name)
    if column.null_count:
        first = pc.index(column.is_null(), True).as_py()
        where = data_files.row_place(dataset, split, first)
        fix = f"leave such rows out, or give each a {name}"
        raise DataError(
            f"{where}: expected a {name}, found null ({column.null_count} of {len(table)} rows)."
            f" Fix: {fix}."
        )


def refuse_silent_messages(dataset: str, split: str | None, table: pa.Table, name: str) -> None:
    """Raise DataError for no messages, or one without role or content (tool calls excepted)."""
    if not _is_messages(table, name):
        return
    column: Any = table.column(name).combine_chunks()
    messages = column.flatten()
    row = column.value_parent_indices().to_numpy()
    silent = _is_null(messages, "content")
    if messages.type.get_field_index("tool_calls") >= 0:
        silent &= _is_null(messages, "tool_calls")
    empty_rows = np.flatnonzero(column.value_lengths().to_numpy() == 0)
    rows_by_problem = {
        "expected messages, found none": empty_rows,
        "expected a role in each message, found null": row[_is_null(messages, "role")],
        "expected content in each message, found null": row[silent],
    }
    for problem, rows in rows_by_problem.items():
        if len(rows):
            where = data_files.row_place(dataset, split, int(rows[0]))
            raise DataError(
                f"{where}: {name}: {problem}. Fix: leave the row out, or give it what is missing."
            )


def _is_null(messages: Any, field: str) -> np.ndarray:
    """bool [messages]: where the field is null; of a field that is JSON also where its text is."""
    column = messages.field(field)
    missing = column.is_null().to_numpy(zero_copy_only=False)
    if is_json(messages.type.field(field)):
        null_texts = [text == "null" for text in column.to_pylist()]
        missing = missing | np.array(null_texts, dtype=bool)
    return missing


def _find_first_answer(turns: Sequence[Message], row: int, place: Callable[[int], str]) -> int:
    """Find the index of the assistant's first turn. Raises DataError if there is none, or no turn
    before it. place: called for a wrong row alone, as it reads the file.
    """
    first = next((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), 0)
    if not first:
        raise DataError(
            f"{place(row)}: expected messages in which an assistant answers, found"
            f" {turns!r:.120}. Fix: leave the row out."
        )
    return first
