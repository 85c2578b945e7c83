"""The probe of a weight edge: whether writer and reader of a version compute the same log-probs.

Owns: the error where they do not. Does not own: the rows, the tolerances and the comparison
(dataflow/log_prob_probe.py), the log-probs (kernels), how they get to the reader.

Hashes prove that the bytes arrived, but not the right dtype, names and tied weights, nor equal
implementations of the model. Both sides compute the probe after each publish that moves weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dataflow.batch import Ragged
from dataflow.errors import RunError
from dataflow.log_prob_probe import LENGTH as LENGTH
from dataflow.log_prob_probe import ROWS as ROWS
from dataflow.log_prob_probe import TOLERANCES as TOLERANCES
from dataflow.log_prob_probe import Tolerance as Tolerance
from dataflow.log_prob_probe import measure_difference
from dataflow.log_prob_probe import probe_rows as probe_rows
from dataflow.log_prob_probe import tolerance_of as tolerance_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Both sides, for the error."""

    model: str
    writer: str
    reader: str
    version: int


def compare_probes(
    writer: np.ndarray, reader: np.ndarray, rows: Ragged, tolerance: Tolerance, ends: Ends
) -> tuple[float, float]:
    """Compare log-probs: float32, of all tokens but each row's first. Returns the mean and the
    greatest |difference|. Raises RunError if they exceed the tolerance, or a number is finite on
    one side only.
    """
    expected = len(rows.values) - len(rows)
    if not len(writer) == len(reader) == expected:
        counts = f"{len(writer)} of {ends.writer} and {len(reader)} of {ends.reader}"
        problem = f"probe of {ends.model!r}: expected {expected} numbers, found {counts}"
        fix = "a kernel whose `probe` returns one number for each token but the first"
        raise RunError(f"{problem}. Fix: {fix}.")
    difference = measure_difference(writer, reader, tolerance)
    if difference.is_allowed:
        return difference.mean, difference.worst
    worst_index = difference.worst_index
    row, place = _locate(rows, worst_index)
    token = int(rows[row][place])
    has = f"{ends.reader} has version {ends.version} of {ends.writer}, bit for bit"
    written, read = float(writer[worst_index]), float(reader[worst_index])
    numbers = f"{written:.6g} ({ends.writer}) and {read:.6g} ({ends.reader})"
    raise RunError(
        f"probe of {ends.model!r}: {has}, but computes other log-probs with it: {difference};"
        f" the worst is token {token} at place {place} of row {row}: {numbers}."
        " Fix: the same base, dtype, kernel family and names of weights on both sides, and no"
        " merge=True."
    )


def _locate(rows: Ragged, index: int) -> tuple[int, int]:
    """The row, and the place in it, of a number. index: among those of all rows."""
    # A row's first token has no log-prob.
    counts = rows.lengths - 1
    row = int(np.searchsorted(np.cumsum(counts), index, side="right"))
    place = index - int(counts[:row].sum()) + 1
    return row, place
