"""Coefficients by least squares on what was measured.

Owns: the fit of coefficients to seconds, and of a correction to peaks. Does not own: the formulas
(engine/plan/cost), measuring.

Seconds are fitted on their relative errors, by the coefficients' logarithms, so that none becomes
negative (Levenberg, Quarterly of Applied Mathematics 2, 1944; Marquardt, SIAM 11, 1963). A weak
pull towards the catalogue decides what the cells do not: a model whose passes are all bound by
compute says nothing of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from engine.plan.cost.devices import Coefficients, Device, Kind, coefficients
from engine.plan.cost.profile import PeakCorrection
from engine.predict.profile.predictions import MeasuredCell, ProfiledWork, predict_seconds

CoefficientName = tuple[Kind, str]
"""A coefficient of a kind of pass."""
Residuals = Callable[[np.ndarray], np.ndarray]
"""Logarithms of coefficients -> what each cell is off by, and how far each is from the catalogue.
"""

_OF_A_PASS = ("compute", "attention", "reads", "step", "row")
_FITTED: Mapping[Kind, tuple[CoefficientName, ...]] = {
    "decode": (
        ("prefill", "compute"),
        ("prefill", "attention"),
        ("prefill", "step"),
        ("decode", "compute"),
        ("decode", "attention"),
        ("decode", "reads"),
        ("decode", "step"),
        ("decode", "row"),
    ),
    "forward": tuple(("forward", name) for name in _OF_A_PASS),
    "train": tuple(("train", name) for name in _OF_A_PASS),
}
_LEAST_ROW = 1e-7
"""Seconds of a row where the catalogue has none: a start for a logarithm."""
_PULL = 0.01
"""Weight of the catalogue: e times another coefficient counts as an error of 1 % in one cell."""
_BOUNDS = (1e-9, 1e3)
_ROUNDS = 60
_SHIFT = 1e-4
_STRIDE = 2.0
"""How far a step may move a coefficient, as a logarithm."""
_AWAY = 2.5
"""From the catalogue's, as a logarithm: another start's coefficient."""
_MOST_DAMPING = 1e8
_GAIN = 1e-9
_NEAR = 0.25
"""Of the largest estimate: the cells to which a line of peaks lies close."""
_AS_CLOSE = 1.01
"""Times the least ratio of these cells: of lines within it that which is closest to all cells."""
_MARGIN = 1.05
"""By which a peak is predicted above the greatest that was measured: it differs from run to run."""


def kinds_of(kind: Kind) -> tuple[Kind, ...]:
    """The kinds of pass whose coefficients follow from measuring one: generation has two."""
    if kind == "decode":
        return ("decode", "prefill")
    return (kind,)


def fit_coefficients(
    work: ProfiledWork, device: Device, cells: Sequence[MeasuredCell]
) -> tuple[dict[Kind, Coefficients], list[float | None]]:
    """Fit coefficients to the seconds of cells. Gives them by kind, and the seconds that they say
    of each cell (None where none were measured).
    """
    catalogue = _catalogue_coefficients(work, device)
    timed = [cell for cell in cells if cell.cell.seconds]
    names = _FITTED[work.kind]
    measured = np.log([cell.cell.seconds or 1.0 for cell in timed])
    start = [getattr(catalogue[kind], name) for kind, name in names]
    origin = np.log([max(number, _LEAST_ROW) for number in start])

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        tried = _set_coefficients(catalogue, names, np.exp(logarithms))
        predicted = [predict_seconds(work, device, tried, cell) for cell in timed]
        errors = np.log(predicted) - measured
        return np.concatenate([errors, _PULL * (logarithms - origin)])

    best = catalogue
    if timed:
        logarithms = _minimise(residuals, origin, names)
        best = _set_coefficients(catalogue, names, np.exp(logarithms))
    fitted_seconds: list[float | None] = []
    for cell in cells:
        if cell.cell.seconds:
            fitted_seconds.append(predict_seconds(work, device, best, cell))
        else:
            fitted_seconds.append(None)
    kinds = kinds_of(work.kind)
    return {kind: replace(best[kind], origin="fitted") for kind in kinds}, fitted_seconds


def _minimise(
    residuals: Residuals, origin: np.ndarray, names: Sequence[CoefficientName]
) -> np.ndarray:
    """The best of several starts: where memory bounds no pass, nothing says which way its rate has
    to go until it does, and the same of compute.
    """

    def error(point: np.ndarray) -> float:
        return float(np.square(residuals(point)).sum())

    minima = [least_squares(residuals, origin)]
    for shifted in ("reads", "compute"):
        shift = np.array([-_AWAY if name == shifted else 0.0 for _, name in names])
        minima.append(least_squares(residuals, origin + shift))
    return min(minima, key=error)


def _catalogue_coefficients(work: ProfiledWork, device: Device) -> dict[Kind, Coefficients]:
    """The catalogue's, with the seconds of all layers in those of a step: of one Model nothing
    tells them apart.
    """
    layers = work.model.shape.layers
    by_kind: dict[Kind, Coefficients] = {}
    for kind, known in coefficients(device).items():
        by_kind[kind] = replace(known, step=known.step + layers * known.layer, layer=0.0)
    return by_kind


def _set_coefficients(
    start: Mapping[Kind, Coefficients], names: Sequence[CoefficientName], numbers: np.ndarray
) -> dict[Kind, Coefficients]:
    by_kind = dict(start)
    for (kind, name), number in zip(names, numbers.tolist(), strict=True):
        by_kind[kind] = replace(by_kind[kind], **{name: number})
    if any(kind == "prefill" for kind, _ in names):
        # It reads the same weights as decoding, and is not fitted to reads of its own.
        by_kind["prefill"] = replace(by_kind["prefill"], reads=by_kind["decode"].reads)
    return by_kind


def least_squares(residuals: Residuals, start: np.ndarray) -> np.ndarray:
    """Find the point with the least sum of squares near `start`, by Levenberg and Marquardt's
    damped steps; each coordinate within the logarithms of _BOUNDS.
    """
    low, high = np.log(_BOUNDS)
    point, damping = start.astype(np.float64), 1e-2
    errors = residuals(point)
    for _ in range(_ROUNDS):
        slopes = _slopes_at(residuals, point, errors)
        square, downhill = slopes.T @ slopes, slopes.T @ errors
        before = float(errors @ errors)
        # The more damping, the shorter the step and the closer to straight downhill.
        while damping < _MOST_DAMPING:
            damped = square + damping * np.diag(np.diag(square) + 1e-12)
            step = np.clip(np.linalg.solve(damped, downhill), -_STRIDE, _STRIDE)
            next_point = np.clip(point - step, low, high)
            next_errors = residuals(next_point)
            if float(next_errors @ next_errors) < before:
                point, errors, damping = next_point, next_errors, 0.3 * damping
                break
            damping *= 4.0
        if before - float(errors @ errors) < _GAIN:
            break
    return point


def _slopes_at(residuals: Residuals, point: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """How each error changes with each coordinate, [errors, coordinates]; by a small shift."""
    units = np.eye(len(point))
    columns = [(residuals(point + _SHIFT * unit) - errors) / _SHIFT for unit in units]
    return np.stack(columns, axis=1)


def fit_peaks(cells: Sequence[MeasuredCell]) -> PeakCorrection:
    """Fit a line base + factor x estimate to the peaks of cells: at least every measured peak, and
    as little above as can be where the run's will be. Of all factors it is the one whose greatest
    ratio is least among the cells that need more than _NEAR of the largest, which has a Step's rows
    at their greatest lengths.
    """
    known = [each.cell for each in cells if each.cell.peak > 0 and each.cell.estimated > 0]
    if not known:
        return PeakCorrection()
    # A row for each cell, a column for each factor that is tried.
    peaks = np.array([cell.peak for cell in known], dtype=np.float64)[:, None]
    sizes = np.array([cell.estimated for cell in known], dtype=np.float64)[:, None]
    factors = _candidate_factors(sizes[:, 0], peaks[:, 0])
    bases = np.maximum((peaks - sizes * factors).max(axis=0), 0.0)
    # A line that is above all peaks goes down until it meets one.
    needed = (peaks / (bases + sizes * factors)).max(axis=0)
    bases, factors = bases * np.minimum(needed, 1.0), factors * np.minimum(needed, 1.0)
    above = (bases + sizes * factors) / peaks
    near = above[sizes[:, 0] >= _NEAR * sizes.max()].max(axis=0)
    is_close = near <= _AS_CLOSE * near.min()
    greatest = np.where(is_close, above.max(axis=0), np.inf)
    best = int(greatest.argmin())
    base = int(np.ceil(_MARGIN * bases[best]))
    return PeakCorrection(base=base, factor=float(_MARGIN * factors[best]))


def _candidate_factors(sizes: np.ndarray, peaks: np.ndarray) -> np.ndarray:
    """A grid, the lines from nothing through each cell, and those through two cells."""
    grid = np.linspace(0.02, 3.0, 150)
    return np.concatenate([grid, peaks / sizes, _rising_slopes(sizes, peaks)])


def _rising_slopes(sizes: np.ndarray, peaks: np.ndarray) -> np.ndarray:
    """Slopes of the lines through two cells of different sizes, as far as they rise."""
    rise = np.subtract.outer(peaks, peaks)
    run = np.subtract.outer(sizes, sizes)
    slopes = rise[run > 0] / run[run > 0]
    return slopes[slopes > 0]
