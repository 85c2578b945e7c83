"""The heap a node chooses exactly as the rule that asks every replica."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.coordinator.replica_choice import Idlest
from tests.kit.plans import planned_node
from tests.kit.turns import example_count

WORKERS = "abcdef"
SOME = st.lists(st.sampled_from(WORKERS), min_size=1, unique=True)
CHANGE = st.tuples(
    st.sampled_from(("rows", "able", "choose", "choose", "choose")),
    st.sampled_from(WORKERS),
    st.integers(0, 3),
)


@pytest.mark.long
@settings(max_examples=example_count(300))
@given(one=SOME, other=SOME, changes=st.lists(CHANGE, max_size=120))
def test_it_is_the_first_of_those_with_the_fewest_rows(
    one: list[str], other: list[str], changes: list[tuple[str, str, int]]
) -> None:
    """Two nodes share Workers, which get rows and lose them, leave and come back."""
    workers = {"one": tuple(one), "other": tuple(other)}
    rows = Counter()
    able = set(WORKERS)
    idlest = Idlest([planned_node(n, workers=w) for n, w in workers.items()], rows)
    for what, worker, number in changes:
        if what == "rows":
            rows[worker] = number
            idlest.touch(worker)
        elif what == "able":
            if number:
                able.add(worker)
                idlest.touch(worker)
            else:
                able.discard(worker)
        else:
            node = "one" if number % 2 else "other"
            there = [w for w in workers[node] if w in able]
            naive = min(there, key=rows.__getitem__) if there else None
            assert idlest.choose(node, able.__contains__) == naive
            if naive is not None and number > 1:
                rows[naive] += 1
                idlest.touch(naive)
