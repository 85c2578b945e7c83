"""Cuts of rows that are padded to one length."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from operators.kernels.torch.alike_lengths import cut_alike


def count_padded(lengths: np.ndarray, parts: list[tuple[int, int]]) -> int:
    """What the parts take together."""
    return sum((end - begin) * int(lengths[begin:end].max()) for begin, end in parts)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(0, 500))
def test_parts_hold_all_rows_in_order_and_no_cut_that_spares_enough_is_left_out(
    row_lengths: list[int], least: int
) -> None:
    lengths = np.array(row_lengths, np.int64)
    parts = cut_alike(lengths, least)
    edges = [0, *(end for _, end in parts)]
    assert parts == list(itertools.pairwise(edges))
    assert edges[-1] == len(lengths)
    whole = count_padded(lengths, [(0, len(lengths))])
    spared = whole - count_padded(lengths, parts)
    cuts = len(parts) - 1
    assert spared >= cuts * (least + 1)
    for begin, end in parts:
        for cut in range(begin + 1, end):
            halves = count_padded(lengths, [(begin, cut), (cut, end)])
            assert count_padded(lengths, [(begin, end)]) - halves <= least


def test_one_long_row_is_a_part_of_its_own() -> None:
    lengths = np.array([30, 31, 30, 500, 29, 31])
    assert cut_alike(lengths, 100) == [(0, 3), (3, 4), (4, 6)]


def test_rows_that_are_alike_stay_together() -> None:
    assert cut_alike(np.array([30, 31, 30, 29]), 10) == [(0, 4)]
    assert cut_alike(np.array([7]), 0) == [(0, 1)]
