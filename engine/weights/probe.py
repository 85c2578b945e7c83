"""The log-prob probe: whether writer and reader of a version compute the same log-probs with it.

Owns: the fixed token rows, the tolerances, the comparison. Does not own: the log-probs (kernels),
how they get to the reader.

Hashes prove that the bytes arrived, but not the right dtype, names and tied weights, nor equal
implementations of the model. Both sides compute the probe after each publish that moves weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dataflow.batch import Ragged
from dataflow.errors import RunError

ROWS, LENGTH = 4, 16


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The greatest mean and single |difference| allowed for numbers with a standard deviation of at
    most 1; both grow with a greater one, as rounding does.
    """

    mean: float
    max: float


TOLERANCES = {
    "float32": Tolerance(1e-5, 1e-4),
    "float16": Tolerance(1e-2, 1e-1),
    "bfloat16": Tolerance(5e-2, 3e-1),
}
"""By the coarsest dtype among the weights. Measured, in standard deviations, packed forward against
transformers' eager one, random weights of 2 to 8 layers: float32 1.5e-6 and 1.1e-5, float16 4e-3
and 2.3e-2, bfloat16 3.6e-2 and 2.2e-1.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Both sides, for the error."""

    model: str
    writer: str
    reader: str
    version: int


def probe_rows(seed: int, vocabulary: int) -> Ragged:
    """Draw int32 rows of uniform tokens, ROWS of LENGTH, the same on both sides."""
    # A seed may be negative; a key is of unsigned numbers.
    key = [seed & 0xFFFFFFFFFFFFFFFF, vocabulary]
    draw = np.random.Generator(np.random.Philox(key=key))
    tokens = draw.integers(0, vocabulary, ROWS * LENGTH, dtype=np.int32)
    return Ragged(tokens, np.arange(0, ROWS * LENGTH + 1, LENGTH))


def tolerance_of(dtypes: Iterable[str]) -> Tolerance:
    """Find the tolerance of the coarsest of these dtypes; integers and float64 count as float32."""
    tolerances = [TOLERANCES[dtype] for dtype in dtypes if dtype in TOLERANCES]
    return max(tolerances, key=lambda each: each.max, default=TOLERANCES["float32"])


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
    with np.errstate(invalid="ignore"):  # infinity minus infinity is handled below
        off = np.abs(writer.astype(np.float64) - reader.astype(np.float64))
    # Equal infinities, and NaN on both sides, are the same diverged model: not the edge's fault.
    off[(writer == reader) | (np.isnan(writer) & np.isnan(reader))] = 0.0
    off[np.isnan(off)] = np.inf
    mean, worst = float(off.mean()), float(off.max())
    scale = _scale_of(writer)
    allowed = Tolerance(scale * tolerance.mean, scale * tolerance.max)
    if mean <= allowed.mean and worst <= allowed.max:
        return mean, worst
    worst_index = int(off.argmax())
    row, place = _locate(rows, worst_index)
    token = int(rows[row][place])
    has = f"{ends.reader} has version {ends.version} of {ends.writer}, bit for bit"
    differences = f"|difference| {mean:.3g} on average and {worst:.3g} at most"
    limits = f"expected {allowed.mean:.3g} and {allowed.max:.3g}"
    written, read = float(writer[worst_index]), float(reader[worst_index])
    numbers = f"{written:.6g} ({ends.writer}) and {read:.6g} ({ends.reader})"
    raise RunError(
        f"probe of {ends.model!r}: {has}, but computes other log-probs with it: {differences},"
        f" {limits}; the worst is token {token} at place {place} of row {row}: {numbers}."
        " Fix: the same base, dtype, kernel family and names of weights on both sides."
    )


def _scale_of(numbers: np.ndarray) -> float:
    """By how much tolerances grow: the standard deviation of the finite numbers, at least 1."""
    finite = numbers[np.isfinite(numbers)].astype(np.float64)
    if not len(finite):
        return 1.0
    return max(1.0, float(finite.std()))


def _locate(rows: Ragged, index: int) -> tuple[int, int]:
    """The row, and the place in it, of a number. index: among those of all rows."""
    # A row's first token has no log-prob.
    counts = rows.lengths - 1
    row = int(np.searchsorted(np.cumsum(counts), index, side="right"))
    place = index - int(counts[:row].sum()) + 1
    return row, place
