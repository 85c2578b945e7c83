"""New tokens of rows that several tensor ranks decode together: drawn by the first, told to all.

    a rank        waits for
    the first     the others' parts of the pass, as in every layer
    any other     the first one's tokens

Owns: who draws, the broadcast, and that all ranks stop before the same step where the first one is
interrupted, which it says with its draw. Does not own: the parts of the matrices (slices.py), the
draw (device_sampling.py), which rows are live, which is the same on all ranks (shared_step.py).

Hidden states are sums over ranks. Were each rank to draw by its own logits, their last bits would
have to be equal, or one rank would go on with another token than the others. So the first one's
draw counts. Where the head is split, it gathers the others' columns of the logits; else no other
rank computes logits at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from operators.kernels.torch.decode_step import StepTokens
from operators.kernels.torch.device_sampling import NUMBERS, draw_packed, unpack_rows
from operators.kernels.torch.sampling import Sampling
from operators.kernels.torch.vocabulary_part import VocabularyPart

_FIRST = 0


class RankTokens:
    """Of one rank. group: of the ranks of a replica, which has their device's backend. part: this
    rank's of the vocabulary, if the head is split. was_interrupted: asked on the first rank with
    each draw, whether all are to stop before the next step.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        device: torch.device,
        part: VocabularyPart | None = None,
        was_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._group, self._device, self._part = group, device, part
        self._draws = rank == _FIRST
        self.predicts = self._draws or part is not None
        """Whether this rank computes logits."""
        self._was_interrupted = was_interrupted
        self._stops = False

    def draw(self, rows: np.ndarray, logits: Tensor, draws: Tensor, how: Sampling) -> StepTokens:
        """Draw one token per row, or take what was drawn. logits [rows, vocabulary], or this
        rank's columns; whole ones, and draws float64 [rows], count on the first rank alone. Raises
        KernelError, on all ranks, for logits that are no numbers.
        """
        if self._part is not None:
            logits = self._part.gather_first(logits)
        # The last column: whether all stop now.
        packed = torch.zeros(NUMBERS, len(rows) + 1, dtype=torch.int32, device=self._device)
        if self._draws:
            draw_packed(logits, draws.to(self._device), how, packed[:, :-1])
            packed[:, -1] = int(self._was_interrupted())
        dist.broadcast(packed, group=self._group, group_src=_FIRST)
        # Waits for the device: whether a row ended decides what is fed next.
        numbers = packed.cpu().numpy()
        self._stops = bool(numbers[0, -1])
        return unpack_rows(np.ascontiguousarray(numbers[:, :-1]), rows, truncates=how.truncates)

    def take_stop(self) -> bool:
        """Whether all ranks stop before the next step, by what the first one said with its last
        draw; then no more.
        """
        stops, self._stops = self._stops, False
        return stops
