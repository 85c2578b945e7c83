"""What is counted in a stretch of time, before it is a Flow.

Owns: the counters. Does not own: what ends a stretch (fold.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from engine.protocol import messages as m


class StretchCounts:
    """The counters of one stretch: by (node, Worker), by edge, by weight edge, or by
    `node@worker`.
    """

    def __init__(self) -> None:
        self.rows: Counter[tuple[str, str]] = Counter()
        self.tokens: Counter[tuple[str, str]] = Counter()
        self.chunks: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[str] = Counter()
        self.weights: Counter[str] = Counter()
        self.node_peak: Counter[str] = Counter()
        self.lags: dict[str, list[int]] = {}
        self.tombstones: dict[tuple[str, bool, bool], list[m.Tombstoned]] = defaultdict(list)

    def rows_of(self, node: str, worker: str, rows: int, tokens: int) -> None:
        """A node has made rows, or takes them to train."""
        self.rows[node, worker] += rows
        self.tokens[node, worker] += tokens

    def train(self, message: m.TrainStep | m.TrainPart, lags: np.ndarray, tokens: int) -> None:
        """A train node, or a rank of it, gets its rows."""
        self.rows_of(message.node, message.worker, len(message.keys), tokens)
        before = self.lags.get(message.node, [])
        counts = np.bincount(lags, minlength=len(before))
        counts[: len(before)] += np.array(before, dtype=counts.dtype)
        self.lags[message.node] = counts.tolist()
