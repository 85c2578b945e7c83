"""The source of preferences: two answers to one prompt, one chosen and one rejected.

Owns: the prompt that two whole conversations begin with, and the rows of a pair. Does not own: the
order of positions and reading (data.py), tokens (text.py), which rows are too long (overlong.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import DataError
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.schema import Completion, Preference
from operators import data_files, data_shapes
from operators.kernels.conversations import count_same_beginning, encode_conversations
from operators.kernels.data import (
    DataCursor,
    SourceRows,
    list_data_columns,
    refuse_nulls,
    refuse_silent_messages,
    types_of,
)
from operators.kernels.overlong import RowRoom, take_rows
from operators.kernels.text import Pairs, Tokenizer, load_tokenizer, prompts_of

Conversation = str | list[Any]
"""A text, or a list of messages."""


class _Pair(Completion, Preference):
    """What a row of the source has."""


class Preferences(DataCursor):
    """Kernel of `preferences`: two rows of one group per position, already tokenized: the chosen
    answer, then the rejected one.

    params: data, shuffle, overlong. models: `tokenizer`, the Model whose directory has it.
    """

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Read data and tokenizer. Raises DataError if either is malformed, or if the first pair
        cannot be tokenized.
        """
        self._returns = node.returns
        self._extra_columns = list_data_columns(node, _Pair)
        source = open_preferences(node.params["data"], also=self._extra_columns)
        self._begin(source, node, session.seed)
        model = node.models["tokenizer"]
        self._tokenizer = load_tokenizer(model.base)
        self._session = session
        self._tokenizer.eos()  # raises if there is none: every answer ends with it
        self._room = RowRoom.of(node, model.name)
        # The first pair now, so that data of a wrong form stops the run before its first Step.
        first = self._data.take(np.arange(1))
        tokenize_preferences(self._tokenizer, self._data, first, self._data.place)

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch: both rows of the chunk's positions. A pair goes if one of its rows is too
        long.
        """
        source_rows = self._take(chunk)
        place = self._places(chunk)
        pairs = tokenize_preferences(self._tokenizer, self._data, source_rows, place)
        keys = chunk.keys.expand(2)
        fitting_rows, _, (completion, mask) = self._room.fit(
            pairs.prompt, (pairs.completion, pairs.mask), keys, self._session
        )
        # Rows 2i and 2i + 1 are a pair: each one's partner differs in the lowest bit.
        both = np.flatnonzero(np.isin(fitting_rows ^ 1, fitting_rows))
        rows = fitting_rows[both]
        completion = take_rows(completion, both)
        columns: dict[str, Any] = {
            "prompt_ids": take_rows(pairs.prompt, rows),
            "completion_ids": completion,
            "completion_mask": take_rows(mask, both),
            "completion": self._tokenizer.decode(completion),
            "keep": np.ones(len(rows), dtype=np.uint8),
            "sign": (1 - 2 * (rows % 2)).astype(np.int8),
        }
        for name in self._extra_columns:
            columns[name] = source_rows.column(name).take(pa.array(rows // 2))
        for name, array in self._row_columns(chunk, self._returns).items():
            columns[name] = array.take(pa.array(rows // 2))
        if len(rows):
            yield Batch.make(keys.take(rows), columns, _Pair)


def open_preferences(
    dataset: str, split: str | None = None, also: Iterable[str] = ()
) -> SourceRows:
    """Read the rows for `preferences`. Their columns are those that make one, and `also`.

    Raises DataError naming the file and the columns, or the row, found.
    """
    table = data_files.read_table(dataset, split)
    shape = data_shapes.preference_shape(dataset, types_of(table))
    names = ("prompt", "chosen", "rejected") if shape == "pairs" else ("chosen", "rejected")
    for name in names:
        refuse_nulls(dataset, split, table, name)
        refuse_silent_messages(dataset, split, table, name)
    rows = SourceRows(name=dataset, shape=shape, table=table).select((*names, *also))
    if shape == "implicit":
        _require_common_prompts(rows, split)
    return rows


def _require_common_prompts(rows: SourceRows, split: str | None) -> None:
    """Raise DataError for two conversations without a common beginning, which is their prompt."""
    for index, (chosen, rejected) in enumerate(_read_answers(rows.table)):
        if not find_prompt_length(chosen, rejected):
            raise DataError(
                f"{data_files.row_place(rows.name, split, index)}: expected chosen and rejected to"
                f" begin with one prompt, found {_start(chosen)} and {_start(rejected)}. Fix: a"
                " column 'prompt', with the answers alone in the other two."
            )


def _start(conversation: Conversation) -> str:
    if isinstance(conversation, str):
        return f"{conversation!r:.60}"
    return f"{conversation[0]!r:.60}"


def tokenize_preferences(
    tokenizer: Tokenizer,
    source: SourceRows,
    rows: pa.RecordBatch,
    place: Callable[[int], str],
) -> Pairs:
    """Tokenize the answers of each row, chosen before rejected, with the prompt of both.

    rows: some of the source. Raises DataError for a row that cannot be tokenized.
    """
    if source.shape == "pairs":
        prompts = prompts_of(rows.column("prompt"))
        answers = list(_read_answers(rows))
    else:
        prompts, answers = _split_conversations(rows)
    # Each prompt twice, once for each of its answers.
    row_prompts: list[Any] = list(chain.from_iterable((prompt, prompt) for prompt in prompts))
    row_answers: list[Any] = list(chain.from_iterable(answers))
    if row_prompts and isinstance(row_prompts[0], str):
        return tokenizer.encode_pairs(row_prompts, row_answers)
    turns = [[*prompt, *answer] for prompt, answer in zip(row_prompts, row_answers, strict=True)]
    first = [len(prompt) for prompt in row_prompts]
    return encode_conversations(tokenizer, turns, first, True, lambda row: place(row // 2))


def _split_conversations(
    rows: pa.RecordBatch,
) -> tuple[list[Conversation], list[tuple[Conversation, Conversation]]]:
    """Split each pair of whole conversations into its prompt and its two answers."""
    prompts: list[Conversation] = []
    answers: list[tuple[Conversation, Conversation]] = []
    for chosen, rejected in _read_answers(rows):
        cut = find_prompt_length(chosen, rejected)
        prompts.append(chosen[:cut])
        answers.append((chosen[cut:], rejected[cut:]))
    return prompts, answers


def _read_answers(
    table: pa.Table | pa.RecordBatch,
) -> Iterator[tuple[Conversation, Conversation]]:
    """The columns `chosen` and `rejected`, row by row."""
    chosen: Sequence[Conversation] = _read_column(table.column("chosen"))
    rejected: Sequence[Conversation] = _read_column(table.column("rejected"))
    return zip(chosen, rejected, strict=True)


def _read_column(column: pa.Array | pa.ChunkedArray) -> Sequence[Conversation]:
    if isinstance(column, pa.ChunkedArray):
        return prompts_of(column.combine_chunks())
    return prompts_of(column)


def find_prompt_length(chosen: Conversation, rejected: Conversation) -> int:
    """Find how many characters, or messages, two conversations have in common at their beginning:
    the prompt, as in TRL's extract_prompt (trl/data_utils.py).

    An answer has at least one message, and of a text also the space before it.
    """
    count = count_same_beginning(chosen, rejected)
    if not isinstance(chosen, str):
        return min(count, len(chosen) - 1, len(rejected) - 1)
    if count and chosen[count - 1] == " ":
        return count - 1
    return count
