"""The rows of a decode loop that wait for slots, in the order in which they enter.

Owns: this order. Does not own: how many slots are free, and when rows enter (torch/decode.py,
vllm/decode.py).

Rows of one prompt enter one after another, so that it is fed once. Prompts come by their rows'
weight, the heaviest first, else as they came. Rows of a prompt of which some have entered come
before all others.
"""

from __future__ import annotations

import heapq

import numpy as np


class RowQueue:
    """Of one decode loop. count: how many rows wait."""

    def __init__(self) -> None:
        self.count = 0
        self._groups: list[tuple[float, int, np.ndarray]] = []  # a heap
        self._group_count = 0
        self._opened = np.zeros(0, np.int64)

    def add(
        self, rows: np.ndarray, prompt_of_row: np.ndarray, weights: np.ndarray | None = None
    ) -> None:
        """Let rows wait, int64 [rows], those of one prompt side by side. weights: float32 [rows],
        the same for all rows of a prompt; None: all are alike.
        """
        if not len(rows):
            return
        cuts = np.flatnonzero(np.diff(prompt_of_row)) + 1
        begins = [0, *cuts.tolist()]
        for begin, group in zip(begins, np.split(rows, cuts), strict=True):
            weight = 0.0 if weights is None else float(weights[begin])
            heapq.heappush(self._groups, (-weight, self._group_count, group))
            self._group_count += 1
        self.count += len(rows)

    def take(self, count: int) -> np.ndarray:
        """Remove the next rows, int64, `count` of them or as many as there are."""
        taken: list[np.ndarray] = []
        count = min(count, self.count)
        self.count -= count
        while count:
            if not len(self._opened):
                _, _, self._opened = heapq.heappop(self._groups)
            taken.append(self._opened[:count])
            self._opened = self._opened[count:]
            count -= len(taken[-1])
        return np.concatenate(taken) if taken else np.zeros(0, np.int64)
