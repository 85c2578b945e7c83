"""How well the weights of a generation's rows foretold the lengths of their answers.

Owns: recall of the longest, and the agreement of the two orders, over the prompts of a Step; what
beginning the heavy rows first was worth. Does not own: other metrics of rows (row_metrics.py), what
a weight changes (the coordinator).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

import numpy as np

from dataflow.arrays import steps_between
from dataflow.batch import Batch
from engine.protocol.reports import Report

TAIL = 0.2
"""The share of the prompts that counts as the longest."""


def weight_metrics(rows: Batch, slots: int = 0) -> Iterator[Report]:
    """`weight/recall`, `weight/tau` and `weight/gain` of rows with a weight and an answer; nothing
    of others, no recall and tau of one prompt alone and of prompts that are all alike, and no gain
    without slots. slots: of all replicas of the generation.
    """
    has_both = {"weight", "completion_mask"} <= set(rows.names)
    if not has_both or not len(rows):
        return
    weight, length = _mean_by_task(rows)
    count = float(len(weight))
    recall = find_recall(weight, length)
    if recall is not None:
        yield "weight/recall", recall, count
    tau = find_tau(weight, length)
    if tau is not None:
        yield "weight/tau", tau, count
    if slots:
        weights = rows.flat("weight").astype(np.float64)
        gain = find_gain(weights, rows.lengths("completion_mask"), slots)
        yield "weight/gain", gain, float(len(rows))


def _mean_by_task(rows: Batch) -> tuple[np.ndarray, np.ndarray]:
    """float64 [tasks]: the weight of each prompt, and the mean length of its answers."""
    # Prompts of one position, as those that another generation wrote, differ in their weights.
    weights = rows.flat("weight").astype(np.float64)
    order = np.lexsort((weights, rows.keys.position))
    position, weight = rows.keys.position[order], weights[order]
    is_other_weight = steps_between(weight) != 0
    is_other_position = steps_between(position) != 0
    later_starts = np.flatnonzero(is_other_weight | is_other_position) + 1
    starts = np.concatenate([[0], later_starts])
    ends = np.append(later_starts, len(order))
    lengths = rows.lengths("completion_mask")[order]
    totals = np.add.reduceat(lengths, starts)
    return weight[starts], totals / (ends - starts)


def find_recall(weight: np.ndarray, length: np.ndarray) -> float | None:
    """The share of the TAIL longest that are among as many heaviest; None of less than two rows, or
    if all lengths are equal. Where equal numbers straddle a bound: the mean over all choices.
    """
    if len(length) < 2 or not np.ptp(length):
        return None
    tail = max(1, round(TAIL * len(length)))
    in_heaviest = _share_in_tail(weight, tail)
    in_longest = _share_in_tail(length, tail)
    return float(in_heaviest @ in_longest / tail)


def _share_in_tail(numbers: np.ndarray, tail: int) -> np.ndarray:
    """float64 [rows]: how likely each is among the `tail` greatest, equal ones in any order."""
    place = len(numbers) - tail
    bound = np.partition(numbers, place)[place]
    is_above = numbers > bound
    is_at_bound = numbers == bound
    room = tail - np.count_nonzero(is_above)
    share = is_above.astype(np.float64)
    share[is_at_bound] = room / np.count_nonzero(is_at_bound)
    return share


def find_tau(weight: np.ndarray, length: np.ndarray) -> float | None:
    """Kendall's tau-b (Kendall 1945): pairs of one order less those of the other, over the root of
    the pairs that differ in each; None where all weights or all lengths are equal.
    """
    _, weight_rank = np.unique(weight, return_inverse=True)
    _, length_rank = np.unique(length, return_inverse=True)
    pairs = len(weight) * (len(weight) - 1) // 2
    equal_weight = _count_equal(weight_rank)
    equal_length = _count_equal(length_rank)
    both_rank = weight_rank * len(length) + length_rank
    equal_both = _count_equal(both_rank)
    if equal_weight == pairs or equal_length == pairs:
        return None
    # Among equal weights the shorter come first, so that these are no pair of another order.
    order = np.lexsort((length_rank, weight_rank))
    apart = _count_inversions(length_rank[order])
    either_equal = equal_weight + equal_length - equal_both
    alike = pairs - either_equal - apart
    scale = math.sqrt((pairs - equal_weight) * (pairs - equal_length))
    return (alike - apart) / scale


def find_gain(weight: np.ndarray, length: np.ndarray, slots: int) -> float:
    """Passes until the last of these rows has its last token where they begin in their order, over
    those where the heaviest begins first: 1 is no gain. Each begins in the slot that is free first,
    a pass gives each row in a slot one token, and all passes take as long.
    """
    if slots >= len(length):
        return 1.0
    heaviest_first = np.argsort(-weight, kind="stable")
    passes = _count_passes(length[heaviest_first], slots)
    return _count_passes(length, slots) / max(1, passes)


def _count_passes(lengths: np.ndarray, slots: int) -> int:
    """Passes until the last row has ended, each begun where a slot is free first."""
    ends = sorted(lengths[:slots].tolist())
    last = ends[-1]
    for length in lengths[slots:].tolist():
        end = ends[0] + length
        heapq.heapreplace(ends, end)
        last = max(last, end)
    return last


def _count_equal(numbers: np.ndarray) -> int:
    """How many pairs are equal."""
    counts = np.unique(numbers, return_counts=True)[1].astype(np.int64)
    return int((counts * (counts - 1) // 2).sum())


def _count_inversions(ranks: np.ndarray) -> int:
    """How many pairs have the greater rank first. Bit by bit from the highest: two ranks differ
    first in one of them, so among those equal above it, each 1 before a 0 is a pair.
    """
    inversions = 0
    for bit in range(int(ranks.max(initial=0)).bit_length()):
        order = np.argsort(ranks >> (bit + 1), kind="stable")
        ordered = ranks[order]
        above = ordered >> (bit + 1)
        is_one = (ordered >> bit) & 1
        ones_before = np.cumsum(is_one) - is_one
        first_of_block = np.searchsorted(above, above, side="left")
        ones_in_block = ones_before - ones_before[first_of_block]
        inversions += int(ones_in_block[is_one == 0].sum())
    return inversions
