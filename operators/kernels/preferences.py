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
from operators.kernels.conversations import encode_conversations
from operators.kernels.data import (
    DataCursor,
    Order,
    SourceRows,
    columns_asked_for,
    refuse_nulls,
    refuse_silent_messages,
    types_of,
)
from operators.kernels.overlong import RowRoom, rows_of
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
        self._also = columns_asked_for(node, _Pair)
        self._data = open_preferences(node.params["data"], also=self._also)
        self._order = Order(
            len(self._data), session.seed, node.name, node.params.get("shuffle", True)
        )
        model = node.models["tokenizer"]
        self._tokenizer, self._session = load_tokenizer(model.base), session
        self._tokenizer.eos()  # raises if there is none: every answer ends with it
        self._room = RowRoom.of(node, model.name)
        first = self._data.take(np.arange(1))
        tokenized_preferences(self._data, first, self._tokenizer, self._data.place)

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch: both rows of the chunk's positions. A pair goes if one of its rows is too
        long.
        """
        found = self._taken(chunk)
        pairs = tokenized_preferences(self._data, found, self._tokenizer, self._places(chunk))
        keys = chunk.keys.expand(2)
        given = (pairs.completion, pairs.mask)
        stay, _, (completion, mask) = self._room.fitted(pairs.prompt, given, keys, self._session)
        both = np.flatnonzero(np.isin(stay ^ 1, stay))
        stay, completion, mask = stay[both], rows_of(completion, both), rows_of(mask, both)
        columns = {
            "prompt_ids": rows_of(pairs.prompt, stay),
            "completion_ids": completion,
            "completion_mask": mask,
            "completion": self._tokenizer.decode(completion),
            "keep": np.ones(len(stay), dtype=np.uint8),
            "sign": (1 - 2 * (stay % 2)).astype(np.int8),
        }
        columns |= {name: found.column(name).take(pa.array(stay // 2)) for name in self._also}
        if len(stay):
            yield Batch.make(keys.take(stay), columns, _Pair)


def open_preferences(data: str, split: str | None = None, also: Iterable[str] = ()) -> SourceRows:
    """The rows for `preferences`, with the columns that make one, and those that are read.

    Raises DataError naming the file and the columns, or the row, found.
    """
    table = data_files.read_table(data, split)
    shape = data_shapes.preference_shape(data, types_of(table))
    names = ("prompt", "chosen", "rejected") if shape == "pairs" else ("chosen", "rejected")
    for name in names:
        refuse_nulls(data, split, table, name)
        refuse_silent_messages(data, split, table, name)
    rows = SourceRows(name=data, shape=shape, table=table).select((*names, *also))
    if shape == "implicit":
        _refuse_apart(rows, split)
    return rows


def _refuse_apart(rows: SourceRows, split: str | None) -> None:
    """Raise DataError for two conversations without a common beginning, which is their prompt."""
    for index, (chosen, rejected) in enumerate(_conversations(rows.table, "chosen", "rejected")):
        if not common(chosen, rejected):
            raise DataError(
                f"{data_files.row_place(rows.name, split, index)}: expected chosen and rejected to"
                f" begin with one prompt, found {_start(chosen)} and {_start(rejected)}. Fix: a"
                " column 'prompt', with the answers alone in the other two."
            )


def _start(conversation: Conversation) -> str:
    return f"{conversation if isinstance(conversation, str) else conversation[0]!r:.60}"


def tokenized_preferences(
    rows: SourceRows, found: pa.RecordBatch, tokenizer: Tokenizer, place: Callable[[int], str]
) -> Pairs:
    """The answers of each row, chosen before rejected, with the prompt of both.

    Raises DataError for a row that cannot be tokenized.
    """
    if rows.shape == "pairs":
        asked = prompts_of(found.column("prompt"))
        answers = list(_conversations(found, "chosen", "rejected"))
    else:
        whole = list(_conversations(found, "chosen", "rejected"))
        cuts = [common(*pair) for pair in whole]
        asked = [pair[0][:cut] for pair, cut in zip(whole, cuts, strict=True)]
        answers = [(a[cut:], b[cut:]) for (a, b), cut in zip(whole, cuts, strict=True)]
    prompts: list[Any] = list(chain.from_iterable((prompt, prompt) for prompt in asked))
    said: list[Any] = list(chain.from_iterable(answers))
    if prompts and isinstance(prompts[0], str):
        return tokenizer.encode_pairs(prompts, said)
    turns = [[*prompt, *answer] for prompt, answer in zip(prompts, said, strict=True)]
    first = [len(prompt) for prompt in prompts]
    return encode_conversations(tokenizer, turns, first, True, lambda row: place(row // 2))


def _conversations(
    table: pa.Table | pa.RecordBatch, *names: str
) -> Iterator[tuple[Conversation, ...]]:
    columns = (table.column(name) for name in names)
    plain: list[Sequence[Conversation]] = [
        prompts_of(c.combine_chunks() if isinstance(c, pa.ChunkedArray) else c) for c in columns
    ]
    return zip(*plain, strict=True)


def common(chosen: Conversation, rejected: Conversation) -> int:
    """How many characters, or messages, two conversations have in common at their beginning: the
    prompt, as in TRL's extract_prompt (trl/data_utils.py).

    An answer has at least one message, and of a text also the space before it.
    """
    most = min(len(chosen), len(rejected))
    count = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    if not isinstance(chosen, str):
        return min(count, most - 1)
    return count - 1 if count and chosen[count - 1] == " " else count
