"""What the trained model says of a micro-batch, in one forward for all terms of a loss.

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
    """A model's numbers, with gradient; a tuple, so that FSDP can hook its backward.

    tokens [tokens]: log-probs, or values of a scalar head. scores [rows], entropy [tokens], at_ids
    [tokens, ids]: only if they were asked for.
    """

    tokens: Tensor
    scores: Tensor | None = None
    entropy: Tensor | None = None
    at_ids: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> ModelNumbers:
        """Change every one that is there."""
        others = (self.scores, self.entropy, self.at_ids)
        scores, entropy, at_ids = (None if x is None else change(x) for x in others)
        tokens = change(self.tokens)
        return ModelNumbers(tokens=tokens, scores=scores, entropy=entropy, at_ids=at_ids)


@dataclass(frozen=True, slots=True, eq=False)
class NowByTerm:
    """A micro-batch's Now, and the log-probs at the ids that single terms declare, by label."""

    now: Now
    at_ids: Mapping[str, Tensor]

    def of(self, term: LossTerm) -> Now:
        """What this term sees."""
        if not term.function.ids:
            return self.now
        return replace(self.now, at_ids=self.at_ids[term.label])


def complete_now(
    now: Now, numbers: ModelNumbers, ids: Mapping[str, Tensor], *, scalar: bool
) -> NowByTerm:
    """Add the model's numbers to a Now, as the terms see them.

    No formula, not even 0 * infinity, gives a token with mask 0 a gradient.
    """
    trained = now.mask > 0
    tokens = numbers.tokens.where(trained, numbers.tokens.detach())
    now = replace(
        now,
        values=tokens if scalar else None,
        logprobs=None if scalar else tokens,
        scores=numbers.scores,
        entropy=numbers.entropy,
    )
    if numbers.at_ids is None:
        return NowByTerm(now, {})
    at_ids = numbers.at_ids.where(trained[:, None], numbers.at_ids.detach())
    # One forward read the ids of all terms side by side.
    parts = at_ids.split([term_ids.shape[1] for term_ids in ids.values()], dim=1)
    return NowByTerm(now, dict(zip(ids, parts, strict=True)))


def reads_scores(loss: Loss) -> bool:
    """Whether a term reads the scalar head at the rows' last tokens."""
    return any(term.function.scores for term in loss.terms)


def ids_of(rows: TrainRows, loss: Loss, packed: Packed, device: torch.device) -> dict[str, Tensor]:
    """Gather the ids at which terms read log-probs: int64 [tokens, k] by label."""
    return {
        label: gather(ids, packed.tokens, device, torch.int64)
        for label, ids in _id_columns(rows, loss).items()
    }


def require_ids(node: str, model: str, rows: TrainRows, loss: Loss, vocabulary: int) -> None:
    """Raise DataError for an id that the Model does not know."""
    for label, column in _id_columns(rows, loss).items():
        ids = column.cpu().numpy() if isinstance(column, Tensor) else column
        greatest = Ragged(ids.max(axis=1, initial=0), rows.completions.offsets)
        is_negative = (ids < 0).any(axis=1)
        if is_negative.any():
            row = int(greatest.segments()[np.argmax(is_negative)])
            raise DataError(
                f"{node}: row {rows.keys.rows()[row]}: expected token ids >= 0 for {label}, found"
                f" {int(ids.min())}. Fix: the ids of tokens."
            )
        require_embedded_ids(node, model, greatest, rows.keys, vocabulary)


def _id_columns(rows: TrainRows, loss: Loss) -> dict[str, np.ndarray | Tensor]:
    """The columns of ids that terms declare: [tokens of the Step, k] by label."""
    columns: dict[str, np.ndarray | Tensor] = {}
    for term in loss.terms:
        if term.function.ids:
            port, column = term.function.ids
            columns[term.label] = rows.ports[term.label, port].tokens[column]
    return columns
