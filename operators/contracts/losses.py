"""The promises of losses.

Owns: what each is, when it holds, how it is tested. Does not own: rows (generate.py), a loss's
numbers (numbers.py), its derivatives (loss_derivatives.py), the order and the report
(suite.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from operators.contracts.cases import Generated
from operators.contracts.columns import are_close, describe_place, format_numbers
from operators.contracts.loss_derivatives import gradients_of_rows, measure_loss_slopes
from operators.contracts.numbers import (
    MASS,
    Options,
    UpdateNumbers,
    compute_terms,
    compute_update,
    make_weights,
)
from operators.contracts.numeric_gradients import Slope
from operators.contracts.operators import HUGE, Groups, draw_row_orders, draw_sides, make_huge
from operators.contracts.promise import Broken, Promise
from operators.contracts.subject import LossSubject
from operators.contracts.values import RUBBISH


def _shape(subject: LossSubject, rows: Generated) -> None:
    compute_update(subject, rows)


def _finite(subject: LossSubject, rows: Generated) -> None:
    _require_finite("finite", rows, compute_update(subject, rows))


def _extremes(subject: LossSubject, rows: Generated) -> None:
    _require_finite("extremes", rows, compute_update(subject, rows))


def _require_finite(promise: str, rows: Generated, update: UpdateNumbers) -> None:
    if not math.isfinite(update.loss):
        raise Broken(promise, f"a loss of {update.loss}")
    for name, gradients in update.gradients.items():
        for row, gradient in enumerate(gradients):
            if not np.isfinite(gradient).all():
                problem = f"gradient {format_numbers(gradient)} by now.{name}"
                raise Broken(promise, f"{describe_place(rows, row)}: {problem}")


def _deterministic(subject: LossSubject, rows: Generated) -> None:
    one, other = compute_update(subject, rows), compute_update(subject, rows)
    _require_equal("deterministic", rows, one, other, "computed again")


def _whole_gradient(row: int, gradient: np.ndarray) -> np.ndarray:
    return gradient


def _require_equal(
    promise: str,
    rows: Generated,
    one: UpdateNumbers,
    other: UpdateNumbers,
    how: str,
    *,
    order: Sequence[int] | None = None,
    pick: Callable[[int, np.ndarray], np.ndarray] = _whole_gradient,
) -> None:
    """Raise Broken if losses or gradients differ. order: the row of `one` for each of `other`.
    pick: what of a row's gradient in `one` is compared.
    """
    if not are_close(one.loss, other.loss):
        raise Broken(promise, f"the loss is {one.loss:.6g}, and {how} {other.loss:.6g}")
    if order is None:
        order = range(len(rows))
    for name, gradients in one.gradients.items():
        for other_row, row in enumerate(order):
            a, b = gradients[row], other.gradients[name][other_row]
            # A row has one score, whatever its tokens are.
            if name != "scores":
                a = pick(row, a)
            if not are_close(a, b):
                a_text, b_text = format_numbers(a), format_numbers(b)
                problem = f"gradient {a_text} by now.{name}, and {how} {b_text}"
                raise Broken(promise, f"{describe_place(rows, row)}: {problem}")


def _units(subject: LossSubject, rows: Generated) -> Groups:
    """What micro-batches are made of."""
    if "group" in subject.scopes:
        return rows.groups
    return [[row] for row in range(len(rows))]


def _split(units: Groups, sides: Sequence[bool]) -> list[list[int]]:
    """The rows of the units on each side of a cut; a side without rows is left out."""
    halves: list[list[int]] = [[], []]
    # There may be more sides than units: one was drawn for each row.
    for unit, side in zip(units, sides, strict=False):
        halves[side] += unit
    return [sorted(half) for half in halves if half]


def _data_parallel(subject: LossSubject, rows: Generated) -> None:
    ranks = _split(rows.groups, rows.spare)
    one = compute_update(subject, rows)
    other = compute_update(subject, rows, ranks=ranks)
    _require_equal("data_parallel", rows, one, other, f"with the rows {ranks} on a rank each")


def _micro_batches(subject: LossSubject, rows: Generated) -> None:
    parts = _split(_units(subject, rows), rows.spare)
    one = compute_update(subject, rows)
    other = compute_update(subject, rows, parts)
    _require_equal("micro_batches", rows, one, other, f"in micro-batches of the rows {parts}")


def _metrics(subject: LossSubject, rows: Generated) -> None:
    parts = _split(_units(subject, rows), rows.spare)
    one = compute_update(subject, rows).metrics
    other = compute_update(subject, rows, parts).metrics
    nothing = (0.0, 0.0)
    for name in one.keys() | other.keys():
        a, b = one.get(name, nothing), other.get(name, nothing)
        if not are_close(a, b):
            problem = (
                f"{name} is (sum, count) {_format_metric(a)}, and in micro-batches of the rows"
                f" {parts} together {_format_metric(b)}"
            )
            raise Broken("metrics", problem)


def _format_metric(metric: tuple[float, float]) -> str:
    return f"({metric[0]:.6g}, {metric[1]:.6g})"


def _packing(subject: LossSubject, rows: Generated) -> None:
    together = compute_terms(subject, rows, range(len(rows)))
    weights = make_weights(subject, rows)
    for unit in _units(subject, rows):
        alone = compute_terms(subject, rows, unit)
        numbers = zip(subject.loss.terms, together, alone, weights, strict=True)
        for term, packed, unit_alone, weight in numbers:
            slots = _slots(rows, unit, term.function.scope)
            is_counted = weight[slots] > 0
            a = unit_alone.detach()[is_counted].numpy()
            b = packed.detach()[slots][is_counted].numpy()
            if not are_close(a, b):
                a_text, b_text = format_numbers(a), format_numbers(b)
                problem = f"the terms of row {unit} are {a_text} alone, and {b_text} among others"
                raise Broken("packing", problem.replace("row [", "the rows ["))


def _slots(rows: Generated, unit: Sequence[int], scope: str) -> Tensor:
    """Where the terms of a unit are among those of all rows."""
    if scope == "sequence":
        return torch.tensor(list(unit))
    if scope == "group":
        return torch.tensor([rows.groups.index(list(unit))])
    ends = np.cumsum([0, *map(len, rows.masks)])
    slots: list[int] = []
    for row in unit:
        slots += range(ends[row], ends[row + 1])
    return torch.tensor(slots).long()


def _row_order(subject: LossSubject, rows: Generated) -> None:
    order = list(chain.from_iterable(rows.spare))
    moved = rows.arrange(order, rows.position, rows.sample)
    one, other = compute_update(subject, rows), compute_update(subject, moved)
    how = f"with the rows in the order {order}"
    _require_equal("row_order", rows, one, other, how, order=order)


def _relabelling(subject: LossSubject, rows: Generated) -> None:
    one = compute_update(subject, rows)
    other = compute_update(subject, rows, options=Options(labels=rows.spare))
    how = f"with the groups numbered {list(rows.spare)}"
    _require_equal("relabelling", rows, one, other, how)


def _isolation(subject: LossSubject, rows: Generated) -> None:
    *_, unit = _units(subject, rows)
    changed = rows.change_columns(lambda port, column: make_huge(column, unit, rows.spare))
    one = gradients_of_rows(subject, rows, unit)
    other = gradients_of_rows(subject, changed, unit)
    for name in one:
        for row in range(len(rows)):
            _require_isolated(rows, unit, row, name, one[name][row], other[name][row])


def _require_isolated(
    rows: Generated, unit: Sequence[int], row: int, name: str, a: np.ndarray, b: np.ndarray
) -> None:
    """a, b: the gradient of the unit's terms by this row's numbers, without and with huge numbers
    in other rows. Raises Broken.
    """
    where = describe_place(rows, row)
    if row not in unit and (a.any() or b.any()):
        gradient = format_numbers(a if a.any() else b)
        problem = f"the terms of the rows {unit} have a gradient {gradient} by now.{name} of"
        raise Broken("isolation", f"{problem} {where}")
    if row in unit and not are_close(a, b):
        how = "with huge numbers in other rows"
        problem = f"gradient {format_numbers(a)} by now.{name}, and {how} {format_numbers(b)}"
        raise Broken("isolation", f"{where}: {problem}")


def _masked_gradient(subject: LossSubject, rows: Generated) -> None:
    update = compute_update(subject, rows, options=Options(raw=True))
    for name in update.gradients.keys() - {"scores"}:
        for row, mask in enumerate(rows.masks):
            gradient = update.gradients[name][row]
            holes = np.array(mask, dtype=np.int64) == 0
            if np.any(gradient[holes]):
                numbers = format_numbers(gradient)
                problem = f"gradient {numbers} by now.{name}, where the mask is {mask}"
                raise Broken("masked_gradient", f"{describe_place(rows, row)}: {problem}")


def _masked(subject: LossSubject, rows: Generated) -> None:
    one = compute_update(subject, rows)
    other = compute_update(subject, rows.foul(rows.spare))
    how = f"with {rows.spare} at the tokens of mask 0"
    _require_equal("masked", rows, one, other, how)
    for name, metric in other.metrics.items():
        if not are_close(metric, one.metrics[name]):
            before, after = _format_metric(one.metrics[name]), _format_metric(metric)
            raise Broken("masked", f"the metric {name} is {before}, and {how} {after}")


def _holes(subject: LossSubject, rows: Generated) -> None:
    one, other = compute_update(subject, rows), compute_update(subject, rows.drop_holes())

    def pick_trained(row: int, gradient: np.ndarray) -> np.ndarray:
        return gradient[np.array(rows.masks[row], dtype=bool)]

    _require_equal("holes", rows, one, other, "without its tokens of mask 0", pick=pick_trained)


def _float32(subject: LossSubject, rows: Generated) -> None:
    all_rows = range(len(rows))
    narrow = compute_terms(subject, rows, all_rows)
    wide = compute_terms(subject, rows, all_rows, options=Options(double=True))
    for one, other, weight in zip(narrow, wide, make_weights(subject, rows), strict=True):
        if one.dtype != torch.float32:
            raise Broken("float32", f"terms of {one.dtype} for numbers of float32")
        is_counted = weight > 0
        a = one.detach()[is_counted].double()
        b = other.detach()[is_counted].double()
        is_far = (a - b).abs() > 1e-3 * b.abs().clamp(min=1.0)
        if bool(is_far.any()):
            a_first, b_first = a[is_far][0], b[is_far][0]
            problem = f"a term of {a_first:.6g} in float32, of {b_first:.6g} in float64"
            raise Broken("float32", problem)


def _gradient(subject: LossSubject, rows: Generated) -> None:
    # Away from where numbers coincide: there a loss may have a kink.
    for slope in measure_loss_slopes(subject, rows, away=0.0371):
        middle = (slope.left + slope.right) / 2
        is_far = abs(slope.backward - middle) > 1e-4 * (1 + abs(middle))
        if is_far and not slope.is_kink:
            problem = f"{_describe_slope(slope)}, differences {middle:.6g}"
            raise Broken("gradient", problem)


def _kinks(subject: LossSubject, rows: Generated) -> None:
    # With a mass the behaviour differs from the log-probs that coincide.
    rows = replace(rows, absent=rows.absent | {MASS})
    for slope in measure_loss_slopes(subject, rows, away=0.0):
        steeper = max(slope.left, slope.right, key=abs)
        is_far = abs(slope.backward - steeper) > 1e-3 * (1 + abs(steeper))
        if is_far and slope.is_kink:
            sides = f"{slope.left:.6g} to the left and {slope.right:.6g} to the right"
            raise Broken("kinks", f"{_describe_slope(slope)}, and the slope is {sides}")


def _describe_slope(slope: Slope) -> str:
    return f"backward says {slope.backward:.6g} by now.{slope.name}[{slope.at}]"


def _group_numbers(groups: Groups) -> st.SearchStrategy[Any]:
    return st.permutations(range(len(groups)))


_SPLIT = {"groups": 2, "live": True, "spare": draw_sides}

PROMISES: tuple[Promise[LossSubject], ...] = (
    Promise(
        name="shape",
        says="it returns unreduced Terms that depend on the model, one number for each token, row"
        " or group, as its scope says",
        fix="return Terms(loss) without a mean, or declare another scope",
        test=_shape,
    ),
    Promise(
        name="finite",
        says="of ordinary numbers it makes a finite loss and gradient",
        fix="keep denominators, roots and logarithms away from 0",
        test=_finite,
        rows={"live": True},
    ),
    Promise(
        name="deterministic",
        says="the same rows give the same numbers",
        fix="no random numbers and no state between calls",
        test=_deterministic,
        rests_on=("finite",),
        rows={"live": True},
    ),
    Promise(
        name="data_parallel",
        says="an update whose groups are on several ranks is the update on one",
        fix="no mean over the rows of a call: train knows the denominators",
        test=_data_parallel,
        rests_on=("deterministic",),
        rows=_SPLIT,
    ),
    Promise(
        name="micro_batches",
        says="an update in several micro-batches is the update in one; only scope='group' keeps a"
        " group together",
        fix="@loss(scope='group') for a loss that needs whole groups",
        test=_micro_batches,
        rests_on=("data_parallel",),
        rows=_SPLIT,
    ),
    Promise(
        name="packing",
        says="a row (a group, where scope is group) has the same terms packed with others as"
        " alone, in its own places",
        fix="use now.row and now.row_group to tell rows apart, never their neighbours",
        test=_packing,
        rests_on=("micro_batches",),
        rows={"groups": 2},
    ),
    Promise(
        name="metrics",
        says="each metric is a (sum, count) that adds up over micro-batches",
        fix="return (values.sum(), count), not (mean, 1)",
        test=_metrics,
        rests_on=("micro_batches",),
        rows=_SPLIT,
    ),
    Promise(
        name="row_order",
        says="the rows of a group in another order give the same loss and gradient",
        fix="no row of a group is special: tell rows apart by their columns",
        test=_row_order,
        rests_on=("deterministic",),
        rows={"live": True, "spare": draw_row_orders},
    ),
    Promise(
        name="relabelling",
        says="groups numbered in another way give the same loss and gradient",
        fix="now.group_sum(...) and indexing by now.row_group, which need no order",
        test=_relabelling,
        rests_on=("deterministic",),
        rows={"groups": 2, "live": True, "spare": _group_numbers},
    ),
    Promise(
        name="isolation",
        says="no number of another row (of another group, where scope is group) changes a"
        " gradient, however large",
        fix="now.row_sum and now.group_sum, not differences of running sums",
        test=_isolation,
        rests_on=("packing",),
        rows={"groups": 2, "live": True, "spare": lambda groups: HUGE},
    ),
    Promise(
        name="masked_gradient",
        says="the gradient is exactly 0 at tokens with mask 0 and in rows with weight 0",
        fix="now.row_sum, or masked_fill(now.mask == 0, 0.0) before a sum of your own",
        test=_masked_gradient,
        rests_on=("finite",),
    ),
    Promise(
        name="masked",
        says="whatever stands at a token with mask 0, nan too, changes no loss, gradient or metric",
        fix="masked_fill(now.mask == 0, 0.0): 0 * nan is nan",
        test=_masked,
        rests_on=("deterministic", "masked_gradient"),
        rows={"spare": lambda groups: st.sampled_from(RUBBISH)},
    ),
    Promise(
        name="holes",
        says="a token with mask 0 counts as if it were not there",
        fix="count tokens by now.row_sum(ones), not by the length of a row",
        test=_holes,
        rests_on=("deterministic", "masked_gradient"),
    ),
    Promise(
        name="float32",
        says="in float32 its terms are those of float64, to three digits",
        fix="no narrower type inside; expm1 and log1p for small differences",
        test=_float32,
        rests_on=("deterministic",),
    ),
    Promise(
        name="gradient",
        says="backward is the derivative, with what is detached held constant",
        fix="look at hooks and at autograd functions of your own",
        test=_gradient,
        rests_on=("float32",),
    ),
    Promise(
        name="kinks",
        says="where the model's number equals the one that it is compared with, the gradient is"
        " that on the side where the term follows the model",
        fix="choose the side with torch.where: abs and relu have gradient 0 there, maximum half",
        test=_kinks,
        rests_on=("gradient",),
        rows={"coincide": True, "live": True},
    ),
    Promise(
        name="extremes",
        says="log-ratios up to 88 give a finite loss and gradient",
        fix="bound what goes into an exponential, detach what is held",
        test=_extremes,
        rests_on=("finite",),
        rows={"size": "extreme", "live": True},
    ),
)
"""In the order in which they build on each other."""
