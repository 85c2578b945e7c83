"""A block of one row is noted without arrays, and a cohort by one prompt that it waits for: both
come to what the general way comes to.
"""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Keys
from engine.coordinator.blocks import Blocks
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.prompts import FINISHED
from tests.kit.plans import planned_node, ref

PROMPTS, WIDTH = 3, 2
KEYS = st.tuples(st.integers(0, PROMPTS), st.integers(0, WIDTH), st.integers(0, 1))
"""Some of prompts that there are not, of samples that there are not, and of another attempt."""
ROWS = list(product(range(PROMPTS), range(WIDTH)))


def prompt_table(chunking: str) -> PromptTable:
    """prompts -> rollout x2 -> score"""
    nodes = (
        planned_node("prompts", relation="source", work="source"),
        planned_node("rollout", "prompts", relation="expand", rows=WIDTH),
        planned_node("score", "rollout", rows=WIDTH, inner=WIDTH, chunking=chunking),
    )
    table = PromptTable("prompts", nodes, ("score",), Blocks())
    table.admit(range(PROMPTS), [0] * PROMPTS, 0)
    table.add_rows("prompts", ref(range(PROMPTS), block=0))
    table.pump()
    return table


@given(st.lists(st.tuples(KEYS, st.integers(0, 5), st.booleans()), max_size=20))
def test_one_row_is_as_the_same_row_beside_one_that_nobody_wants(
    rows: list[tuple[tuple[int, int, int], int, bool]],
) -> None:
    alone, beside = prompt_table("ready"), prompt_table("ready")
    for number, ((position, sample, attempt), version, look) in enumerate(rows, 1):
        key = Keys.of([position], [sample], [attempt])
        both = Keys.concat([key, Keys.of([99])])
        alone.add_rows("rollout", ref(key, block=number, version=version))
        beside.add_rows("rollout", ref(both, block=number, version=version))
        if look:
            told = [[chunk.keys.rows() for chunk in each.pump()] for each in (alone, beside)]
            assert told[0] == told[1]
        assert alone.blocks.drain() == beside.blocks.drain()
    slots = alone.prompts.slots(1)
    ours, theirs = (each.rows("rollout", slots) for each in (alone, beside))
    assert ours.keys.rows() == theirs.keys.rows()
    assert ours.block.tolist() == theirs.block.tolist()
    assert ours.row.tolist() == theirs.row.tolist()
    assert alone.oldest(slots) == beside.oldest(slots)


@given(st.permutations(ROWS), st.lists(st.booleans(), min_size=6, max_size=6), st.data())
def test_a_cohort_begins_with_its_last_row_whatever_its_order(
    order: list[tuple[int, int]], looks: list[bool], data: st.DataObject
) -> None:
    """Also where prompts are given up, at any moment before that."""
    table = prompt_table("cohort")
    when = data.draw(st.dictionaries(st.integers(0, PROMPTS - 1), st.integers(0, 5), max_size=2))
    came = set()
    found: list[list[tuple[int, int]]] = []
    for at, row in enumerate(order):
        for prompt in [prompt for prompt, moment in when.items() if moment == at]:
            table.drop("rollout", prompt, 0)
        table.add_rows("rollout", ref(Keys.of(*zip(row, strict=True)), block=at + 1))
        came.add(row)
        chunks = table.pump() if looks[at] or row == order[-1] else []
        left = [row for row in ROWS if when.get(row[0], 6) > at]
        if not found and (looks[at] or row == order[-1]):
            assert bool(chunks) == came.issuperset(left)
        for chunk in chunks:
            assert [(p, s) for p, s, _ in chunk.keys.rows()] == left
            found.append(left)
    assert len(found) == 1


def test_a_cohort_waits_no_more_for_a_prompt_that_is_gone() -> None:
    table = prompt_table("cohort")
    for position, sample in ROWS[:-WIDTH]:
        table.add_rows("rollout", ref(Keys.of([position], [sample])))
        assert not table.pump()
    again = table.again(table.prompts.find(Keys.of([PROMPTS - 1])))
    assert again == [(PROMPTS - 1, 1)]
    table._readiness.changed_all()
    (chunk,) = table.pump()
    assert [(p, s) for p, s, _ in chunk.keys.rows()] == ROWS[:-WIDTH]
    assert table.prompts.count[FINISHED] == 0
