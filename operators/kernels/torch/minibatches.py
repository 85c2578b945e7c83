"""Minibatches: which rows make each update of a Step.

Owns: the split into epochs and minibatches of whole groups, drawn from (seed, node, step,
epoch) alone. Does not own: micro-batches (packing.py), which never change a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from dataflow.randomness import stream_seed


def draw_minibatches(
    position: np.ndarray, *, epochs: int, count: int, seed: int, node: str, step: int
) -> Iterator[np.ndarray]:
    """Draw the rows (ascending indices) of each update: `epochs` times `count` of them.

    Groups (rows with one key.position) stay whole; the updates of an epoch have equal numbers of
    groups, to within one, and each epoch has each row once. One minibatch takes the rows in their
    order.
    """
    groups, group = np.unique(position, return_inverse=True)
    for epoch in range(epochs):
        if count == 1:
            yield np.arange(len(position))
            continue
        stream = stream_seed(seed, f"{node}/minibatches/{step}/{epoch}")
        draw = np.random.Generator(np.random.Philox(int(stream)))
        place = np.empty(len(groups), dtype=np.int64)
        place[draw.permutation(len(groups))] = np.arange(len(groups))
        row_place = place[group]
        bounds = np.linspace(0, len(groups), count + 1)
        for low, high in pairwise(bounds.round().astype(np.int64)):
            yield np.flatnonzero((row_place >= low) & (row_place < high))
