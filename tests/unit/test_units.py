"""Units: spans of a prompt's samples, and how they are cut into chunks by weight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Keys
from dataflow.kernel import Layout
from engine.coordinator.blocks import Blocks
from engine.coordinator.chunk import NodeChunk
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.units import NodeUnits, cut_by_weight, whole_weights
from engine.plan.plan import PlannedNode
from tests.kit.plans import planned_input, planned_node, ref


def generation(samples: int, spread: int, **fields: object) -> PlannedNode:
    usual = {"work": "decode", "relation": "expand", "rows": samples}
    return planned_node("rollout", "prompts", layout=Layout(spread=spread), **usual | fields)


@pytest.mark.parametrize(("samples", "segments", "spread", "sizes"), [
    (8, 1, 1, [8]),
    (8, 1, 3, [2, 3, 3]),
    (2, 1, 4, [1, 1]),
    (3, 4, 2, [4, 8]),
], ids=str)  # fmt: skip
def test_spans_differ_by_one_whole_episode_at_most(
    samples: int, segments: int, spread: int, sizes: list[int]
) -> None:
    units = NodeUnits(generation(samples * segments, spread, segments=segments))
    assert units.sizes.tolist() == sizes
    assert np.bincount(units.of_rows).tolist() == sizes


def test_the_spans_of_each_input_row_are_units_of_its_own() -> None:
    units = NodeUnits(generation(8, 2, inner=2))
    assert units.of_rows.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_spans_with_another_between_them_are_two_rows() -> None:
    """As where others of a row were given before (a replica takes what waits)."""
    units = NodeUnits(generation(6, 3))
    first, spans = units.join(np.zeros(2, np.int64), np.array([0, 2]))
    assert first.tolist() == [0, 1]
    assert spans is not None
    assert spans.tolist() == [[0, 2], [4, 6]]


@given(
    samples=st.integers(1, 7),
    spread=st.integers(1, 4),
    parts=st.integers(1, 4),
    tail=st.sampled_from((0.0, 0.3)),
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=8),
)
def test_every_sample_is_in_one_chunk_and_a_row_once_in_each(
    samples: int, spread: int, parts: int, tail: float, tokens: list[int]
) -> None:
    units = NodeUnits(generation(samples, spread))
    at = np.repeat(np.arange(len(tokens)), units.per_row)
    numbers = np.tile(np.arange(units.per_row), len(tokens))
    weights = np.array(tokens)[at] * units.sizes_of(numbers)
    rows: list[tuple[int, int, int]] = []
    for mine in cut_by_weight(weights, at, parts, tail):
        first, spans = units.join(at[mine], numbers[mine])
        keys = Keys.of(at[mine][first].tolist())
        assert len(set(keys.rows())) == len(keys)
        rows += keys.expand_spans(samples, spans).rows()
    assert sorted(rows) == Keys.of(range(len(tokens))).expand(samples).rows()


def test_the_tail_has_parts_of_its_own_of_as_much_weight_as_the_others() -> None:
    weights = np.array([1, 1, 90, 1, 1, 1, 110, 1, 1, 1] * 2)
    parts = cut_by_weight(weights, np.arange(20), 4, 0.2)
    assert len(parts) == 4
    apart = [part for part in parts if weights[part].max() > 1]
    assert sorted(np.concatenate(apart).tolist()) == [2, 6, 12, 16]
    assert all(weights[part].min() > 1 for part in apart)
    assert len(apart) == 3, "of 4 by weight, but one is for the others"


def test_weights_of_any_unit_keep_their_order() -> None:
    assert whole_weights(np.array([-2.0, 0.0, 2.0])).tolist() == [0, 1 << 19, 1 << 20]
    assert whole_weights(np.zeros(2)).tolist() == [1, 1]


WEIGHTS = [3.0, 1.0, 9.0, 1.0]


def weighed_chunks(spread: int, chunks: int) -> list[NodeChunk]:
    """Four prompts with weights, and what is generated of them, four samples each."""
    prompts = planned_node("prompts", work="source", relation="source", weight="x")
    weight = planned_input("prompts", name="weight")
    node = generation(4, spread, chunks=chunks)
    node = planned_node(
        "rollout", "prompts", weight, work="decode", relation="expand", rows=4,
        layout=node.layout, chunks=chunks,
    )  # fmt: skip
    table = PromptTable("prompts", (prompts, node), ("rollout",), Blocks(weigh=True))
    table.admit(range(4), [0] * 4, 0)
    rows = ref(range(4))
    table.add_rows("prompts", type(rows)(
        worker="w", block=1, keys=rows.keys, lengths=rows.lengths, version=rows.version,
        weight=np.array(WEIGHTS, np.float32),
    ))  # fmt: skip
    return table.pump()


def test_heavy_rows_come_first_and_their_weights_go_with_them() -> None:
    one, other = weighed_chunks(spread=1, chunks=2)
    assert (one.keys.position.tolist(), other.keys.position.tolist()) == ([2], [0, 1, 3])
    assert one.weights is not None
    assert other.weights is not None
    assert (one.weights.tolist(), other.weights.tolist()) == ([9.0], [3.0, 1.0, 1.0])
    assert one.spans is other.spans is None


def test_a_heavy_prompt_is_spread_over_chunks() -> None:
    chunks = weighed_chunks(spread=4, chunks=2)
    assert [2 in chunk.keys.position for chunk in chunks] == [True, True]
    loads = []
    for chunk in chunks:
        assert chunk.spans is not None
        assert chunk.weights is not None
        loads.append(float((chunk.weights * np.diff(chunk.spans)[:, 0]).sum()))
    assert loads == [28.0, 28.0]


def test_rows_that_were_not_made_are_made_by_their_unit_alone() -> None:
    prompts = planned_node("prompts", work="source", relation="source")
    node = generation(4, 2)
    table = PromptTable("prompts", (prompts, node), ("rollout",), Blocks())
    table.admit(range(2), [0, 0], 0)
    table.add_rows("prompts", ref(range(2)))
    (chunk,) = table.pump()
    assert chunk.spans is None, "all of them"
    table.add_rows("rollout", ref(Keys.of([0, 0, 0, 1, 1], [0, 1, 3, 2, 3]), block=2))
    table.unissue(chunk)
    (again,) = table.pump()
    assert again.spans is not None
    assert again.keys.rows() == [(0, 0, 0), (1, 0, 0)]
    assert again.spans.tolist() == [[2, 4], [0, 2]]
    table.add_rows("rollout", ref(Keys.of([0, 1, 1], [2, 0, 1]), block=3))
    assert table.close_chunk(again) is None
