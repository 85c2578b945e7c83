"""Curves: columns of a run's metrics, thinned to what a screen shows.

Owns: the thinning, which keeps the least and the greatest value of each bucket. Does not own: the
columns (engine/keep/reader/metric_index.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.keep.reader.metric_index import MetricIndex
from engine.keep.reader.open_folder import OpenFolder

MOST = 2000
"""Points of a curve."""


def thinned_series(
    index: MetricIndex,
    folder: OpenFolder,
    names: Sequence[str],
    *,
    first: int | None = None,
    last: int | None = None,
    points: int = MOST,
) -> dict[str, Any]:
    """Thin the metrics of the Steps first..last to at most `points`; null where there is none.

    Of more Steps, a bucket has two: its first and its last Step, with its least and its greatest
    value in the order in which they came.
    """
    index.refresh(folder)
    steps = index.steps
    if not len(steps):
        return {"steps": [], "series": {name: [] for name in names}}
    if first is None:
        begin = 0
    else:
        begin = int(np.searchsorted(steps, first))
    if last is None:
        end = len(steps)
    else:
        end = int(np.searchsorted(steps, last, side="right"))
    cuts = _cuts(begin, end, max(2, min(points, MOST)))
    curves: dict[str, list[float | None]] = {}
    for name, column in index.columns(folder, names):
        curves[name] = _thin_column(column, begin, end, cuts)
    if cuts is None:
        curve_steps = steps[begin:end]
    else:
        curve_steps = _bucket_ends(steps, cuts, end)
    return {"steps": curve_steps.tolist(), "series": curves}


def _cuts(begin: int, end: int, points: int) -> np.ndarray | None:
    """Where buckets begin; None where every Step has a point."""
    if end - begin <= points:
        return None
    return np.linspace(begin, end, points // 2, endpoint=False).astype(np.int64)


def _bucket_ends(steps: np.ndarray, cuts: np.ndarray, end: int) -> np.ndarray:
    """The first and the last Step of each bucket."""
    last = np.append(cuts[1:], end) - 1
    return np.stack([steps[cuts], steps[last]], axis=1).reshape(-1)


def _thin_column(
    column: np.ndarray, begin: int, end: int, cuts: np.ndarray | None
) -> list[float | None]:
    """A column, or of each bucket the least and the greatest value as they come."""
    if cuts is None:
        return _plain(column[begin:end])
    part = column[:end]
    known = np.isfinite(part)
    least = np.minimum.reduceat(np.where(known, part, np.inf), cuts)
    most = np.maximum.reduceat(np.where(known, part, -np.inf), cuts)
    least_places = _find_places(part, least, cuts, end)
    most_places = _find_places(part, most, cuts, end)
    is_rising = (least_places <= most_places)[:, None]
    rising, falling = np.stack([least, most], 1), np.stack([most, least], 1)
    pairs = np.where(is_rising, rising, falling)
    return _plain(pairs.reshape(-1))


def _find_places(
    part: np.ndarray, bucket_values: np.ndarray, cuts: np.ndarray, end: int
) -> np.ndarray:
    """Where each bucket's value comes first."""
    sizes = np.diff(np.append(cuts, end))
    is_value = part[cuts[0] : end] == np.repeat(bucket_values, sizes)
    # `end` is behind all: the least of the others is the first place.
    places = np.where(is_value, np.arange(cuts[0], end), end)
    return np.minimum.reduceat(places, cuts - cuts[0])


def _plain(values: np.ndarray) -> list[float | None]:
    return [number if math.isfinite(number) else None for number in values.tolist()]
