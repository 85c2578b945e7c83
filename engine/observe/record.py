"""What is measured of the rows of a Step.

Owns: the row metrics, by the names that docs/metrics.md lists. Does not own: metrics of kernels
(each reports its own), nor sample files (samples.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch

Report = tuple[str, float, float]


def row_metrics(rows: Batch) -> Iterator[Report]:
    """(metric, value, count) of each number that these rows' columns allow."""
    if not len(rows):
        return
    if "reward" in rows.names:
        yield from _spread("reward", rows.array("reward"))
    for name in rows.names:
        if name.startswith("reward/"):
            yield from _spread(name, rows.array(name))
    if "completion_mask" in rows.names:
        lengths = rows.ragged("completion_mask").lengths
        yield "completion/length/mean", float(lengths.mean()), len(lengths)
        yield "completion/length/max", float(lengths.max()), 1.0
        yield "completion/length/min", float(lengths.min()), 1.0
    if "finish" in rows.names:
        yield "completion/truncated", float((rows.flat("finish") == "length").mean()), len(rows)


def tokens(rows: Batch) -> int:
    """Completion tokens of these rows."""
    return int(rows.ragged("completion_mask").lengths.sum()) if "completion_mask" in rows.names else 0


def _spread(name: str, column: pa.Array) -> Iterator[Report]:
    """Mean and (population) standard deviation over the rows that have a number."""
    values = column.drop_null().to_numpy(zero_copy_only=False).astype(np.float64)
    if len(values):
        yield f"{name}/mean", float(values.mean()), len(values)
        yield f"{name}/std", float(values.std()), len(values)
