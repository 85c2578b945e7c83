"""Seconds of passes over finished rows: log-probs, values, and training.

Owns: how many passes and updates there are. Does not own: seconds of one pass (model_passes.py),
generation (decode.py), what passes take longer with split weights (sharding.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from engine.plan.cost.devices import Place
from engine.plan.cost.memory import gradient_bytes, optimizer_bytes
from engine.plan.cost.model_passes import Passes, Repeats, Sizes, Time
from engine.plan.cost.sharding import sharding_time

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


def pack_rows(
    prompts: np.ndarray, answers: np.ndarray, *, budget: int, shared: int = 1, divisor: int = 1
) -> Microbatches:
    """Pack rows (int64 [rows]: tokens of each prompt and answer) into micro-batches of at most
    `budget` tokens, or of one larger row; as few as there can be, since no two rows above half of
    the budget are in one. shared: rows that share a prompt, which is fed once. divisor: ranks among
    which the rows are divided evenly; the micro-batches are those of one rank.
    """
    tokens = float(prompts.sum()) / shared + float(answers.sum())
    lengths = prompts + answers
    keys = _attended_keys(lengths) - _attended_keys(prompts) * (1 - 1 / shared)
    rank_tokens = tokens / divisor
    rank_rows = math.ceil(len(answers) / divisor)
    unshared = answers if shared > 1 else lengths
    # A row above the budget is one micro-batch all the same: what it has too much fills no other.
    excess = float(np.maximum(unshared - budget, 0).sum())
    filled = math.ceil((rank_tokens - excess / divisor) / max(budget, 1))
    large_rows = int((2 * unshared > budget).sum())
    passes = max(1, filled, math.ceil(large_rows / divisor))
    return Microbatches(
        tokens=rank_tokens,
        keys=keys / divisor,
        predicted=float(answers.sum()) / divisor,
        passes=min(passes, max(1, rank_rows)),
        rows=rank_rows,
    )


def _attended_keys(lengths: np.ndarray) -> float:
    """Keys that the tokens of rows of these lengths attend to: half of each length squared."""
    return float((lengths.astype(np.float64) ** 2).sum() / 2.0)


def forward_time(model: Sizes, where: Place, rows: Microbatches, *, loads: int = 0) -> Time:
    """Time of passes without gradient over one rank's rows. loads: how often its weights come from
    the host, before the passes of a chunk.
    """
    passes = _passes_time(Passes(model, where, "forward"), rows)
    sharding = sharding_time(model, where, passes, rows.passes)
    return passes + sharding + _loading_time(model, where).times(loads)


def train_time(
    model: Sizes,
    where: Place,
    rows: Microbatches,
    *,
    updates: int,
    epochs: int = 1,
    recomputed: bool = False,
    offloaded: bool = False,
) -> Time:
    """Time of passes with gradient over one rank's rows, in each epoch, and of the updates of all
    epochs. recomputed: whether the backward pass makes the activations again, a forward pass more.
    offloaded: whether the optimizer's state waits on the host between updates.
    """
    repeats = _count_repeats(model, recomputed=recomputed)
    passes = Passes(model, where, "train", repeats)
    count = max(rows.passes, -(-updates // epochs))  # an update has a micro-batch at least
    computing = _passes_time(passes, replace(rows, passes=count))
    epoch = computing + sharding_time(model, where, computing, count, backward=repeats.base - 1.0)
    update = update_time(model, where)
    if offloaded:
        update += moving_time(model, where)
    return epoch.times(epochs) + update.times(updates)


def _count_repeats(model: Sizes, *, recomputed: bool) -> Repeats:
    """How often a forward pass's work is done with the backward pass behind it. That of a Model
    that trains a part goes through some of the layers: one product with a weight of the base gives
    the gradient of its inputs, another, of what is trained alone, that of the weight. The head's
    inputs have gradients, whatever is trained.
    """
    whole = _BACKWARD + recomputed
    trained = model.trained
    if trained is None:
        return Repeats(
            base=1.0 + whole, added=1.0, head=1.0 + whole, rest=1.0 + whole, exchanges=whole
        )
    share = model.passed_share
    return Repeats(
        base=1.0 + share * (1.0 + trained.own_share + recomputed),
        added=1.0 + whole,
        head=2.0,
        rest=1.0 + share * whole,
        exchanges=1.0 + share * (whole - 1.0),
    )


def update_time(model: Sizes, where: Place) -> Time:
    """Time of one update: the optimizer reads and writes all that it keeps, and ranks with
    whole weights all-reduce the gradients, 2 (d - 1) / d of their bytes (Rajbhandari et al.,
    arXiv:1910.02054).
    """
    reached = where.coefficients["train"]
    parameters = model.trained_parameters(where.tensor)
    gradients = gradient_bytes(parameters, model.dtype)
    state = optimizer_bytes(parameters, model.dtype) + gradients
    touched = 2.0 * state + 2.0 * parameters * model.width
    if where.shard:
        touched /= where.sharing
    memory = touched / (where.device.memory_rate * reached.reads)
    # What FSDP splits it sums within each backward pass (sharding.py).
    ranks = 1 if where.shard else where.sharing
    link = hops = 0.0
    if ranks > 1:
        moved = 2.0 * (ranks - 1) / ranks * gradients
        link = moved / (where.between * reached.link)
        hops = 2.0 * math.log2(ranks) * reached.hop
    return Time(seconds=memory + link + hops, memory=memory, link=link, latency=hops)


def moving_time(model: Sizes, where: Place) -> Time:
    """Time in which the optimizer's state comes to a GPU and goes back; nothing where the device is
    the host. Of the link's rate, as much is reached as of that between devices.
    """
    if not where.device.is_gpu:
        return Time()
    state = optimizer_bytes(model.trained_parameters(where.tensor), model.dtype)
    if where.shard:
        state /= where.sharing
    rate = where.device.host_link or where.device.link
    seconds = 2.0 * state / (rate * where.coefficients["train"].link)
    return Time(seconds=seconds, link=seconds)


def _loading_time(model: Sizes, where: Place) -> Time:
    """Time in which a rank's weights come to a GPU from the host; nothing where the device is the
    host. Nothing goes back, as no pass changes them.
    """
    if not where.device.is_gpu:
        return Time()
    weights = model.part_parameters(where.tensor) * model.width
    rate = where.device.host_link or where.device.link
    seconds = weights / (rate * where.coefficients["forward"].link)
    return Time(seconds=seconds, link=seconds)


def _passes_time(passes: Passes, rows: Microbatches) -> Time:
    """Time of all passes, each with an equal part of the rows."""
    count = rows.passes
    one_pass = passes.at(
        rows.tokens / count,
        rows.keys / count,
        predicted=rows.predicted / count,
        rows=rows.rows / count,
    )
    return one_pass.times(count)
