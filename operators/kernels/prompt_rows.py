"""The kernel of `prompt_rows`: prompts as rows whose completion is the end token alone.

Owns: the rows. Does not own: tokens and templates (text.py), what happens to a prompt that is too
long (overlong.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dataflow.batch import Batch, Ragged
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.schema import Completion
from operators.kernels.overlong import Room
from operators.kernels.text import load_tokenizer


class PromptTokens:
    """Kernel of `prompt_rows`: one row of Completion for each prompt that fits.

    params: overlong, and positions of the Model that reads the rows. models: `tokenizer`, the Model
    whose directory has it. A prompt without tokens, as of an empty text, is the end token.
    """

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Read the tokenizer. Raises DataError if it is malformed, or has no end token."""
        model = node.models["tokenizer"]
        self._tokenizer = load_tokenizer(model.base)
        self._end = self._tokenizer.eos()
        self._session = session
        positions = node.params.get("positions")
        room = None if positions is None else positions - 1  # the end token takes one
        self._room = Room.of_scores(node, node.params.get("positions_of", model.name), room)

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch of all rows that fit. Raises DataError for prompts that have no template, or
        for one that is too long if overlong="error".
        """
        rows = chunk.inputs["prompt"]
        tokens = _fill_empty(self._tokenizer.encode_column(rows.array("prompt")), self._end)
        fitting_rows, prompt_ids = self._room.fit(tokens, rows.keys, self._session)
        if not len(fitting_rows):
            return
        count = len(fitting_rows)
        one_each = np.arange(count + 1, dtype=np.int64)
        columns = {
            "prompt_ids": prompt_ids,
            "completion_ids": Ragged(np.full(count, self._end, dtype=np.int32), one_each),
            "completion_mask": Ragged(np.ones(count, dtype=np.uint8), one_each),
            "completion": [""] * count,
        }
        yield Batch.make(rows.keys.take(fitting_rows), columns, Completion)

    def close(self) -> None:
        """Nothing to close."""


def _fill_empty(rows: Ragged, token: int) -> Ragged:
    """The rows, with one token where a row has none."""
    is_empty = rows.lengths == 0
    if not is_empty.any():
        return rows
    values = np.insert(rows.values, rows.offsets[:-1][is_empty], token)
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(np.maximum(rows.lengths, 1), out=offsets[1:])
    return Ragged(values, offsets)
