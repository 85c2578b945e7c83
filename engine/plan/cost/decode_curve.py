"""How one replica's rows are decoded, as a curve: live rows and cached tokens between quantiles.

Owns: the curve, which no device changes, and the table that keeps it. Does not own: how it is
worked out without a limit of the cache (slot_moments.py), the schedule that it sums up
(decode_slots.py, decode.py), seconds of a pass (model_passes.py).

A curve has some dozens of parts however many rows there are, so that its seconds on another device,
or with other tensor ranks, take microseconds. Within a part all means are exact; what differs from
the schedule is that the mean pass stands for all of a part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from engine.plan.cost.decode import (
    DecodeBatch,
    PassList,
    divide_prefill,
    list_passes,
    require_room,
)
from engine.plan.cost.devices import Place
from engine.plan.cost.distribution import LengthDistribution
from engine.plan.cost.model_passes import Passes, PassParts, Sizes, Time
from engine.plan.cost.slot_moments import SlotMoments

_MOST_ROWS = 4096
"""Rows that a curve is worked out for; of more, each stands for several."""
_MOST_ROWS_IN_ROOM = 512
"""The same where the cache is full at times, which takes longer to work out."""
_FEWEST_SLOTS = 16
"""Slots of rows that stand for several, at least."""
_FEWEST_IN_ROOM = 4
"""Longest rows that their cache holds, at least."""
_PARTS = 48
"""Parts of a curve, at even quantiles of the rows' ends."""
_TAIL = 16
"""Ends of the last rows, which are further apart: each ends a part."""
_PREFILLS = 8
"""Kinds of prefills after the first."""
_ROOM_STEP = 1.03
"""Caches of nearly equal sizes have one curve."""
_UNDIVIDED = 1 << 62
"""A budget that divides no prefill."""
_KEPT = 4096
"""Curves that are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class RowDistributions:
    """How long the rows of a generation are. It is equal to itself alone: keep it, and curves are
    found again.
    """

    prompts: LengthDistribution
    answers: LengthDistribution


def unite_distributions(rows: RowDistributions) -> RowDistributions:
    """Find the one of all distributions with these lengths, so that nodes and plans with rows alike
    have one curve.
    """
    return _kept_distributions(rows.prompts.lengths.tobytes(), rows.answers.lengths.tobytes())


@lru_cache(maxsize=_KEPT)
def _kept_distributions(prompts: bytes, answers: bytes) -> RowDistributions:
    lengths = (np.frombuffer(each, np.int64) for each in (prompts, answers))
    return RowDistributions(*map(LengthDistribution, lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """How many rows one replica decodes, and how, as DecodeBatch has it. samples: rows that have
    one prompt; shared: those of them that it decodes, which share its cache. among: replicas that
    have as many; this one has the longest row of all.
    """

    rows: int
    samples: int = 1
    shared: int = 1
    among: int = 1
    slots: int = 256
    room: int = 0
    budget: int = 16384
    copied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeCurve:
    """The passes of a batch, in a few parts; the first part of `prefill` fills the slots."""

    prefill: PassParts
    decode: PassParts
    busiest: float
    """Most tokens cached at once."""


def time_curve(model: Sizes, where: Place, curve: DecodeCurve) -> Time:
    """Time a curve on a place."""
    time = Passes(model, where, "decode").total(curve.decode)
    return time + Passes(model, where, "prefill").total(curve.prefill)


def decode_curve(lengths: RowDistributions, rows: DecodeRows) -> DecodeCurve:
    """Find the curve of so many rows of these lengths, kept from an earlier call or worked out.
    Raises PlanError for a row that the cache cannot hold.
    """
    if not rows.room:
        return _kept_curve(lengths, rows)
    without_limit = _kept_curve(lengths, replace(rows, room=0))
    # A token of each row's next pass has to find room, too.
    if without_limit.busiest + rows.slots <= rows.room:
        return without_limit
    return _kept_curve(lengths, replace(rows, room=_round_room(lengths, rows.room)))


def _round_room(lengths: RowDistributions, room: int) -> int:
    """The nearest size of a cache that has a curve; the very size where that does not hold the
    longest row, or if this does not.
    """
    step = round(math.log(room) / math.log(_ROOM_STEP))
    rounded_room = int(_ROOM_STEP**step)
    longest = lengths.prompts.longest + lengths.answers.longest
    return rounded_room if min(rounded_room, room) >= longest else room


@lru_cache(maxsize=_KEPT)
def _kept_curve(lengths: RowDistributions, rows: DecodeRows) -> DecodeCurve:
    factor = _rows_of_one(lengths, rows)
    scaled_rows = _scale(rows, factor)
    if rows.room:
        # Of a prefill's budget the passes know nothing.
        passes = _kept_passes(lengths, replace(scaled_rows, budget=0))
        curve = _sum_up_passes(passes, rows.budget)
    else:
        moments = _kept_moments(lengths, rows.rows, rows.samples, rows.slots, rows.among)
        curve = _sum_up_moments(moments, scaled_rows)
    return _multiply(curve, factor, rows.budget)


@lru_cache(maxsize=_KEPT)
def _kept_passes(lengths: RowDistributions, rows: DecodeRows) -> PassList:
    batch = make_batch(lengths, rows)
    require_room(batch)
    return list_passes(replace(batch, budget=_UNDIVIDED))


@lru_cache(maxsize=_KEPT)
def _kept_moments(
    lengths: RowDistributions, row_count: int, samples: int, slots: int, among: int
) -> SlotMoments:
    rows = DecodeRows(rows=row_count, samples=samples, slots=slots, among=among)
    scaled_rows = _scale(rows, _rows_of_one(lengths, rows))
    batch = make_batch(lengths, scaled_rows)
    return SlotMoments(batch.prompts, batch.answers, batch.slots, _cut_at_ends)


def _scale(rows: DecodeRows, factor: int) -> DecodeRows:
    """Rows of which each stands for so many."""
    return replace(
        rows,
        rows=-(-rows.rows // factor),
        slots=max(1, round(rows.slots / factor)),
        room=rows.room // factor,
    )


def _rows_of_one(lengths: RowDistributions, rows: DecodeRows) -> int:
    """How many rows one stands for."""
    most_rows = _MOST_ROWS
    limits = [rows.slots // _FEWEST_SLOTS]
    if rows.room:
        most_rows = _MOST_ROWS_IN_ROOM
        longest = lengths.prompts.longest + lengths.answers.longest
        limits.append(rows.room // (_FEWEST_IN_ROOM * longest))
    return max(1, min(-(-rows.rows // most_rows), *limits))


def make_batch(lengths: RowDistributions, rows: DecodeRows) -> DecodeBatch:
    """Make rows that stand for those of a curve, in the order in which it has them."""
    if not rows.rows:
        none = np.zeros(0, np.int64)
        return DecodeBatch(prompts=none, answers=none, slots=rows.slots)
    samples = max(1, min(rows.samples, rows.rows))
    prompt_count = -(-rows.rows // samples)
    prompts = np.repeat(lengths.prompts.spread(prompt_count), samples)[: rows.rows]
    answers = lengths.answers.spread(rows.rows)
    middle_of_last = 1.0 - 0.5 / (rows.rows * rows.among)
    answers[answers.argmax()] = lengths.answers.at(np.array(middle_of_last))
    return DecodeBatch(
        prompts=prompts,
        answers=answers,
        shared=rows.shared,
        slots=rows.slots,
        room=rows.room,
        budget=rows.budget,
        copied=rows.copied,
    )


def curve_of_batch(batch: DecodeBatch) -> DecodeCurve:
    """Work out the curve of these very rows. Raises PlanError for one that the cache cannot
    hold.
    """
    require_room(batch)
    moments = SlotMoments(batch.prompts, batch.answers, batch.slots, _cut_at_ends)
    # A token of each row's next pass has to find room, too.
    if batch.room and moments.most_cached(batch.shared) + batch.slots > batch.room:
        return _sum_up_passes(list_passes(replace(batch, budget=_UNDIVIDED)), batch.budget)
    return _sum_up_moments(moments, batch)


def _sum_up_moments(moments: SlotMoments, rows: DecodeBatch | DecodeRows) -> DecodeCurve:
    return DecodeCurve(
        prefill=_sum_up_prefills(*moments.list_prefills(rows.shared), rows.budget),
        decode=moments.sum_up(rows.shared, copied=rows.copied),
        busiest=moments.most_cached(rows.shared),
    )


def _cut_at_ends(sorted_ends: np.ndarray) -> np.ndarray:
    """float64: where a curve's parts end, in passes; first 0."""
    rows = len(sorted_ends)
    if not rows:
        return np.zeros(1)
    even = np.linspace(0, rows - 1, min(rows, _PARTS)).astype(np.int64)
    last = np.arange(max(0, rows - _TAIL), rows)
    ends = sorted_ends[np.concatenate([even, last])]
    return np.unique(np.concatenate([[0.0], ends]))


def _sum_up_prefills(fed: np.ndarray, keys: np.ndarray, budget: int) -> PassParts:
    """Sum up prefills, float64 [prefills]: the first as it is, the others in a few kinds, by what
    one pass is fed.
    """
    counts = np.maximum(1.0, np.ceil(np.floor(fed) / budget))
    tokens, pass_keys = fed / counts, keys / counts
    order = np.argsort(tokens[1:], kind="stable") + 1
    kinds = [np.arange(min(1, len(fed)))]
    kinds += np.array_split(order, _PREFILLS)
    groups = [kind for kind in kinds if len(kind)]
    columns = np.zeros((3, len(groups)))
    for place, group in enumerate(groups):
        count = counts[group]
        whole = count.sum()
        columns[:, place] = whole, count @ tokens[group] / whole, count @ pass_keys[group] / whole
    zeros = np.zeros(len(groups))
    return PassParts(
        count=columns[0],
        tokens=columns[1],
        keys=columns[2],
        cached=zeros,
        rows=zeros,
        predicted=False,
    )


def _sum_up_passes(listed: PassList, budget: int) -> DecodeCurve:
    """The curve of a batch whose cache is full at times: the schedule itself, in fewer parts.
    listed: with prefills of one pass each.
    """
    fed, decode = listed.prefill, listed.decode
    prefill = _sum_up_prefills(fed.tokens, fed.keys, budget)
    parts = len(decode.count)
    even = np.linspace(0, parts, min(parts, 2 * _PARTS), endpoint=False).astype(np.int64)
    last = np.arange(max(0, parts - _TAIL), parts)
    firsts = np.unique(np.concatenate([even, last]))
    count = np.add.reduceat(decode.count, firsts)
    columns: list[np.ndarray] = []
    for column in (decode.tokens, decode.keys, decode.cached, decode.rows):
        columns.append(np.add.reduceat(decode.count * column, firsts) / count)
    tokens, keys, cached, rows = columns
    sums = PassParts(count=count, tokens=tokens, keys=keys, cached=cached, rows=rows)
    return DecodeCurve(prefill=prefill, decode=sums, busiest=listed.busiest)


def _multiply(curve: DecodeCurve, factor: int, budget: int) -> DecodeCurve:
    """The curve of so many times as many rows, in as many more slots: passes have more rows; of
    prefills there are more, but the first is larger.
    """
    if factor == 1:
        return curve
    decode = replace(
        curve.decode,
        tokens=curve.decode.tokens * factor,
        keys=curve.decode.keys * factor,
        cached=curve.decode.cached * factor,
        rows=curve.decode.rows * factor,
    )
    prefill = curve.prefill
    count, tokens, keys = prefill.count * factor, prefill.tokens.copy(), prefill.keys.copy()
    if len(count):
        fed = count[0] * tokens[0]
        passes = divide_prefill(fed, budget)
        larger = count[0] / passes
        count[0], tokens[0], keys[0] = passes, tokens[0] * larger, keys[0] * larger
    prefill = replace(prefill, count=count, tokens=tokens, keys=keys)
    return DecodeCurve(prefill=prefill, decode=decode, busiest=curve.busiest * factor)
