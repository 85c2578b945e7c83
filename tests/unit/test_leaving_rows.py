"""When rows leave a decode loop, and what is said then of those that have not ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from dataflow.batch import Keys
from operators.kernels.leaving_rows import ChunkRows, LeavingRows
from tests.kit.rows import ragged

Left = tuple[ChunkRows, list[int]]


def make_chunk(counts: Sequence[int], first: int = 0) -> ChunkRows:
    """A chunk of prompts with so many rows each, numbered from `first` on."""
    rows = sum(counts)
    return ChunkRows(
        prompts=ragged([[1]] * len(counts)),
        counts=np.array(counts, np.int64),
        keys=Keys.of(range(first, first + rows)),
        numbers=np.arange(first, first + rows),
    )


def list_left(leaving: LeavingRows, ended: Sequence[Sequence[int]]) -> list[Left]:
    """What leaves as these rows end, together those of one step."""
    steps: Iterator[np.ndarray] = (np.array(numbers, np.int64) for numbers in ended)
    return [(chunk, rows.tolist()) for chunk, rows in leaving.gather(steps)]


@pytest.mark.parametrize("chunks", [1, 2])
def test_rows_with_the_tokens_of_a_part_leave_before_their_chunk_ends(chunks: int) -> None:
    """Whether it is alone in the loop or not; a prompt's rows together."""
    lengths = np.array([4, 5, 3, 9, 9, 9, 9, 9])
    leaving = LeavingRows(8, flows=False, tokens=10, lengths=lambda: lengths)
    chunk = make_chunk([2, 1, 1])
    leaving.add(chunk)
    for number in range(1, chunks):
        leaving.add(make_chunk([4], first=4 * number))
    assert list_left(leaving, [[0], [1]]) == []  # 9 tokens
    assert list_left(leaving, [[2]]) == [(chunk, [0, 1, 2])]
    assert list_left(leaving, [[3]]) == [(chunk, [3])]


def test_no_row_that_has_not_ended_is_shorter_than_is_said() -> None:
    lengths = np.array([4, 2, 7, 6])
    leaving = LeavingRows(4, flows=False, tokens=1, lengths=lambda: lengths)
    chunk = make_chunk([1, 1, 1, 1])
    leaving.add(chunk)
    assert list_left(leaving, [[1]]) == [(chunk, [1])]
    assert leaving.find_least_tokens(chunk) == 4
    assert list_left(leaving, [[0, 3]]) == [(chunk, [0, 3])]
    assert leaving.find_least_tokens(chunk) == 7
    assert list_left(leaving, [[2]]) == [(chunk, [2])]
    assert leaving.find_least_tokens(chunk) == 0


def test_a_large_chunk_leaves_by_quarters_of_the_slots_and_whole_prompts() -> None:
    leaving = LeavingRows(8, flows=False)
    chunk = make_chunk([2] * 6)
    leaving.add(chunk)
    assert list_left(leaving, [[0], [2], [4]]) == []
    assert list_left(leaving, [[1]]) == [(chunk, [0, 1])]
    assert list_left(leaving, [[3, 5, 6, 7]]) == [(chunk, [2, 3, 4, 5, 6, 7])]


def test_rows_of_two_chunks_leave_as_their_own() -> None:
    leaving = LeavingRows(16, flows=True)
    first, second = make_chunk([2, 2]), make_chunk([2], first=4)
    leaving.add(first)
    leaving.add(second)
    assert list_left(leaving, [[5], [1]]) == [(first, [1]), (second, [1])]
    assert list_left(leaving, [[4]]) == [(second, [0])]
    assert list_left(leaving, [[3], [0]]) == [(first, [0, 3])]
