"""The numbers of one Step.

Owns: how several reports of one metric become one number, and the JSON line that a Step leaves.
Does not own: the form of a metric's name (dataflow/metric_names.py), which metrics there are
(kernels and the coordinator name them), where they go (sinks.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import cache

import msgspec

from dataflow.errors import DataError
from dataflow.metric_names import is_metric_name, repair_name

_log = logging.getLogger(__name__)


class StepMetrics:
    """Adds up the metrics of one Step.

    A metric is its count-weighted mean, sum(value * count) / sum(count), or the greatest or least
    value for a name that ends in `/max` or `/min`. A value with count 0 says nothing; a name with
    only those has no number. The result does not depend, to the bit, on the order of the calls:
    reports come from many Workers, and a synchronous run has equal metrics wherever its nodes are.
    """

    __slots__ = ("_counts", "_values")

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._counts: dict[str, list[float]] = {}

    def add(self, name: str, number: float, count: float = 1.0) -> None:
        """Report one value that stands for `count` rows, tokens or calls.

        Raises DataError for a bad name.
        """
        values = self._values.get(name)
        if values is None:
            values = self._begin(name)
        if count > 0:
            values.append(number)
            self._counts[name].append(count)

    def row(self, step: int) -> dict[str, float]:
        """`step` first, then every metric by name."""
        row: dict[str, float] = {"step": step}
        for name in sorted(self._values):
            if self._values[name]:
                row[name] = _combine(name, self._values[name], self._counts[name])
        return row

    def clear(self) -> None:
        """Begin the next Step."""
        self._values.clear()
        self._counts.clear()

    def _begin(self, name: str) -> list[float]:
        if not _is_name(name):
            raise DataError(
                f"metric {name!r}: expected slash-separated parts in lower case such as"
                f" 'reward/mean'. Fix: {repair_name(name)!r}."
            )
        self._counts[name] = []
        return self._values.setdefault(name, [])


# A Step's names are those of the Step before.
_is_name = cache(is_metric_name)


def _combine(name: str, values: list[float], counts: list[float]) -> float:
    if name.endswith("/max"):
        if any(map(math.isnan, values)):
            return math.nan
        return float(max(values, key=_rank))
    if name.endswith("/min"):
        if any(map(math.isnan, values)):
            return math.nan
        return float(min(values, key=_rank))
    if counts == [1.0]:
        return values[0] + 0.0  # as the sum of one number is: without the sign of -0.0
    return _sum([v * c for v, c in zip(values, counts, strict=True)]) / _sum(counts)


def _rank(number: float) -> tuple[float, float]:
    """-0.0 before 0.0, which compare as equal, so that the order of reports does not matter."""
    return number, math.copysign(1.0, number)


def _sum(values: list[float]) -> float:
    """The exactly rounded sum in any order; plain addition's result where a value is not finite."""
    if all(map(math.isfinite, values)):
        return math.fsum(values)
    clash = math.inf in values and -math.inf in values
    if clash or any(map(math.isnan, values)):
        return math.nan
    return sum(values)


def json_line(step: int, metrics: Mapping[str, float], noted: set[str]) -> bytes:
    """Write one strict JSON object and a newline: `step`, then metrics by name; null for nan and
    infinity.

    Logs the first non-finite value of each metric; `noted` remembers which were.
    """
    row: dict[str, float] = {"step": step}
    for name in sorted(metrics):
        if name != "step":
            row[name] = number = metrics[name]
            if not math.isfinite(number) and name not in noted:
                noted.add(name)
                message = "metric %s is %s at Step %d; stored as null (said once)"
                _log.warning(message, name, number, step)
    return msgspec.json.encode(row) + b"\n"
