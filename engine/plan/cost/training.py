"""Seconds of passes over finished rows: log-probs, values, and training.

Owns: how many passes and updates there are. Does not own: seconds of one pass (model_passes.py),
generation (decode.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from engine.plan.cost.devices import Place
from engine.plan.cost.memory import gradient_bytes, optimizer_bytes
from engine.plan.cost.model_passes import Passes, Sizes, Time

_BACKWARD = 2.0
"""Forward passes that a backward one counts as: two products for each of the forward's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches:
    """Rows as they are fed. tokens: all together; keys: that they attend to; predicted: tokens that
    get logits; passes: micro-batches.
    """

    tokens: float
    keys: float
    predicted: float
    passes: int
    rows: int = 0


def packed(
    prompts: np.ndarray, answers: np.ndarray, *, budget: int, shared: int = 1, divisor: int = 1
) -> Microbatches:
    """Rows (int64 [rows]: tokens of each prompt and answer) in micro-batches of at most `budget`
    tokens, or of one larger row; as few as there can be, since no two rows above half of the budget
    are in one. shared: rows that share a prompt, which is fed once. divisor: ranks among which the
    rows are divided evenly; the result is one rank's.
    """
    tokens = float(prompts.sum()) / shared + float(answers.sum())
    lengths = prompts + answers
    keys = float((lengths.astype(np.float64) ** 2).sum() / 2.0)
    keys -= float((prompts.astype(np.float64) ** 2).sum() / 2.0) * (1 - 1 / shared)
    mine = tokens / divisor
    alone = answers if shared > 1 else lengths
    over = float(
        np.maximum(alone - budget, 0).sum()
    )  # a larger row is one micro-batch all the same
    filled = math.ceil((mine - over / divisor) / max(budget, 1))
    large = math.ceil(int((2 * alone > budget).sum()) / divisor)
    passes = max(1, filled, large)
    return Microbatches(
        tokens=mine,
        keys=keys / divisor,
        predicted=float(answers.sum()) / divisor,
        passes=min(passes, max(1, math.ceil(len(answers) / divisor))),
        rows=math.ceil(len(answers) / divisor),
    )


def forward(model: Sizes, where: Place, rows: Microbatches) -> Time:
    """Passes without gradient over one rank's rows."""
    whole = _each(Passes(model, where, "forward"), rows)
    return whole + _gathered(model, where, rows.passes, 1)


def train(
    model: Sizes,
    where: Place,
    rows: Microbatches,
    *,
    updates: int,
    epochs: int = 1,
    recomputed: bool = False,
) -> Time:
    """Passes with gradient over one rank's rows, in each epoch, and the updates of all epochs.
    recomputed: whether the backward pass makes the activations again, a forward pass more.
    """
    passes = Passes(model, where, "train", times=1.0 + _BACKWARD + recomputed)
    count = max(rows.passes, -(-updates // epochs))  # an update has a micro-batch at least
    rows = Microbatches(
        tokens=rows.tokens,
        keys=rows.keys,
        predicted=rows.predicted,
        passes=count,
        rows=rows.rows,
    )
    whole = _each(passes, rows) + _gathered(model, where, count, 2 + recomputed)
    return whole.times(epochs) + update(model, where).times(updates)


def update(model: Sizes, where: Place) -> Time:
    """Of the optimizer, which reads and writes all that it keeps, and the gradients' all-reduce
    among data ranks, 2 (d - 1) / d of their bytes (Rajbhandari et al., arXiv:1910.02054).
    """
    c = where.coefficients["train"]
    held = model.parameters // where.tensor
    state = optimizer_bytes(held, model.dtype) + gradient_bytes(held, model.dtype)
    touched = 2.0 * state + 2.0 * held * model.width
    if where.shard:
        touched /= where.data
    memory = touched / (where.device.memory_rate * c.reads)
    ranks = where.data * where.context
    link = hops = 0.0
    if ranks > 1:
        moved = 2.0 * (ranks - 1) / ranks * gradient_bytes(held, model.dtype)
        link, hops = moved / (where.between * c.link), 2.0 * math.log2(ranks) * c.hop
    return Time(seconds=memory + link + hops, memory=memory, link=link, latency=hops)


def _each(passes: Passes, rows: Microbatches) -> Time:
    """All passes, each with an equal part."""
    n = rows.passes
    one = passes.at(
        rows.tokens / n, rows.keys / n, predicted=rows.predicted / n, rows=rows.rows / n
    )
    return one.times(n)


def _gathered(model: Sizes, where: Place, passes: int, times: int) -> Time:
    """Of the gathering of sharded weights before each pass, which nothing overlaps here."""
    if not where.shard or where.data == 1:
        return Time()
    c = where.coefficients["train"]
    moved = (where.data - 1) / where.data * model.weight_bytes / where.tensor
    link = passes * times * moved / (where.between * c.link)
    hops = passes * times * model.shape.layers * c.hop
    return Time(seconds=link + hops, link=link, latency=hops)
