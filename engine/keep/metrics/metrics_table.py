"""The metrics of a run as a table.

Owns: its columns. Does not own: the file that it is read from (sinks.py), the numbers
(step_metrics.py).
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from engine.keep.metrics.metric_lines import recorded_rows


def history(path: Path) -> pa.Table:
    """A metrics file as a table: `step`, then each metric as a float64 column, in the order in
    which they appear first. Empty without a file. Raises DataError where a line is no metrics row.
    """
    rows = list(recorded_rows(path))
    columns = {"step": pa.array([row["step"] for row in rows], pa.int64())}
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    for name in names:
        if name != "step":
            columns[name] = pa.array([row.get(name) for row in rows], pa.float64())
    return pa.table(columns)
