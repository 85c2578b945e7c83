"""Said: what the trained model says of a micro-batch, in one forward for all terms of a loss.

Owns: which numbers a loss asks for, and handing each term those that it declares. Does not own: how
they are computed (heads.py), columns of rows (steprows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dataflow.batch import Ragged
from dataflow.errors import DataError
from dataflow.loss import Loss, LossTerm, Now
from operators.kernels.tensors import gather
from operators.kernels.text import require_embedded_ids
from operators.kernels.torch.packing import Packed
from operators.kernels.torch.steprows import TrainRows


class ModelNumbers(NamedTuple):
    """A model's numbers, with gradient; a tuple, so that FSDP can hook its backward. tokens
    [tokens]: log-probs, or values of a scalar head. scores [rows], entropy [tokens], at [tokens,
    ids]: only if they were asked for.
    """

    tokens: Tensor
    scores: Tensor | None = None
    entropy: Tensor | None = None
    at: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> ModelNumbers:
        """All of them, changed."""
        others = (self.scores, self.entropy, self.at)
        scores, entropy, at = (None if x is None else change(x) for x in others)
        return ModelNumbers(tokens=change(self.tokens), scores=scores, entropy=entropy, at=at)


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """A micro-batch's Now, and the log-probs at the ids that single terms declare, by label."""

    now: Now
    at: Mapping[str, Tensor]

    def to(self, term: LossTerm) -> Now:
        """What this term sees."""
        return replace(self.now, at_ids=self.at[term.label]) if term.function.ids else self.now


def said(now: Now, answers: ModelNumbers, ids: Mapping[str, Tensor], *, scalar: bool) -> Said:
    """ModelNumbers as the terms see them. No formula, not even 0 * infinity, gives a token with
    mask 0 a gradient.
    """
    trained = now.mask > 0
    own = answers.tokens.where(trained, answers.tokens.detach())
    values, logprobs = (own, None) if scalar else (None, own)
    now = replace(
        now, values=values, logprobs=logprobs, scores=answers.scores, entropy=answers.entropy
    )
    if answers.at is None:
        return Said(now, {})
    at = answers.at.where(trained[:, None], answers.at.detach())
    parts = at.split([asked.shape[1] for asked in ids.values()], dim=1)
    return Said(now, dict(zip(ids, parts, strict=True)))


def reads_scores(loss: Loss) -> bool:
    """Whether a term reads the scalar head at the rows' last tokens."""
    return any(term.function.scores for term in loss.terms)


def ids_of(rows: TrainRows, loss: Loss, packed: Packed, device: torch.device) -> dict[str, Tensor]:
    """int64 [tokens, k] by label: the ids at which a term reads log-probs."""
    return {
        label: gather(ids, packed.tokens, device, torch.int64)
        for label, ids in _columns(rows, loss).items()
    }


def require_ids(node: str, model: str, rows: TrainRows, loss: Loss, vocabulary: int) -> None:
    """Raises DataError for an id that the Model does not know."""
    for label, column in _columns(rows, loss).items():
        ids = column.cpu().numpy() if isinstance(column, Tensor) else column
        asked = Ragged(ids.max(axis=1, initial=0), rows.completions.offsets)
        if (ids < 0).any():
            row = int(asked.segments()[np.argmax((ids < 0).any(axis=1))])
            raise DataError(
                f"{node}: row {rows.keys.rows()[row]}: expected token ids >= 0 for {label}, found"
                f" {int(ids.min())}. Fix: the ids of tokens."
            )
        require_embedded_ids(node, model, asked, rows.keys, vocabulary)


def _columns(rows: TrainRows, loss: Loss) -> dict[str, np.ndarray | Tensor]:
    """[tokens of the Step, k] by label."""
    found = {}
    for term in loss.terms:
        if term.function.ids:
            port, column = term.function.ids
            found[term.label] = rows.ports[term.label, port].tokens[column]
    return found
