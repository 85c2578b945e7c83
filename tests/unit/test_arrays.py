"""Questions to arrays: the same answers as NumPy's own."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataflow.arrays import same_array, steps_between

NUMBERS = st.lists(st.integers(0, 2), max_size=4)
TYPES = st.sampled_from([np.int64, np.int32, np.float32])


@given(NUMBERS, NUMBERS, TYPES, TYPES)
def test_arrays_are_the_same_where_numpy_says_so(
    a: list[int], b: list[int], of_a: type, of_b: type
) -> None:
    one, other = np.array(a, dtype=of_a), np.array(b, dtype=of_b)
    assert same_array(one, other) == np.array_equal(one, other)
    assert same_array(one, one)


@given(NUMBERS)
def test_steps_are_those_of_diff(numbers: list[int]) -> None:
    array = np.array(numbers, dtype=np.int64)
    assert steps_between(array).tolist() == np.diff(array).tolist()
