"""The kernel of `mean_over`.

Owns: the mean over each row's descendants, and the tombstone of a row without any. Does not own:
which descendants a row has: each input row comes with the key of its ancestor.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dataflow.batch import Batch
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.schema import Reward


class MeanOver:
    """See `operators.mean_over.mean_over`. Sums are float64, in key order of the descendants."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Nothing to load."""
        self._session = session

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch of the rows with a descendant that has a reward; the others are tombstones."""
        descendants = chunk.inputs["reward"]
        column = descendants.array("reward")
        has_reward = np.asarray(column.is_valid())
        ancestor = _ancestor_indices(chunk, descendants)[has_reward]
        reward = column.drop_null().to_numpy(zero_copy_only=False).astype(np.float64)
        count = np.bincount(ancestor, minlength=len(chunk.keys))
        total = np.bincount(ancestor, weights=reward, minlength=len(chunk.keys))
        has_mean = count > 0
        for key in chunk.keys.take(~has_mean).rows():
            self._session.tombstone(
                key, "no remaining row made from it has a reward. Fix: let select keep more rows."
            )
        mean = (total[has_mean] / count[has_mean]).astype(np.float32)
        yield Batch.make(chunk.keys.take(has_mean), {"reward": mean}, Reward)

    def close(self) -> None:
        """Nothing to close."""


def _ancestor_indices(chunk: Chunk, descendants: Batch) -> np.ndarray:
    """int64 [descendants]: the index of each one's ancestor in the chunk, whose keys are sorted."""
    rows = chunk.keys
    keys = descendants.keys
    # One number for position and sample, in the order of the keys.
    width = int(max(rows.sample.max(initial=0), keys.sample.max(initial=0))) + 1
    row_numbers = rows.position * width + rows.sample
    key_numbers = keys.position * width + keys.sample
    return np.searchsorted(row_numbers, key_numbers)
