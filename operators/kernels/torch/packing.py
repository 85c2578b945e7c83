"""Packing: rows of tokens as one prefix tree, in micro-batches under a token budget.

Owns: which rows share a micro-batch, and the packed layout: every distinct token prefix is there
once, so a prompt is computed once for all its completions, and so is a beginning that several
prompts share. Does not own: attention over the layout (shared_attention.py), any tensor (this is
plain NumPy).

The rows' token sequences form a trie; its tokens in depth-first order are the layout. Where each
token's subtree ends says which tokens see which:

    j is visible to i    where    j <= i < end[j]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataflow.batch import Keys, Ragged
from dataflow.errors import DataError
from dataflow.memory_limits import MemoryNeed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """The tokens to feed to a model for some rows.

    ids, positions, end int64 [fed]: the tree in depth-first order; end[j] is one past the last
    descendant of token j. path int64 [rows, depth]: the fed tokens of each row, in order (beyond a
    row's own length: arbitrary). owner int64 [fed]: a row (index into path) whose path includes the
    token; positions is its depth. rows int64 [rows]: their indices in the batch. tokens int64
    [tokens]: the places of their completion tokens in the batch's flat token columns. row int64
    [tokens]: index into `rows`. source int64 [tokens]: the fed token that predicts each completion
    token. last int64 [rows]: the last fed token of each row.
    """

    ids: np.ndarray
    positions: np.ndarray
    end: np.ndarray
    path: np.ndarray
    owner: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    row: np.ndarray
    source: np.ndarray
    last: np.ndarray


def pack(prompts: Ragged, completions: Ragged, rows: np.ndarray, *, whole: bool = False) -> Packed:
    """Lay some rows out as a prefix tree.

    A row's fed tokens are its prompt and its completion without the last token, which predicts
    nothing; whole=True feeds that one, too. Raises DataError for a row with an empty prompt.
    """
    sizes, answers = prompts.lengths[rows], completions.lengths[rows]
    fed_answers = answers if whole else np.maximum(answers - 1, 0)
    fed = sizes + fed_answers
    if len(rows) and (sizes == 0).any():
        raise DataError(
            f"row {rows[np.argmax(sizes == 0)]}: expected a prompt of at least one token, found"
            " none"
        )
    matrix = _make_matrix(prompts, completions, rows, fed)
    ids, positions, end, path, owner = _make_tree(matrix, fed)
    tokens, row, within = _spans(completions.offsets[rows], answers)
    return Packed(
        ids=ids,
        positions=positions,
        end=end,
        path=path,
        owner=owner,
        rows=rows,
        tokens=tokens,
        row=row,
        source=path[row, sizes[row] - 1 + within] if len(row) else row,
        last=path[np.arange(len(rows)), fed - 1] if len(rows) else rows,
    )


def _spans(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The flat indices of some spans, the span of each index, and its place in that span."""
    span = np.repeat(np.arange(len(lengths)), lengths)
    span_starts = np.cumsum(lengths) - lengths
    within = np.arange(len(span)) - np.repeat(span_starts, lengths)
    return starts[span] + within, span, within


def _make_matrix(
    prompts: Ragged, completions: Ragged, rows: np.ndarray, fed: np.ndarray
) -> np.ndarray:
    """int32 [rows, longest]: each row's fed tokens plus 1, then zeros, which sort first."""
    longest = int(fed.max(initial=0))
    matrix = np.zeros((len(rows), longest), dtype=np.int32)
    sizes = prompts.lengths[rows]
    index, row, within = _spans(prompts.offsets[rows], sizes)
    matrix[row, within] = prompts.values[index] + 1
    index, row, within = _spans(completions.offsets[rows], fed - sizes)
    matrix[row, sizes[row] + within] = completions.values[index] + 1
    return matrix


def _make_tree(
    matrix: np.ndarray, fed: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Make ids, positions, end, path and owner of Packed from the rows' tokens (plus 1,
    zero-padded).
    """
    count, longest = matrix.shape
    if not matrix.size:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty, np.zeros((count, longest), dtype=np.int64), empty
    # In sorted order a row shares with all rows before it what it shares with the last of them.
    order = _sort_rows(matrix)
    ordered = matrix[order]
    common = _count_common(ordered)
    new = fed[order] - common
    start = np.cumsum(new) - new
    depth = np.arange(longest)
    is_fed = depth < fed[order][:, None]
    is_new = (depth >= common[:, None]) & is_fed
    # Packed places grow from row to row, so the running maximum fills in a row's shared places.
    root = start - common  # where a row's first token would be, were all of its tokens new
    new_places = np.where(is_new, root[:, None] + depth, -1)
    path = np.maximum.accumulate(new_places, axis=0)
    owner, positions = np.nonzero(is_new)
    ends = _find_ends(common, start, int(new.sum()), depth)
    end = ends[owner, positions]
    unsorted = np.empty_like(order)
    unsorted[order] = np.arange(count)
    ids = ordered[owner, positions].astype(np.int64) - 1
    return ids, positions, end, path[unsorted], order[owner]


def _sort_rows(matrix: np.ndarray) -> np.ndarray:
    """Find the order that sorts the rows as sequences; equal rows keep their order."""
    # Big-endian, so that bytes compare as the numbers do.
    words = np.ascontiguousarray(matrix, dtype=">u4").tobytes()
    width = matrix.shape[1] * 4
    keys = [words[i : i + width] for i in range(0, len(words), width)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return np.array(order, dtype=np.int64)


def _count_common(ordered: np.ndarray) -> np.ndarray:
    """int64 [rows]: how many tokens each row shares with the one before it."""
    differs = ordered[1:] != ordered[:-1]
    lengths = (ordered[1:] > 0).sum(axis=1)  # of rows that are equal to the one before
    shared = np.where(differs.any(axis=1), differs.argmax(axis=1), lengths)
    return np.concatenate([np.zeros(1, dtype=np.int64), shared])


def _find_ends(common: np.ndarray, start: np.ndarray, total: int, depth: np.ndarray) -> np.ndarray:
    """int64 [rows, depth]: where the subtree of a row's token at that depth ends."""
    # It ends where the first later row starts that does not share the token: a minimum from below.
    leaves = np.where(common[1:, None] <= depth, start[1:, None], total)
    later = np.full((len(common), len(depth)), total, dtype=np.int64)
    later[:-1] = np.minimum.accumulate(leaves[::-1], axis=0)[::-1]
    return later


def prompt_groups(position: np.ndarray, prompts: Ragged) -> np.ndarray:
    """Number each (position, prompt) in the order of first appearance: int64 [rows]."""
    numbers: dict[tuple[int, bytes], int] = {}
    keys = [(p, prompts[i].tobytes()) for i, p in enumerate(position.tolist())]
    by_row = [numbers.setdefault(key, len(numbers)) for key in keys]
    return np.array(by_row, dtype=np.int64)


def micro_batches(
    prompts: Ragged,
    completions: Ragged,
    rows: np.ndarray,
    groups: np.ndarray,
    *,
    tokens: int,
    atomic: bool,
) -> list[np.ndarray]:
    """Distribute rows over micro-batches of at most `tokens` fed tokens; rows stay in order inside.

    groups int64 [rows]: rows with the same number share a prompt. A group larger than the budget is
    split, unless atomic; a single row above it is a micro-batch of its own. First-fit decreasing,
    into the fitting one with the fewest units (AReaL, arXiv:2505.24298, algorithm 1).
    Deterministic.
    """
    answers = np.maximum(completions.lengths[rows] - 1, 0)
    shared = prompts.lengths[rows]
    units: list[np.ndarray] = []
    for group in _split_by_group(groups):
        units += _split_by_room(group, answers, shared, tokens, atomic)
    # A unit feeds its prompt once: sized by the longest, should one group have several.
    sizes = [int(shared[unit].max() + answers[unit].sum()) for unit in units]
    index_sets: list[np.ndarray] = []
    for unit_indices in first_fit_decreasing(sizes, tokens):
        members = np.concatenate([units[i] for i in unit_indices])
        index_sets.append(rows[np.sort(members)])
    return index_sets


def describe_need(
    doing: str,
    keys: Keys,
    prompts: Ragged,
    completions: Ragged,
    rows: np.ndarray,
    *,
    is_divisible: bool,
) -> MemoryNeed:
    """What a pass over these rows is, should memory run out in it. is_divisible: whether a smaller
    budget would cut it.
    """
    lengths = prompts.lengths[rows] + completions.lengths[rows]
    longest = int(np.argmax(lengths))
    return MemoryNeed(
        doing=f"{doing} of {len(rows)} rows",
        rows=len(rows),
        tokens=int(lengths.sum()),
        key=keys.take(rows[[longest]]).rows()[0],
        longest=int(lengths[longest]),
        is_divisible=is_divisible,
    )


def _split_by_group(groups: np.ndarray) -> list[np.ndarray]:
    """Find the indices of each group's rows, ascending."""
    if not len(groups):
        return []
    order = np.argsort(groups, kind="stable")
    cuts = np.flatnonzero(np.diff(groups[order])) + 1
    return np.split(order, cuts)


def _split_by_room(
    unit: np.ndarray, answers: np.ndarray, shared: np.ndarray, tokens: int, atomic: bool
) -> list[np.ndarray]:
    """Split the unit into parts that fit the budget, longest rows first, if it does not."""
    room = tokens - int(shared[unit].max())
    if atomic or answers[unit].sum() <= room:
        return [unit]
    by_length = unit[np.argsort(-answers[unit], kind="stable")]
    bins = first_fit_decreasing(answers[by_length].tolist(), room)
    return [by_length[np.array(indices)] for indices in bins]


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Put the indices of `sizes` into bins of at most `capacity`; a larger one gets a bin of its
    own.
    """
    bins: list[list[int]] = []
    filled: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        room = capacity - sizes[i]
        fits = [b for b in range(len(bins)) if filled[b] <= room]
        if not fits:
            bins.append([])
            filled.append(0)
            fits = [len(bins) - 1]
        emptiest = min(fits, key=lambda b: len(bins[b]))
        bins[emptiest].append(i)
        filled[emptiest] += sizes[i]
    return bins
