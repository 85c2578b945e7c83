"""A loss's numbers on generated rows: its terms, their reduction and its gradient.

Owns: feeding a loss what a train kernel would, with the generated numbers in the place of a
model's, by the kernel's own packing and reduction. Does not own: which rows (generate.py), what is
compared (losses.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
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
_VOCABULARY = 10
"""Tokens that the model knows: generated ids are below 10."""
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


def make_leaves(rows: Generated, *, double: bool = False) -> dict[str, Tensor]:
    """Make tensors of the model's numbers, flat, each with gradient."""
    dtype = torch.float64 if double else torch.float32
    leaves: dict[str, Tensor] = {}
    for name, column in rows.ports[MODEL].items():
        values = column.values
        if column.by_token:
            values = list(chain.from_iterable(values))
        assert column.declared is not None
        width = getattr(column.declared.type, "list_size", None)
        shape = (len(values),) if width is None else (len(values), width)
        leaves[name] = torch.tensor(values, dtype=dtype).reshape(shape).requires_grad_()
    return leaves


def read_train_rows(subject: LossSubject, rows: Generated) -> TrainRows:
    """Read the rows as a train kernel does; ports that are absent are left out."""
    batch = rows.make_batch("rows")
    if MASS in rows.absent:
        batch = batch.select(name for name in batch.names if name != MASS)
    inputs: dict[str, Batch] = {"rows": batch}
    for port in subject.inputs:
        if port.name not in rows.absent:
            inputs[port.name] = rows.make_batch(port.name)
    assignment = Assignment(sequence=STEP, step=STEP, keys=rows.keys, inputs=inputs)
    return step_rows(assignment, subject.loss, "contract")


def count_update_weights(subject: LossSubject, rows: TrainRows) -> Weights:
    """Count the denominators of an update of all rows: each token, or each row, counts as much."""
    aggregate = "token_mean" if "token" in subject.scopes else "sequence_mean"
    all_rows = np.arange(len(rows.keys))
    return count_weights(rows.trained, rows.groups, all_rows, aggregate=aggregate)


def make_now(
    subject: LossSubject, rows: TrainRows, packed: Packed, leaves: Leaves, options: Options
) -> NowByTerm:
    """Make what the loss's terms see of some rows."""
    now = now_of(rows, packed, STEP, CPU)
    now.vocabulary = _VOCABULARY
    if options.labels is not None:
        row_group = torch.tensor(options.labels)[now.row_group]
        now = replace(now, row_group=row_group, group=row_group[now.row])
    packed_tokens = torch.from_numpy(packed.tokens)
    packed_rows = torch.from_numpy(packed.rows)
    numbers: dict[str, Tensor] = {}
    for name, leaf in leaves.items():
        numbers[name] = leaf[packed_rows if name == "scores" else packed_tokens]
    model_numbers = ModelNumbers(
        tokens=numbers["values" if subject.scalar else "logprobs"],
        scores=numbers.get("scores"),
        entropy=numbers.get("entropy"),
        at_ids=numbers.get("at_ids"),
    )
    ids = ids_of(rows, subject.loss, packed, CPU)
    completed = complete_now(now, model_numbers, ids, scalar=subject.scalar)
    if options.raw:
        return _with_raw_tokens(completed, model_numbers, subject)
    return completed


def _with_raw_tokens(
    completed: NowByTerm, model_numbers: ModelNumbers, subject: LossSubject
) -> NowByTerm:
    if subject.scalar:
        now = replace(completed.now, values=model_numbers.tokens)
    else:
        now = replace(completed.now, logprobs=model_numbers.tokens)
    return replace(completed, now=now)


def compute_term(
    subject: LossSubject,
    term: LossTerm,
    rows: Generated,
    train_rows: TrainRows,
    packed: Packed,
    now_by_term: NowByTerm,
    *,
    double: bool = False,
) -> Terms:
    """Compute what one term's function returns. Raises Broken if it breaks the declaration."""
    now = now_by_term.of(term)
    tensors: dict[str, Any] = dict(tensors_of(train_rows, term, packed, now))
    if double:
        now = _to_double(now)
        tensors = {name: _columns_to_double(columns) for name, columns in tensors.items()}
    params = _term_params(term, rows)
    try:
        terms = call_loss(term.function.fn, now, tensors, params)
    except LossFault as fault:
        if isinstance(fault.__cause__, Exception):
            refuse_case(fault.__cause__)
        problem = str(fault).partition("\n")[0]
        raise Broken("shape", problem.partition(" Fix:")[0].rstrip(".")) from fault.__cause__
    _require_fit(term, terms, now)
    return terms


def _term_params(term: LossTerm, rows: Generated) -> dict[str, Any]:
    """The parameters of a term at this Step; those that were drawn come before its own."""
    params: dict[str, Any] = {}
    for name, setting in term.params:
        if isinstance(setting, Schedule):
            params[name] = setting.at(STEP)
        else:
            params[name] = setting
    prefix = f"{term.label}."
    for label, setting in rows.params.items():
        if label.startswith(prefix):
            params[label.removeprefix(prefix)] = setting
    return params


def _require_fit(term: LossTerm, terms: Terms, now: Now) -> None:
    scope = term.function.scope
    counts = {"token": len(now.mask), "sequence": now.rows, "group": now.groups}
    count = counts[scope]
    shape = list(terms.loss.shape)
    if shape != [count]:
        problem = f"Terms.loss is {shape} for {count} {scope}s, whose shape is [{count}]"
        raise Broken("shape", problem)


def _to_double(now: Now) -> Now:
    wide = copy.copy(now)
    for name in _NUMBERS:
        numbers = getattr(now, name)
        if isinstance(numbers, Tensor):
            setattr(wide, name, numbers.double())
    return wide


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


def _columns_to_double(tensors: Any) -> Any:
    columns: dict[str, Tensor] = {}
    for name, column in tensors.columns.items():
        columns[name] = column.double() if column.is_floating_point() else column
    return type(tensors)(columns)


def compute_update(
    subject: LossSubject,
    rows: Generated,
    parts: Sequence[Sequence[int]] | None = None,
    *,
    ranks: Sequence[Sequence[int]] | None = None,
    options: Options = PLAIN,
) -> UpdateNumbers:
    """Compute one update, in these micro-batches, or on these ranks, each with one."""
    train_rows = read_train_rows(subject, rows)
    leaves = make_leaves(rows)
    weights = count_update_weights(subject, train_rows)
    update = UpdateNumbers(loss=0.0)
    total: Any = torch.zeros(())
    for rank in ranks or [range(len(rows))]:
        rank_rows, rank_leaves, rank_weights = train_rows, leaves, weights
        if ranks is not None:
            rank_rows = read_train_rows(subject, rows.take(rank))
            rank_leaves = {n: _take_rows(leaf, n, rank, rows) for n, leaf in leaves.items()}
            rank_weights = weights.of(np.array(rank))
        for part in parts or [range(len(rank))]:
            packed = _pack_part(rank_rows, part)
            now_by_term = make_now(subject, rank_rows, packed, rank_leaves, options)
            total = total + _reduce_part(
                subject, rows, rank_rows, packed, now_by_term, rank_weights, update
            )
    _require_gradient(total)
    total.backward()
    update.loss = float(total.detach())
    for name, leaf in leaves.items():
        update.gradients[name] = _gradient_by_row(leaf, name, rows)
    return update


def _pack_part(train_rows: TrainRows, part: Sequence[int]) -> Packed:
    part_rows = np.array(part, dtype=np.int64)
    return pack(train_rows.prompts, train_rows.completions, part_rows)


def _reduce_part(
    subject: LossSubject,
    rows: Generated,
    train_rows: TrainRows,
    packed: Packed,
    now_by_term: NowByTerm,
    weights: Weights,
    update: UpdateNumbers,
) -> Tensor:
    """Reduce all terms on a micro-batch to its share of the loss, and add its metrics to those of
    the update.
    """
    share = torch.zeros(())
    for term in subject.loss.terms:
        terms = compute_term(subject, term, rows, train_rows, packed, now_by_term)
        number = reduce_term(
            terms, term.function.scope, term.label, now_by_term.now, weights, packed.rows
        )
        share = share + value_at(term.weight, STEP) * number
        for name, (metric_sum, metric_count) in terms.metrics.items():
            earlier_sum, earlier_count = update.metrics.get(name, (0.0, 0.0))
            update.metrics[name] = (
                earlier_sum + float(metric_sum),
                earlier_count + float(metric_count),
            )
    return share


def _require_gradient(total: Tensor) -> None:
    if not total.requires_grad:
        raise Broken("shape", "the loss does not depend on what the model says: a constant")


def _token_places(rows: Generated) -> list[range]:
    """The flat tokens of each row."""
    ends = np.cumsum([0, *map(len, rows.masks)])
    return [range(start, stop) for start, stop in pairwise(ends)]


def _take_rows(leaf: Tensor, name: str, rank: Sequence[int], rows: Generated) -> Tensor:
    """The part of a rank's rows."""
    if name == "scores":
        return leaf[torch.tensor(list(rank))]
    token_places = _token_places(rows)
    places = list(chain.from_iterable(token_places[row] for row in rank))
    return leaf[torch.tensor(places, dtype=torch.int64)]


def _gradient_by_row(leaf: Tensor, name: str, rows: Generated) -> list[np.ndarray]:
    gradient = leaf.grad
    if gradient is None:
        gradient = torch.zeros_like(leaf)
    numbers = gradient.detach().numpy()
    if name == "scores":
        return [numbers[row : row + 1] for row in range(len(rows))]
    return [numbers[places.start : places.stop] for places in _token_places(rows)]


def compute_terms(
    subject: LossSubject,
    rows: Generated,
    part: Sequence[int],
    *,
    leaves: Leaves | None = None,
    options: Options = PLAIN,
) -> list[Tensor]:
    """Compute each term's own numbers for these rows, packed together, unreduced."""
    train_rows = read_train_rows(subject, rows)
    packed = _pack_part(train_rows, part)
    if leaves is None:
        leaves = make_leaves(rows, double=options.double)
    now_by_term = make_now(subject, train_rows, packed, leaves, options)
    losses: list[Tensor] = []
    for term in subject.loss.terms:
        terms = compute_term(
            subject, term, rows, train_rows, packed, now_by_term, double=options.double
        )
        losses.append(terms.loss)
    return losses


def make_weights(
    subject: LossSubject, rows: Generated, is_counted: Callable[[int], bool] = lambda row: True
) -> list[Tensor]:
    """Make for each term a weight of each of its numbers, all different; 0 where it does not count,
    or for rows that are not counted.
    """
    weights: list[Tensor] = []
    live_rows: list[bool] = []
    for row, mask in enumerate(rows.masks):
        live_rows.append(bool(sum(mask)) and is_counted(row))
    for term in subject.loss.terms:
        counts = torch.tensor(_list_counts(rows, live_rows, term.function.scope)).double()
        # In eighths, exact: all different, so that no two numbers can take each other's place.
        distinct = 1.0 + torch.arange(len(counts)) / 8.0
        weights.append(counts * distinct * value_at(term.weight, STEP))
    return weights


def _list_counts(rows: Generated, live_rows: Sequence[bool], scope: str) -> list[float]:
    """1 for each token, row or group that counts, else 0."""
    if scope == "token":
        counts: list[float] = []
        for mask, is_live in zip(rows.masks, live_rows, strict=True):
            counts += [float(bit * is_live) for bit in mask]
        return counts
    if scope == "sequence":
        return list(map(float, live_rows))
    live_by_position = dict.fromkeys(sorted(rows.position), 0.0)
    for position, is_live in zip(rows.position, live_rows, strict=True):
        if is_live:
            live_by_position[position] = 1.0
    return list(live_by_position.values())
