"""Keys: how they are cut and expanded."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Keys


@given(
    counts=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=0, max_size=6),
)
def test_spans_cut_an_expansion_without_losing_or_repeating_a_row(
    counts: list[tuple[int, int]],
) -> None:
    """Those of a first part, and those of the rest, are together those of all."""
    n = 4
    keys = Keys.of(range(len(counts)), sample=[3] * len(counts))
    spans = np.array([sorted(pair) for pair in counts], np.int32).reshape(-1, 2)
    before = np.stack([np.zeros(len(counts), np.int32), spans[:, 0]], axis=1)
    behind = np.stack([spans[:, 1], np.full(len(counts), n, np.int32)], axis=1)
    parts = [keys.expand_spans(n, part).rows() for part in (before, spans, behind)]
    assert sorted(chain.from_iterable(parts)) == keys.expand(n).rows()
    assert keys.expand_spans(n, None).rows() == keys.expand(n).rows()
