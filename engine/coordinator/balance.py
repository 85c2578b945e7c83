"""Items of unequal weight in parts of nearly equal weight.

Owns: the split alone, deterministic and pure. Does not own: what an item is (ranks.py: a
prompt with all of its rows), nor what its weight stands for.

The largest differencing method of Karmarkar and Karp (1982) for any number of parts, and beside it
longest-processing-time (Graham 1969): neither is better for every input, so the better of both is
taken. Differencing holds an array of items x parts: above `MOST_DIFFERENCED` of these the other
decides alone. So the split depends on the weights and the number of parts, and on nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

MOST_DIFFERENCED = 1 << 20
"""Greatest product of items and parts for which differencing is tried: 8 MB, and 0.02 to 0.12 s."""

_Tree = int | tuple["_Tree", "_Tree", np.ndarray]
"""An index into the first partitions; or two merged ones, and the order of the merged parts."""


def split_evenly(
    weights: np.ndarray | Sequence[int], parts: int, *, equal_counts: bool = False
) -> np.ndarray:
    """int64 [items]: the part of each item, with the heaviest part as light as was found.

    weights: non-negative integers. equal_counts: no part has two items more than another. Raises
    ValueError for no part at all or a negative weight.
    """
    items = np.asarray(weights, dtype=np.int64)
    if parts < 1 or (items < 0).any():
        raise ValueError(
            f"expected at least one part and weights >= 0, found {parts} and {items.min(initial=0)}"
        )
    if parts == 1 or not len(items):
        return np.zeros(len(items), dtype=np.int64)
    greedy = split_longest_first(items, parts, equal_counts=equal_counts)
    if len(items) * parts > MOST_DIFFERENCED:
        return greedy
    order = np.argsort(-items, kind="stable")
    # The first of equal ones, so that the split depends on nothing else.
    splits = [_merge_parts(items, order, parts, equal_counts), greedy]
    return min(splits, key=lambda part: int(sum_by_part(items, part, parts).max()))


def split_by_load(weights: np.ndarray | Sequence[int], loads: Sequence[int]) -> np.ndarray:
    """int64 [items]: the part of each item, so that each part's weight is about in proportion to
    its load.

    loads: of each part, from 0; one without has no item. By one rule, as `split_longest_first`: the
    heaviest item left goes where the part with it is least for its load, of equal ones to the first
    (longest processing time on machines of unlike speed; Gonzalez, Ibarra and Sahni 1977). Raises
    ValueError for negative weights, and without a load above 0.
    """
    weight_of = np.asarray(weights, dtype=np.int64)
    parts = [index for index, load in enumerate(loads) if load > 0]
    if not parts or min(loads) < 0 or (weight_of < 0).any():
        raise ValueError(
            f"expected loads from 0, one above it, and weights >= 0, found loads {tuple(loads)} and"
            f" {weight_of.min(initial=0)}"
        )
    part = np.zeros(len(weight_of), dtype=np.int64)
    sums = dict.fromkeys(parts, 0)
    for item in np.argsort(-weight_of, kind="stable").tolist():
        weight = int(weight_of[item])
        # As a fraction, so that equal ones are equal on every machine.
        index = min(parts, key=lambda each: Fraction(sums[each] + weight, loads[each]))
        part[item] = index
        sums[index] += weight
    return part


def sum_by_part(weights: np.ndarray, part: np.ndarray, parts: int) -> np.ndarray:
    """int64 [parts]: the weight of each part."""
    sums = np.zeros(parts, dtype=np.int64)
    np.add.at(sums, part, weights)
    return sums


def split_longest_first(items: np.ndarray, parts: int, *, equal_counts: bool = False) -> np.ndarray:
    """As `split_evenly`, by one rule: the heaviest item left goes to the lightest part (for equal
    counts, to one of those with the fewest items).
    """
    part = np.zeros(len(items), dtype=np.int64)
    heap = [(0, 0, index) for index in range(parts)]
    for item in np.argsort(-items, kind="stable").tolist():
        count, weight, index = heap[0]
        part[item] = index
        heapq.heapreplace(heap, (count + equal_counts, weight + int(items[item]), index))
    return part


def _merge_parts(
    items: np.ndarray, order: np.ndarray, parts: int, equal_counts: bool
) -> np.ndarray:
    """Merge the two partitions whose parts differ most, heaviest part with lightest, until one is
    left. The first partitions hold one item each; for equal counts, one in each part.
    """
    width = parts if equal_counts else 1
    first = [order[at : at + width] for at in range(0, len(order), width)]
    sums = np.zeros((len(first), parts), dtype=np.int64)
    for number, some in enumerate(first):
        # Ascending, as every partition stands: its heaviest item is its last part.
        sums[number, parts - len(some) :] = items[some][::-1]
    heap: list[tuple[int, int, np.ndarray, _Tree]] = [
        (_minus_spread(part_sums), number, part_sums, number)
        for number, part_sums in enumerate(sums)
    ]
    heapq.heapify(heap)
    number = len(heap)  # of equal spreads, the older partition comes first
    while len(heap) > 1:
        _, _, one, left = heapq.heappop(heap)
        _, _, other, right = heap[0]
        merged = one + other[::-1]
        stand = merged.argsort(kind="stable")
        merged = merged[stand]
        tree = (left, right, stand)
        heapq.heapreplace(heap, (_minus_spread(merged), number, merged, tree))
        number += 1
    return _resolve_parts(heap[0][3], first, len(items), parts)


def _minus_spread(sums: np.ndarray) -> int:
    """The lightest part less the heaviest, of ascending sums: of a heap of these, the partition
    whose parts differ most comes first.
    """
    return int(sums[0] - sums[-1])


def _resolve_parts(tree: _Tree, first: list[np.ndarray], items: int, parts: int) -> np.ndarray:
    """Where each item ended up: follow the merges back from the last one."""
    part = np.zeros(items, dtype=np.int64)
    unresolved: list[tuple[_Tree, np.ndarray]] = [(tree, np.arange(parts))]
    while unresolved:
        node, place = unresolved.pop()
        if isinstance(node, int):
            part[first[node]] = place[parts - len(first[node]) :][::-1]
            continue
        left, right, stand = node
        before = np.empty(parts, dtype=np.int64)
        before[stand] = place  # of the merged part that stood there, before they were sorted
        unresolved += [(left, before), (right, before[::-1])]
    return part
