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
from engine.predict.profile.predictions import MeasuredCell, ProfiledWork, seconds

Named = tuple[Kind, str]
"""A coefficient of a kind of pass."""

_OF_A_PASS = ("compute", "attention", "reads", "step", "row")
_FITTED: Mapping[Kind, tuple[Named, ...]] = {
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
    return ("decode", "prefill") if kind == "decode" else (kind,)


def fitted(
    work: ProfiledWork, of: Device, cells: Sequence[MeasuredCell]
) -> tuple[dict[Kind, Coefficients], list[float | None]]:
    """Coefficients by kind, and the seconds that they say of each cell (None where none were
    measured).
    """
    start = _started(work, of)
    timed = [cell for cell in cells if cell.cell.seconds]
    named = _FITTED[work.kind]
    measured = np.log([cell.cell.seconds or 1.0 for cell in timed])
    origin = np.log([max(getattr(start[kind], name), _LEAST_ROW) for kind, name in named])

    def residuals(x: np.ndarray) -> np.ndarray:
        how = _with(start, named, np.exp(x))
        said = [seconds(work, of, how, cell) for cell in timed]
        return np.concatenate([np.log(said) - measured, _PULL * (x - origin)])

    found = _with(start, named, np.exp(_best(residuals, origin, named))) if timed else start
    said = [seconds(work, of, found, cell) if cell.cell.seconds else None for cell in cells]
    return {kind: replace(found[kind], origin="fitted") for kind in kinds_of(work.kind)}, said


def _best(
    residuals: Callable[[np.ndarray], np.ndarray], origin: np.ndarray, named: Sequence[Named]
) -> np.ndarray:
    """The best of several starts: where memory bounds no pass, nothing says which way its rate has
    to go until it does, and the same of compute.
    """
    found = [least_squares(residuals, origin)]
    for which in ("reads", "compute"):
        shift = np.array([-_AWAY if name == which else 0.0 for _, name in named])
        found.append(least_squares(residuals, origin + shift))
    return min(found, key=lambda x: float(np.square(residuals(x)).sum()))


def _started(work: ProfiledWork, of: Device) -> dict[Kind, Coefficients]:
    """The catalogue's, with the seconds of all layers in those of a step: of one Model nothing
    tells them apart.
    """
    layers = work.model.shape.layers
    return {
        kind: replace(c, step=c.step + layers * c.layer, layer=0.0)
        for kind, c in coefficients(of).items()
    }


def _with(
    start: Mapping[Kind, Coefficients], named: Sequence[Named], values: np.ndarray
) -> dict[Kind, Coefficients]:
    found = dict(start)
    for (kind, name), value in zip(named, values.tolist(), strict=True):
        found[kind] = replace(found[kind], **{name: value})
    if "prefill" in {kind for kind, _ in named}:  # it reads the same weights
        found["prefill"] = replace(found["prefill"], reads=found["decode"].reads)
    return found


def least_squares(residuals: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> np.ndarray:
    """The point with the least sum of squares near `start`, by Levenberg and Marquardt's damped
    steps; each coordinate within the logarithms of _BOUNDS.
    """
    low, high = np.log(_BOUNDS)
    x, damping = start.astype(np.float64), 1e-2
    at = residuals(x)
    for _ in range(_ROUNDS):
        slopes = np.stack(
            [(residuals(x + _SHIFT * unit) - at) / _SHIFT for unit in np.eye(len(x))], axis=1
        )
        square, downhill = slopes.T @ slopes, slopes.T @ at
        before = float(at @ at)
        while damping < _MOST_DAMPING:
            damped = square + damping * np.diag(np.diag(square) + 1e-12)
            step = np.clip(np.linalg.solve(damped, downhill), -_STRIDE, _STRIDE)
            tried = np.clip(x - step, low, high)
            there = residuals(tried)
            if float(there @ there) < before:
                x, at, damping = tried, there, 0.3 * damping
                break
            damping *= 4.0
        if before - float(at @ at) < _GAIN:
            break
    return x


def _slopes(sizes: np.ndarray, peaks: np.ndarray) -> np.ndarray:
    """Of the lines through two cells of different sizes, as far as they rise."""
    rise, run = (np.subtract.outer(each, each) for each in (peaks, sizes))
    slopes = rise[run > 0] / run[run > 0]
    return slopes[slopes > 0]


def peak_correction(cells: Sequence[MeasuredCell]) -> PeakCorrection:
    """base + factor x estimate, at least every measured peak, and as little above as can be where
    the run's will be: of all factors the one whose greatest ratio is least among the cells that
    need more than _NEAR of the largest, which has a Step's rows at their greatest lengths.
    """
    known = [c.cell for c in cells if c.cell.peak > 0 and c.cell.estimated > 0]
    if not known:
        return PeakCorrection()
    peaks = np.array([c.peak for c in known], dtype=np.float64)
    sizes = np.array([c.estimated for c in known], dtype=np.float64)
    factors = np.concatenate([np.linspace(0.02, 3.0, 150), peaks / sizes, _slopes(sizes, peaks)])
    bases = np.maximum((peaks[:, None] - sizes[:, None] * factors).max(axis=0), 0.0)
    needed = (peaks[:, None] / (bases + sizes[:, None] * factors)).max(axis=0)
    bases, factors = bases * np.minimum(needed, 1.0), factors * np.minimum(needed, 1.0)
    above = (bases + sizes[:, None] * factors) / peaks[:, None]
    near = above[sizes >= _NEAR * sizes.max()].max(axis=0)
    close = near <= _AS_CLOSE * near.min()
    best = int(np.where(close, above.max(axis=0), np.inf).argmin())
    base = int(np.ceil(_MARGIN * bases[best]))
    return PeakCorrection(base=base, factor=float(_MARGIN * factors[best]))
