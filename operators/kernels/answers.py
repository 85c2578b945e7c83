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
    """Kernel of `answers`: one row of Completion for each prompt whose answer fits.

    params: column, overlong. models: `tokenizer`, the Model whose directory has it.
    """

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Read the tokenizer. Raises DataError if it is malformed, or has no end token."""
        self._name = node.name
        self._column = node.params["column"]
        model = node.models["tokenizer"]
        self._tokenizer = load_tokenizer(model.base)
        self._session = session
        self._tokenizer.eos()  # raises if there is none: every answer ends with it
        self._room = RowRoom.of(node, model.name)

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch of all rows that fit. Raises DataError for a row without an answer."""
        rows = chunk.inputs["prompt"]
        self._require_texts(rows)
        pairs = self._tokenize(rows)
        fitting_rows, prompt, (completion, mask) = self._room.fit(
            pairs.prompt, (pairs.completion, pairs.mask), rows.keys, self._session
        )
        answers = rows.array(self._column)
        # RowRoom hands the same object back where no row was dropped or cut.
        if completion is pairs.completion and not is_messages(answers.type):
            texts = self._tokenizer.strip_ends(answers.to_pylist())
        else:
            texts = self._tokenizer.decode(completion)
        columns = {
            "prompt_ids": prompt,
            "completion_ids": completion,
            "completion_mask": mask,
            "completion": texts,
        }
        if len(fitting_rows):
            yield Batch.make(rows.keys.take(fitting_rows), columns, Completion)

    def close(self) -> None:
        """Nothing to close."""

    def _tokenize(self, rows: Batch) -> Pairs:
        """Tokenize prompts and answers. Raises DataError for messages that answer a prompt that is
        text.
        """
        column = rows.array("prompt")
        answers = prompts_of(rows.array(self._column))
        has_conversations = is_messages(column.type)
        if not has_conversations and not is_messages(rows.array(self._column).type):
            prompt_ids = self._tokenizer.encode_column(column)
            return self._tokenizer.encode_pairs(prompt_ids, answers)  # type: ignore[arg-type]
        if not has_conversations:
            kind = "token ids" if is_token_ids(column.type) else "text"
            raise DataError(
                f"{self._name}: expected text in column {self._column!r}, as the prompts are"
                f" {kind}, found lists of messages. Fix: prompts that are messages, too."
            )
        prompts = prompts_of(column)
        turns = [self._join(*each) for each in zip(prompts, answers, strict=True)]
        first = [len(prompt) for prompt in prompts]
        keys = rows.keys.rows()

        def place(row: int) -> str:
            return f"{self._name}: row {keys[row]}"

        return encode_conversations(self._tokenizer, turns, first, True, place)

    def _join(self, prompt: Any, answer: Any) -> list[dict[str, Any]]:
        """Join a prompt and its answer to one conversation. Raises DataError if the prompt ends in
        the assistant's turn.
        """
        if prompt and prompt[-1]["role"] == "assistant":
            raise DataError(
                f"{self._name}: expected a prompt that the assistant is to answer, found one that"
                f" ends in its turn: {prompt[-1]['content']!r:.60}. Fix: the whole answer in column"
                f" {self._column!r}, and the prompt without its beginning."
            )
        if isinstance(answer, str):
            return [*prompt, {"role": "assistant", "content": answer}]
        return [*prompt, *answer]

    def _require_texts(self, rows: Batch) -> None:
        """Raise DataError for a column of other values, and for a null."""
        column = rows.array(self._column)
        if not (pa.types.is_string(column.type) or is_chat(column.type)):
            raise DataError(
                f"{self._name}: expected texts in column {self._column!r}, found {column.type}."
                " Fix: a column of answers."
            )
        missing = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
        if len(missing):
            key = rows.keys.rows()[missing[0]]
            raise DataError(
                f"{self._name}: row {key}: expected an answer in column"
                f" {self._column!r}, found null ({len(missing)} of {len(rows)} rows). Fix: leave"
                f" such rows out, or give each a {self._column}."
            )
