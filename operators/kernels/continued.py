"""The kernel of `continued`: prompts that are whole rows, token by token.

Owns: joining prompt, completion and the user's next turn. Does not own: how a turn is rendered
(turn_templates.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Ragged
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.schema import TokenPrompt
from operators.kernels.text import load_tokenizer
from operators.kernels.turn_templates import TurnChange, TurnTemplate


class Continued:
    """See `operators.continued.continued`. params: then. models: `tokenizer`, the Model whose
    directory has it.
    """

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Load the tokenizer, and tokenise the next turn. Raises DataError if there is no chat
        template for it.
        """
        self._session = session
        self._decodes_text = "prompt_text" in (node.returns or TokenPrompt.columns)
        self._tokenizer = load_tokenizer(node.models["tokenizer"].base)
        self._turn = TurnChange(ids=np.zeros(0, np.int32))
        then = node.params.get("then")
        if then:
            reply = {"role": "user", "content": then}
            self._turn = TurnTemplate(self._tokenizer).change([reply])

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch for the whole chunk."""
        rows = chunk.inputs["rows"]
        ids = self._join(rows.ragged("prompt_ids"), rows.ragged("completion_ids"))
        columns: dict[str, Ragged | pa.Array] = {"prompt": ids}
        if self._decodes_text:
            columns["prompt_text"] = pa.array(self._tokenizer.decode(ids), pa.utf8())
        yield Batch.make(chunk.keys, columns, TokenPrompt)

    def close(self) -> None:
        """Nothing to close."""

    def _join(self, prompts: Ragged, completions: Ragged) -> Ragged:
        """Join prompt, completion and turn of each row: int32 ids in memory of the session."""
        parts: list[np.ndarray] = []
        for row in range(len(prompts)):
            parts += [prompts[row], completions[row], self._turn.behind(completions[row])]
        part_lengths = np.array([len(part) for part in parts], np.int64)
        row_lengths = part_lengths.reshape(-1, 3).sum(axis=1)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(row_lengths)])
        values = self._session.allocate(int(offsets[-1]), np.int32)
        if parts:
            np.concatenate(parts, out=values)
        return Ragged(values, offsets)
