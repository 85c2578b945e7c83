"""A loss's numbers on generated rows: its terms, their reduction and its gradient.

Owns: feeding a loss what a train kernel would, with the generated numbers in the place of a
model's, by the kernel's own packing and reduction. Does not own: which rows (generate.py), what is
compared (losses.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataflow.batch import Batch
from dataflow.kernel import Assignment
from dataflow.loss import LossTerm, Now, Terms
from dataflow.model import Schedule, value_at
from operators.contracts.cases import Generated
from operators.contracts.promise import Broken, refuse_case
from operators.contracts.subject import LossSubject
from operators.kernels.torch.loss_call import LossFault, call_loss
from operators.kernels.torch.model_numbers import (
    ModelNumbers,
    NowByTerm,
    complete_now,
    ids_of,
)
from operators.kernels.torch.packing import Packed, pack
from operators.kernels.torch.reduce import Weights, count_weights, reduce_term
from operators.kernels.torch.steprows import TrainRows, now_of, step_rows, tensors_of

CPU = torch.device("cpu")
STEP = 1
MASS = "sampler_mass"
MODEL = "now"
"""The port of generated rows that has the model's numbers."""

Leaves = Mapping[str, Tensor]


@dataclass(slots=True, kw_only=True)
class UpdateNumbers:
    """What an update would be: its loss, the gradient of each of the model's numbers, by row, and
    the metrics' sums.
    """

    loss: float
    gradients: dict[str, list[np.ndarray]] = field(default_factory=dict)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """labels: other numbers for the groups. raw: the model's numbers at tokens with mask 0 have a
    gradient, too, as they have not in a train kernel. double: in float64.
    """

    labels: Sequence[int] | None = None
    raw: bool = False
    double: bool = False


PLAIN = Options()


def leaves_of(rows: Generated, *, double: bool = False) -> dict[str, Tensor]:
    """The model's numbers, flat, each with gradient."""
    kind = torch.float64 if double else torch.float32
    made = {}
    for name, column in rows.ports[MODEL].items():
        values = column.values
        if column.by_token:
            values = [v for row in values for v in row]
        assert column.declared is not None
        wide = getattr(column.declared.type, "list_size", None)
        shape = (len(values),) if wide is None else (len(values), wide)
        made[name] = torch.tensor(values, dtype=kind).reshape(shape).requires_grad_()
    return made


def step_rows_of(subject: LossSubject, rows: Generated) -> TrainRows:
    """The rows as a train kernel reads them; ports that are absent are left out."""
    read = rows.batch("rows")
    if MASS in rows.absent:
        read = read.select(name for name in read.names if name != MASS)
    inputs: dict[str, Batch] = {"rows": read}
    for port in subject.inputs:
        if port.name not in rows.absent:
            inputs[port.name] = rows.batch(port.name)
    assignment = Assignment(sequence=STEP, step=STEP, keys=rows.keys, inputs=inputs)
    return step_rows(assignment, subject.loss, "contract")


def weights_of(subject: LossSubject, rows: TrainRows) -> Weights:
    """The denominators of an update of all rows: each token, or each row, counts as much."""
    by = "token_mean" if "token" in subject.scopes else "sequence_mean"
    every = np.arange(len(rows.keys))
    return count_weights(rows.trained, rows.groups, every, aggregate=by)


def heard(
    subject: LossSubject, rows: TrainRows, packed: Packed, leaves: Leaves, options: Options
) -> NowByTerm:
    """What the loss's terms see of some rows."""
    now = now_of(rows, packed, STEP, CPU)
    now.vocabulary = 10
    if options.labels is not None:
        named = torch.tensor(options.labels)[now.row_group]
        now = replace(now, row_group=named, group=named[now.row])
    tokens, where = torch.from_numpy(packed.tokens), torch.from_numpy(packed.rows)
    picked = {name: leaf[where if name == "scores" else tokens] for name, leaf in leaves.items()}
    answers = ModelNumbers(
        tokens=picked["values" if subject.scalar else "logprobs"],
        scores=picked.get("scores"),
        entropy=picked.get("entropy"),
        at_ids=picked.get("at_ids"),
    )
    ids = ids_of(rows, subject.loss, packed, CPU)
    completed = complete_now(now, answers, ids, scalar=subject.scalar)
    return _raw(completed, answers, subject) if options.raw else completed


def _raw(found: NowByTerm, answers: ModelNumbers, subject: LossSubject) -> NowByTerm:
    name = "values" if subject.scalar else "logprobs"
    return replace(found, now=replace(found.now, **{name: answers.tokens}))


def term_of(
    subject: LossSubject,
    term: LossTerm,
    rows: Generated,
    read: TrainRows,
    packed: Packed,
    what: NowByTerm,
    *,
    double: bool = False,
) -> Terms:
    """What one term's function returns. Raises Broken if that does not fit its declaration."""
    now = what.of(term)
    tensors: dict[str, Any] = dict(tensors_of(read, term, packed, now))
    if double:
        now, tensors = _double(now), {name: _doubled(t) for name, t in tensors.items()}
    params = {name: _now(value) for name, value in term.params}
    label = f"{term.label}."
    params |= {n.removeprefix(label): v for n, v in rows.params.items() if n.startswith(label)}
    try:
        made = call_loss(term.function.fn, now, tensors, params)
    except LossFault as fault:
        if isinstance(fault.__cause__, Exception):
            refuse_case(fault.__cause__)
        problem = str(fault).partition("\n")[0]
        raise Broken("shape", problem.partition(" Fix:")[0].rstrip(".")) from fault.__cause__
    _require_fit(term, made, now)
    return made


def _now(value: Any) -> Any:
    return value.at(STEP) if isinstance(value, Schedule) else value


def _require_fit(term: LossTerm, made: Terms, now: Now) -> None:
    scope = term.function.scope
    wanted = {"token": len(now.mask), "sequence": now.rows, "group": now.groups}[scope]
    if tuple(made.loss.shape) != (wanted,):
        shape = list(made.loss.shape)
        raise Broken(
            "shape", f"Terms.loss is {shape} for {wanted} {scope}s, whose shape is [{wanted}]"
        )


def _double(now: Now) -> Now:
    wide = {
        name: value.double() for name in _NUMBERS if isinstance(value := getattr(now, name), Tensor)
    }
    return replace(now, **wide)


_NUMBERS = (
    "mask",
    "logprobs",
    "values",
    "scores",
    "entropy",
    "at_ids",
    "sampler_logprobs",
    "sampler_mass",
)


def _doubled(tensors: Any) -> Any:
    columns = {n: t.double() if t.is_floating_point() else t for n, t in tensors.columns.items()}
    return type(tensors)(columns)


def update(
    subject: LossSubject,
    rows: Generated,
    parts: Sequence[Sequence[int]] | None = None,
    *,
    ranks: Sequence[Sequence[int]] | None = None,
    options: Options = PLAIN,
) -> UpdateNumbers:
    """One update, in these micro-batches, or on these ranks, each with one."""
    read, leaves, made = step_rows_of(subject, rows), leaves_of(rows), UpdateNumbers(loss=0.0)
    weights = weights_of(subject, read)
    total: Any = torch.zeros(())
    for mine in ranks or [range(len(rows))]:
        own, its, counted = read, leaves, weights
        if ranks is not None:
            own = step_rows_of(subject, rows.take(mine))
            its = {name: _of(leaf, name, mine, rows) for name, leaf in leaves.items()}
            counted = weights.of(np.array(mine))
        for part in parts or [range(len(mine))]:
            packed = pack(own.prompts, own.completions, np.array(part, dtype=np.int64))
            what = heard(subject, own, packed, its, options)
            total = total + _share(subject, rows, own, packed, what, counted, made)
    _require_gradient(total)
    total.backward()
    made.loss = float(total.detach())
    made.gradients = {name: _by_row(leaf, name, rows) for name, leaf in leaves.items()}
    return made


def _share(
    subject: LossSubject,
    rows: Generated,
    read: TrainRows,
    packed: Packed,
    what: NowByTerm,
    weights: Weights,
    made: UpdateNumbers,
) -> Tensor:
    share = torch.zeros(())
    for term in subject.loss.terms:
        found = term_of(subject, term, rows, read, packed, what)
        scope = term.function.scope
        number = reduce_term(found, scope, term.label, what.now, weights, packed.rows)
        share = share + value_at(term.weight, STEP) * number
        for name, (total, count) in found.metrics.items():
            before = made.metrics.get(name, (0.0, 0.0))
            made.metrics[name] = (before[0] + float(total), before[1] + float(count))
    return share


def _require_gradient(total: Tensor) -> None:
    if not total.requires_grad:
        raise Broken("shape", "the loss does not depend on what the model says: a constant")


def _places(rows: Generated) -> list[range]:
    """The flat tokens of each row."""
    ends = np.cumsum([0, *map(len, rows.masks)])
    return [range(a, b) for a, b in pairwise(ends)]


def _of(leaf: Tensor, name: str, mine: Sequence[int], rows: Generated) -> Tensor:
    """The part of a rank's rows."""
    if name == "scores":
        return leaf[torch.tensor(list(mine))]
    places = _places(rows)
    return leaf[torch.tensor([at for row in mine for at in places[row]], dtype=torch.int64)]


def _by_row(leaf: Tensor, name: str, rows: Generated) -> list[np.ndarray]:
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    found = gradient.detach().numpy()
    if name == "scores":
        return [found[row : row + 1] for row in range(len(rows))]
    return [found[places.start : places.stop] for places in _places(rows)]


def terms_alone(
    subject: LossSubject,
    rows: Generated,
    part: Sequence[int],
    *,
    leaves: Leaves | None = None,
    options: Options = PLAIN,
) -> list[Tensor]:
    """Each term's own numbers for these rows, packed together, unreduced."""
    read = step_rows_of(subject, rows)
    packed = pack(read.prompts, read.completions, np.array(part, dtype=np.int64))
    given = leaves_of(rows, double=options.double) if leaves is None else leaves
    what = heard(subject, read, packed, given, options)
    return [
        term_of(subject, term, rows, read, packed, what, double=options.double).loss
        for term in subject.loss.terms
    ]


def weighed(
    subject: LossSubject, rows: Generated, kept: Callable[[int], bool] = lambda row: True
) -> list[Tensor]:
    """For each term a weight of each of its numbers, all different; 0 where it does not count, or
    for rows that are not kept.
    """
    found = []
    group = np.unique(rows.position, return_inverse=True)[1]
    live = [bool(sum(mask)) and kept(row) for row, mask in enumerate(rows.masks)]
    for term in subject.loss.terms:
        scope = term.function.scope
        if scope == "token":
            own = [m * live[row] for row, mask in enumerate(rows.masks) for m in mask]
        elif scope == "sequence":
            own = list(map(float, live))
        else:
            own = [
                float(any(a for a, g in zip(live, group, strict=True) if g == at))
                for at in range(int(group[-1]) + 1)
            ]
        made = torch.tensor(own, dtype=torch.float64)
        found.append(made * (1.0 + torch.arange(len(own)) / 8.0) * value_at(term.weight, STEP))
    return found
