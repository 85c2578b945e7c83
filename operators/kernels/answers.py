"""The kernel of `answers`: a dataset column's texts as completions of their prompts.

Owns: reading the column, and the rows. Does not own: tokens (text.py), which rows are too long
(overlong.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import DataError
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.prompt_types import is_messages, is_token_ids
from dataflow.schema import Completion
from operators.data_shapes import is_chat
from operators.kernels.conversations import encode_conversations
from operators.kernels.overlong import RowRoom
from operators.kernels.text import Pairs, load_tokenizer, prompts_of


class DatasetAnswers:
    """params: column, overlong. models: `tokenizer`, the Model whose directory has it."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Read the tokenizer. Raises DataError if it is malformed, or has no end token."""
        self._name, self._column = node.name, node.params["column"]
        model = node.models["tokenizer"]
        self._tokenizer, self._session = load_tokenizer(model.base), session
        self._tokenizer.eos()  # raises if there is none: every answer ends with it
        self._room = RowRoom.of(node, model.name)

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch of all rows that fit. Raises DataError for a row without an answer."""
        rows = chunk.inputs["prompt"]
        self._require_texts(rows)
        pairs = self._tokenised(rows)
        stay, prompt, (completion, mask) = self._room.fitted(
            pairs.prompt, (pairs.completion, pairs.mask), rows.keys, self._session
        )
        plain = not is_messages(rows.array(self._column).type)
        texts = (
            self._tokenizer.without_end(rows.array(self._column).to_pylist())
            if plain and completion is pairs.completion
            else self._tokenizer.decode(completion)
        )
        columns = {"prompt_ids": prompt, "completion_ids": completion, "completion_mask": mask}
        if len(stay):
            yield Batch.make(rows.keys.take(stay), {**columns, "completion": texts}, Completion)

    def close(self) -> None:
        """Nothing to close."""

    def _tokenised(self, rows: Batch) -> Pairs:
        """Raises DataError for messages that answer a prompt that is text."""
        prompt, said = rows.array("prompt"), prompts_of(rows.array(self._column))
        talks = is_messages(prompt.type)
        if not talks and not is_messages(rows.array(self._column).type):
            return self._tokenizer.encode_pairs(self._tokenizer.encode_column(prompt), said)  # type: ignore[arg-type]
        if not talks:
            kind = "token ids" if is_token_ids(prompt.type) else "text"
            raise DataError(
                f"{self._name}: expected text in column {self._column!r}, as the prompts are"
                f" {kind}, found lists of messages. Fix: prompts that are messages, too."
            )
        asked = prompts_of(prompt)
        turns = [self._turns(*each) for each in zip(asked, said, strict=True)]
        first = [len(prompt) for prompt in asked]
        keys = rows.keys.rows()

        def place(row: int) -> str:
            return f"{self._name}: row {keys[row]}"

        return encode_conversations(self._tokenizer, turns, first, True, place)

    def _turns(self, prompt: Any, answer: Any) -> list[dict[str, Any]]:
        """The conversation of a prompt with its answer."""
        if prompt and prompt[-1]["role"] == "assistant":
            raise DataError(
                f"{self._name}: expected a prompt that the assistant is to answer, found one that"
                f" ends in its turn: {prompt[-1]['content']!r:.60}. Fix: the whole answer in column"
                f" {self._column!r}, and the prompt without its beginning."
            )
        said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        return [*prompt, *said]

    def _require_texts(self, rows: Batch) -> None:
        """Raises DataError for a column of other values, and for a null."""
        column = rows.array(self._column)
        if not (pa.types.is_string(column.type) or is_chat(column.type)):
            raise DataError(
                f"{self._name}: expected texts in column {self._column!r}, found {column.type}."
                " Fix: a column of answers."
            )
        missing = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
        if len(missing):
            raise DataError(
                f"{self._name}: row {rows.keys.rows()[missing[0]]}: expected an answer in column"
                f" {self._column!r}, found null ({len(missing)} of {len(rows)} rows). Fix: leave"
                f" such rows out, or give each a {self._column}."
            )
