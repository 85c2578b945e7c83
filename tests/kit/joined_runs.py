"""Runs of a kernel in which chunks join: when, and which batch is of which chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dataflow.batch import Batch
from dataflow.kernel import Chunk
from tests.kit.generate_suite import tokens_of
from tests.kit.kernels import prompt_chunk

Tokens = dict[Any, Any]


def numbered_chunks(prompts: Sequence[Sequence[Any]]) -> list[Chunk]:
    """A chunk of each of these lists of prompts, at positions one behind the other."""
    chunks: list[Chunk] = []
    first = 0
    for number, texts in enumerate(prompts):
        positions = range(first, first + len(texts))
        chunks.append(replace(prompt_chunk(texts, positions), id=number))
        first += len(texts)
    return chunks


def run_alone(kernel: Any, chunk: Chunk) -> Batch:
    """All rows of a chunk by itself."""
    return Batch.concat(list(kernel.run(chunk))).sort()


def run_joined(
    kernel: Any,
    chunks: Sequence[Chunk],
    joins_now: Callable[[int], bool],
    hear: Callable[[Batch], None] = lambda batch: None,
) -> Batch:
    """All rows of these chunks. The first one is run; after the batch with a number for which
    joins_now is true, and after the last one, the next joins.
    """
    first, *waiting = chunks
    batches: list[Batch] = []
    for number, batch in enumerate(kernel.run(first)):
        batches.append(batch)
        hear(batch)
        is_last = not kernel._chunks
        if waiting and (is_last or joins_now(number)):
            kernel.join(waiting.pop(0))
    assert not waiting, "a chunk never joined"
    return Batch.concat(batches).sort()


def require_rows_alone(joined: Batch, kernel: Any, chunks: Sequence[Chunk]) -> None:
    """These rows are those of each chunk by itself."""
    expected: Tokens = {}
    for chunk in chunks:
        expected |= tokens_of(run_alone(kernel, chunk))
    assert tokens_of(joined) == expected


def owner_of(batch: Batch, chunks: Sequence[Chunk]) -> int | None:
    """The only chunk that has rows in a batch; None if there are none."""
    owners: set[int] = set()
    for chunk in chunks:
        if np.isin(batch.keys.position, chunk.keys.position).any():
            owners.add(chunk.id)
    assert len(owners) <= 1, "rows of several chunks in one batch"
    return owners.pop() if owners else None
