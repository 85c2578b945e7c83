"""The log-prob probe: fixed rows of tokens, and how far two computations of them may differ.

Owns: the rows, the tolerances, the comparison of two sides' log-probs. Does not own: the log-probs
(kernels), who is compared with whom: writer and reader of a version (engine/weights/probe.py), a
generator's merged weights and its trainer's (operators/kernels/torch/merged_probe.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dataflow.batch import Ragged

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
class ProbeDifference:
    """How far two sides are apart. allowed: for these numbers. worst_index: of the number where
    they are farthest apart.
    """

    mean: float
    worst: float
    allowed: Tolerance
    worst_index: int

    @property
    def is_allowed(self) -> bool:
        """Whether the sides agree, but for rounding."""
        return self.mean <= self.allowed.mean and self.worst <= self.allowed.max

    def __str__(self) -> str:
        """`|difference| 0.02 on average and 0.1 at most, expected 1e-05 and 0.0001`."""
        differences = f"|difference| {self.mean:.3g} on average and {self.worst:.3g} at most"
        return f"{differences}, expected {self.allowed.mean:.3g} and {self.allowed.max:.3g}"


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


def measure_difference(one: np.ndarray, other: np.ndarray, tolerance: Tolerance) -> ProbeDifference:
    """Compare the log-probs of two sides, float32 of one length. A number that is finite on one
    side only is infinitely far off.
    """
    with np.errstate(invalid="ignore"):  # infinity minus infinity is handled below
        off = np.abs(one.astype(np.float64) - other.astype(np.float64))
    # Equal infinities, and NaN on both sides, are the same diverged model: not the edge's fault.
    off[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    off[np.isnan(off)] = np.inf
    scale = _scale_of(one)
    return ProbeDifference(
        mean=float(off.mean()),
        worst=float(off.max()),
        allowed=Tolerance(scale * tolerance.mean, scale * tolerance.max),
        worst_index=int(off.argmax()),
    )


def _scale_of(numbers: np.ndarray) -> float:
    """By how much tolerances grow: the standard deviation of the finite numbers, at least 1."""
    finite = numbers[np.isfinite(numbers)].astype(np.float64)
    if not len(finite):
        return 1.0
    return max(1.0, float(finite.std()))
