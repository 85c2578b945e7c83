"""The promises of losses.

Owns: what each is, when it holds, how it is tested. Does not own: rows (generate.py), a loss's
numbers (numbers.py), derivatives by differences (numeric_gradients.py), the order and the report
(suite.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from operators.contracts.cases import Generated
from operators.contracts.columns import close, place, shown
from operators.contracts.numbers import (
    MASS,
    Options,
    UpdateNumbers,
    leaves_of,
    terms_alone,
    update,
    weighed,
)
from operators.contracts.numeric_gradients import Slope, slopes
from operators.contracts.operators import HUGE, Groups, huge, sides, within
from operators.contracts.promise import Broken, Promise
from operators.contracts.subject import LossSubject
from operators.contracts.values import RUBBISH


def _shape(subject: LossSubject, rows: Generated) -> None:
    update(subject, rows)


def _finite(subject: LossSubject, rows: Generated) -> None:
    _require_finite("finite", rows, update(subject, rows))


def _extremes(subject: LossSubject, rows: Generated) -> None:
    _require_finite("extremes", rows, update(subject, rows))


def _require_finite(promise: str, rows: Generated, made: UpdateNumbers) -> None:
    if not math.isfinite(made.loss):
        raise Broken(promise, f"a loss of {made.loss}")
    for name, gradients in made.gradients.items():
        for row, gradient in enumerate(gradients):
            if not np.isfinite(gradient).all():
                found = f"gradient {shown(gradient)} by now.{name}"
                raise Broken(promise, f"{place(rows, row)}: {found}")


def _deterministic(subject: LossSubject, rows: Generated) -> None:
    one, other = update(subject, rows), update(subject, rows)
    _require_equal("deterministic", rows, one, other, "computed again")


def _require_equal(
    promise: str,
    rows: Generated,
    one: UpdateNumbers,
    other: UpdateNumbers,
    how: str,
    *,
    order: Sequence[int] | None = None,
    pick: Callable[[int, np.ndarray], np.ndarray] = lambda row, gradient: gradient,
) -> None:
    """Raise Broken if losses or gradients differ. order: the row of `one` for each of `other`.
    pick: what of a row's gradient in `one` is compared.
    """
    if not close(one.loss, other.loss):
        raise Broken(promise, f"the loss is {one.loss:.6g}, and {how} {other.loss:.6g}")
    for name, gradients in one.gradients.items():
        for its, mine in enumerate(range(len(rows)) if order is None else order):
            a, b = gradients[mine], other.gradients[name][its]
            a = a if name == "scores" else pick(mine, a)
            if not close(a, b):
                found = f"gradient {shown(a)} by now.{name}, and {how} {shown(b)}"
                raise Broken(promise, f"{place(rows, mine)}: {found}")


def _units(subject: LossSubject, rows: Generated) -> Groups:
    """What micro-batches are made of."""
    return rows.groups if "group" in subject.scopes else [[row] for row in range(len(rows))]


def _split(units: Groups, which: Sequence[bool]) -> list[list[int]]:
    """The rows of the units on each side of a cut; a side without rows is left out."""
    halves: list[list[int]] = [[], []]
    for unit, side in zip(units, which, strict=False):
        halves[side] += unit
    return [sorted(half) for half in halves if half]


def _data_parallel(subject: LossSubject, rows: Generated) -> None:
    ranks = _split(rows.groups, rows.spare)
    one, other = update(subject, rows), update(subject, rows, ranks=ranks)
    _require_equal("data_parallel", rows, one, other, f"with the rows {ranks} on a rank each")


def _micro_batches(subject: LossSubject, rows: Generated) -> None:
    parts = _split(_units(subject, rows), rows.spare)
    one, other = update(subject, rows), update(subject, rows, parts)
    _require_equal("micro_batches", rows, one, other, f"in micro-batches of the rows {parts}")


def _metrics(subject: LossSubject, rows: Generated) -> None:
    parts = _split(_units(subject, rows), rows.spare)
    one, other = (update(subject, rows, part).metrics for part in (None, parts))
    for name in one.keys() | other.keys():
        a, b = one.get(name, (0.0, 0.0)), other.get(name, (0.0, 0.0))
        if not close(a, b):
            found = f"{name} is (sum, count) {_pair(a)}, and in micro-batches of the rows {parts}"
            raise Broken("metrics", f"{found} together {_pair(b)}")


def _pair(metric: tuple[float, float]) -> str:
    return f"({metric[0]:.6g}, {metric[1]:.6g})"


def _packing(subject: LossSubject, rows: Generated) -> None:
    whole = terms_alone(subject, rows, range(len(rows)))
    counts = weighed(subject, rows)
    for unit in _units(subject, rows):
        alone = terms_alone(subject, rows, unit)
        for term, packed, own, weight in zip(subject.loss.terms, whole, alone, counts, strict=True):
            where = _slots(rows, unit, term.function.scope)
            live = weight[where] > 0
            a, b = own.detach()[live].numpy(), packed.detach()[where][live].numpy()
            if not close(a, b):
                found = f"the terms of row {unit} are {shown(a)} alone, and {shown(b)} among others"
                raise Broken("packing", found.replace("row [", "the rows ["))


def _slots(rows: Generated, unit: Sequence[int], scope: str) -> Tensor:
    """Where the terms of a unit are among those of all rows."""
    if scope == "sequence":
        return torch.tensor(list(unit))
    if scope == "group":
        return torch.tensor([rows.groups.index(list(unit))])
    ends = np.cumsum([0, *map(len, rows.masks)])
    return torch.tensor([at for row in unit for at in range(ends[row], ends[row + 1])]).long()


def _row_order(subject: LossSubject, rows: Generated) -> None:
    order = [row for group in rows.spare for row in group]
    moved = rows.arranged(order, rows.position, rows.sample)
    one, other = update(subject, rows), update(subject, moved)
    _require_equal(
        "row_order", rows, one, other, f"with the rows in the order {order}", order=order
    )


def _relabelling(subject: LossSubject, rows: Generated) -> None:
    one = update(subject, rows)
    other = update(subject, rows, options=Options(labels=rows.spare))
    how = f"with the groups numbered {list(rows.spare)}"
    _require_equal("relabelling", rows, one, other, how)


def _isolation(subject: LossSubject, rows: Generated) -> None:
    *_, mine = _units(subject, rows)
    one = _gradients_of(subject, rows, mine)
    changed = rows.changed(lambda port, found: huge(found, mine, rows.spare))
    other = _gradients_of(subject, changed, mine)
    for name in one:
        for row in range(len(rows)):
            a, b = one[name][row], other[name][row]
            if row not in mine and (a.any() or b.any()):
                found = f"the terms of the rows {mine} have a gradient {shown(a if a.any() else b)}"
                raise Broken("isolation", f"{found} by now.{name} of {place(rows, row)}")
            if row in mine and not close(a, b):
                how = "with huge numbers in other rows"
                found = f"gradient {shown(a)} by now.{name}, and {how} {shown(b)}"
                raise Broken("isolation", f"{place(rows, row)}: {found}")


def _gradients_of(
    subject: LossSubject, rows: Generated, mine: Sequence[int]
) -> dict[str, list[np.ndarray]]:
    """The gradient of these rows' terms by all of the model's numbers."""
    leaves = leaves_of(rows)
    made = terms_alone(subject, rows, range(len(rows)), leaves=leaves)
    _sum(made, weighed(subject, rows, lambda row: row in mine)).backward()
    ends = np.cumsum([0, *map(len, rows.masks)])
    found = {}
    for name, leaf in leaves.items():
        own = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        cuts = range(len(rows) + 1) if name == "scores" else ends
        found[name] = [own[cuts[row] : cuts[row + 1]] for row in range(len(rows))]
    return found


def _sum(terms: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """As `reduce_term`: what does not count is left out, not multiplied by 0."""
    total = torch.zeros((), dtype=torch.float64)
    for term, weight in zip(terms, weights, strict=True):
        total = total + (term.double().masked_fill(weight == 0, 0.0) * weight).sum()
    return total


def _masked_gradient(subject: LossSubject, rows: Generated) -> None:
    made = update(subject, rows, options=Options(raw=True))
    for name in made.gradients.keys() - {"scores"}:
        for row, mask in enumerate(rows.masks):
            gradient = made.gradients[name][row]
            if np.any(gradient[np.array(mask, dtype=np.int64) == 0]):
                found = f"gradient {shown(gradient)} by now.{name}, where the mask is {mask}"
                raise Broken("masked_gradient", f"{place(rows, row)}: {found}")


def _masked(subject: LossSubject, rows: Generated) -> None:
    one, other = update(subject, rows), update(subject, rows.fouled(rows.spare))
    how = f"with {rows.spare} at the tokens of mask 0"
    _require_equal("masked", rows, one, other, how)
    for name, metric in other.metrics.items():
        if not close(metric, one.metrics[name]):
            found = f"{name} is {_pair(one.metrics[name])}, and {how} {_pair(metric)}"
            raise Broken("masked", f"the metric {found}")


def _holes(subject: LossSubject, rows: Generated) -> None:
    one, other = update(subject, rows), update(subject, rows.without_holes())

    def trained(row: int, gradient: np.ndarray) -> np.ndarray:
        return gradient[np.array(rows.masks[row], dtype=bool)]

    _require_equal("holes", rows, one, other, "without its tokens of mask 0", pick=trained)


def _float32(subject: LossSubject, rows: Generated) -> None:
    every = range(len(rows))
    narrow = terms_alone(subject, rows, every)
    wide = terms_alone(subject, rows, every, options=Options(double=True))
    for one, other, weight in zip(narrow, wide, weighed(subject, rows), strict=True):
        if one.dtype != torch.float32:
            raise Broken("float32", f"terms of {one.dtype} for numbers of float32")
        a, b = one.detach()[weight > 0].double(), other.detach()[weight > 0].double()
        far = (a - b).abs() > 1e-3 * b.abs().clamp(min=1.0)
        if bool(far.any()):
            found = f"a term of {a[far][0]:.6g} in float32, of {b[far][0]:.6g} in float64"
            raise Broken("float32", found)


def _slopes(subject: LossSubject, rows: Generated, away: float) -> list[Slope]:
    """away: how far each of the model's numbers is moved first."""
    leaves = leaves_of(rows, double=True)
    with torch.no_grad():
        for leaf in leaves.values():
            flat = leaf.view(-1)
            flat += away * torch.sin(torch.arange(1.0, len(flat) + 1.0, dtype=torch.float64))
    weights = weighed(subject, rows)

    def total(given: dict[str, Tensor]) -> Tensor:
        options = Options(double=True)
        made = terms_alone(subject, rows, range(len(rows)), leaves=given, options=options)
        return _sum(made, weights)

    return list(slopes(total, leaves))


def _gradient(subject: LossSubject, rows: Generated) -> None:
    for slope in _slopes(subject, rows, away=0.0371):
        middle = (slope.left + slope.right) / 2
        if not slope.kink and abs(slope.said - middle) > 1e-4 * (1 + abs(middle)):
            found = f"backward says {slope.said:.6g} by now.{slope.name}[{slope.at}], differences"
            raise Broken("gradient", f"{found} {middle:.6g}")


def _kinks(subject: LossSubject, rows: Generated) -> None:
    rows = replace(rows, absent=rows.absent | {MASS})
    for slope in _slopes(subject, rows, away=0.0):
        follows = max(slope.left, slope.right, key=abs)
        if slope.kink and abs(slope.said - follows) > 1e-3 * (1 + abs(follows)):
            found = f"backward says {slope.said:.6g} by now.{slope.name}[{slope.at}], and the slope"
            raise Broken(
                "kinks",
                f"{found} is {slope.left:.6g} to the left and {slope.right:.6g} to the right",
            )


def _numbered(groups: Groups) -> st.SearchStrategy[Any]:
    return st.permutations(range(len(groups)))


_SPLIT = {"groups": 2, "live": True, "spare": sides}

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
        rows={"live": True, "spare": within},
    ),
    Promise(
        name="relabelling",
        says="groups numbered in another way give the same loss and gradient",
        fix="now.group_sum(...) and indexing by now.row_group, which need no order",
        test=_relabelling,
        rests_on=("deterministic",),
        rows={"groups": 2, "live": True, "spare": _numbered},
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
