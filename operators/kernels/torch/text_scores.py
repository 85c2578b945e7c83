"""The kernel of `scores(reads="text")`: a reward Model with a tokenizer of its own.

Owns: from prompt and answer, as text, to rows of the Model's own token ids. Does not own: chat
templates (text.py), rows that are too long (overlong.py), the forward pass (forward.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from dataflow.batch import Batch, Ragged
from dataflow.errors import DataError
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.prompt_types import is_token_ids
from operators.kernels.overlong import Room, take_spans
from operators.kernels.tensors import make_batch
from operators.kernels.text import load_tokenizer, prompts_of, require_embedded_ids
from operators.kernels.torch.forward import TorchScores


class TorchTextScores(TorchScores):
    """scores, reads="text": the scalar head at the last token of prompt and answer, rendered by the
    Model's own chat template and tokenised by its own tokenizer.

    params: overlong. The prompt is text or messages; a Model without a chat template reads text
    prompts followed by the answer.
    """

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Load tokenizer and module. Raises KernelError or DataError if the base lacks one."""
        super().open(node, layout, session)
        self._tokenizer = load_tokenizer(self._model.base)
        self._room = Room.of_scores(node, self._model.name, self._position_limit)

    @torch.inference_mode()
    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """Score the whole chunk in one batch; rows that the Model has no positions for are dropped
        if overlong="drop".
        """
        rows = chunk.inputs["rows"]
        if not len(rows):
            return
        if "prompt" not in rows.names or is_token_ids(rows.array("prompt").type):
            raise DataError(
                f"{self._name}: expected the prompts as text or messages, found only token ids."
                " Fix: rows of prompts(data), or reads='tokens' by a Model of the same tokenizer."
            )
        prompts = prompts_of(rows.array("prompt"))
        ids = self._tokenizer.encode_answered(prompts, rows.array("completion").to_pylist())
        require_embedded_ids(self._name, self._model.name, ids, rows.keys, self.vocabulary)
        fitting, ids = self._room.fit(ids, rows.keys, self._session)
        if len(fitting):
            keys = rows.keys.take(fitting)
            shared, rest = _split_shared(ids, keys.position)
            columns = self.compute(keys, shared, rest)
            yield make_batch(keys, columns, None, self.schema)


def _split_shared(ids: Ragged, position: np.ndarray) -> tuple[Ragged, Ragged]:
    """Cut the ids into what all rows of one position begin with, and the rest."""
    shared = np.ones(len(ids), dtype=np.int64)
    for group in np.unique(position).tolist():
        rows = np.flatnonzero(position == group)
        beginnings = [ids[row] for row in rows.tolist()]
        shared[rows] = max(1, _count_common(beginnings))
    starts = ids.offsets[:-1]
    return take_spans(ids, starts, shared), take_spans(ids, starts + shared, ids.lengths - shared)


def _count_common(rows: list[np.ndarray]) -> int:
    """Count the tokens that all rows begin with; less than the shortest has."""
    common = min(map(len, rows)) - 1
    for row in rows[1:]:
        differs = row[:common] != rows[0][:common]
        if differs.any():
            common = int(differs.argmax())
    return common
