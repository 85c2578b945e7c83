"""The promises of every kernel of `generate` about spans, weights and chunks that join, as tests.

A module imports them all, and has the fixtures of generate_suite.py. `make` opens on 8 slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dataflow.batch import Batch
from dataflow.errors import KernelError
from dataflow.kernel import Chunk
from dataflow.kernel_abilities import Joinable
from tests.kit.generate_suite import (
    MIXED,
    PREFIXED,
    Make,
    generated,
    require_logprobs_by_version,
    tokens_of,
    weights_of,
)
from tests.kit.kernels import prompt_chunk

__all__: list[str] = []

WORDS = ["q", "Reverse this word: Q", "Reverse that", "hello you", "12", "Reverse this word: abc"]


def in_order(batch: Batch) -> Batch:
    """Rows by their keys."""
    return batch.take(np.lexsort((batch.keys.sample, batch.keys.position)))


def require_same_rows(one: Batch, other: Batch, tolerance: float) -> None:
    """The same rows, and log-probs that differ by rounding."""
    assert tokens_of(one) == tokens_of(other)
    one, other = in_order(one), in_order(other)
    for name in ("finish", "completion", "prompt_ids", "version"):
        assert one.array(name).equals(other.array(name)), name
    np.testing.assert_allclose(
        one.ragged("sampler_logprobs").values,
        other.ragged("sampler_logprobs").values,
        atol=tolerance,
    )


def run_joined(
    kernel: Any,
    first: Chunk,
    joins: Iterable[tuple[int, Chunk]],
    loads: Mapping[int, Sequence[Any]] | None = None,
) -> list[Batch]:
    """All batches of a run that is interrupted before each step. joins: after so many batches a
    chunk joins, or where fewer rows are left as the last of them leave. loads: weights likewise.
    """
    batches: list[Batch] = []
    waiting, rows_left = list(joins), len(first.keys) * kernel._n
    kernel.interrupt()
    for batch in kernel.run(first):
        batches.append(batch)
        rows_left -= len(batch)
        while waiting and (waiting[0][0] <= len(batches) or not rows_left):
            _, chunk = waiting.pop(0)
            kernel.join(chunk)
            rows_left += len(chunk.keys) * kernel._n
        if loads and len(batches) in loads:
            kernel.load(loads[len(batches)], len(batches))
        kernel.interrupt()
    kernel._was_interrupted()
    assert not waiting
    return batches


def chunks_of_words(count: int, seed: int, weighs: bool) -> list[Chunk]:
    """Chunks of some prompts, which share beginnings or do not."""
    draw, chunks = np.random.default_rng(seed), list[Chunk]()
    for number in range(count):
        words = draw.choice(WORDS, int(draw.integers(1, 5))).tolist()
        positions = [10 * number + place for place in range(len(words))]
        weights = draw.random(len(words)).astype(np.float32) if weighs else None
        chunks.append(replace(prompt_chunk(words, positions), weights=weights))
    return chunks


def test_the_rows_of_spans_are_those_of_the_whole(make: Make, tolerance: float) -> None:
    kernel, chunk = make(n=5, max_tokens=20), prompt_chunk(MIXED)
    whole = generated(kernel, MIXED)
    spans = np.array([[0, 5], [1, 3], [4, 5], [0, 1], [2, 5]], np.int32)
    first = list(kernel.run(replace(chunk, spans=spans)))
    assert Batch.concat(first).keys.rows() == chunk.keys.expand_spans(5, spans).rows()
    words = [MIXED[1], *MIXED[1:]]
    rest = np.array([[0, 1], [3, 5], [0, 4], [1, 5], [0, 2]], np.int32)
    second = list(kernel.run(replace(prompt_chunk(words, [1, 1, 2, 3, 4]), spans=rest)))
    rows = [row for batch in (*first, *second) for row in tokens_of(batch).items()]
    assert len(rows) == 25
    assert dict(rows) == tokens_of(whole)
    expected = in_order(whole)
    places = {key: place for place, key in enumerate(expected.keys.rows())}
    of_first = [places[key] for key in in_order(Batch.concat(first)).keys.rows()]
    require_same_rows(Batch.concat(first), expected.take(np.array(of_first)), tolerance)


def test_heavy_rows_enter_slots_first_and_are_the_same(make: Make, tolerance: float) -> None:
    prompts, how = MIXED * 6, {"max_tokens": 8, "max_lag": 1}
    plain = generated(make(**how), prompts)
    weights = np.arange(30, dtype=np.float32) % 10
    kernel = make(**how)
    batches = list(kernel.run(replace(prompt_chunk(prompts), weights=weights)))
    require_same_rows(Batch.concat(batches), plain, tolerance)
    in_turn = weights[np.concatenate([batch.keys.position for batch in batches])]
    assert in_turn[:8].min() >= 7, "8 slots: of the weights 9, 8 and 7 there are 9 rows"
    assert in_turn[-6:].max() <= 2


@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_k": 5}])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_joined_rows_are_those_that_they_are_alone(
    make: Make, tolerance: float, seed: int, how: dict[str, Any]
) -> None:
    kernel = make(n=3, max_tokens=15, max_lag=1, **how)
    chunks = chunks_of_words(5, seed, weighs=seed % 2 == 1)
    alone = [Batch.concat(list(kernel.run(chunk))) for chunk in chunks]
    steps = np.random.default_rng(100 + seed).integers(1, 60, 4)
    first, *others = chunks
    batches = run_joined(kernel, first, zip(np.sort(steps).tolist(), others, strict=True))
    for batch in batches:
        assert len(set((batch.keys.position // 10).tolist())) <= 1, "rows of one chunk"
    require_same_rows(Batch.concat(batches), Batch.concat(alone), tolerance)


def test_joined_rows_go_on_under_new_weights(
    make: Make, base: str, other: str, tolerance: float
) -> None:
    kernel = make(n=2, max_tokens=25, temperature=0.9, max_lag=1)
    first, *others = chunks_of_words(4, 7, weighs=True)
    loads = {9: weights_of(other), 10: weights_of(other)}
    batches = run_joined(kernel, first, zip([4, 8, 12], others, strict=True), loads)
    batch = Batch.concat(batches)
    assert {0, 10} <= set(batch.ragged("version").values.tolist())
    require_logprobs_by_version(batch, base, other, 0.9, tolerance)
    kernel.load(weights_of(base), 0)


def test_rows_leave_by_themselves_and_do_not_wait_for_their_chunk(make: Make) -> None:
    kernel = make(n=2, max_tokens=30, max_lag=1, stop=("a", "X", "7"))
    chunk = prompt_chunk(MIXED[:4])
    batches = list(kernel.run(chunk))
    assert len(batches) > 1
    assert sorted(Batch.concat(batches).keys.rows()) == chunk.keys.expand(2).rows()


def test_metrics_of_a_chunk_come_before_its_last_rows(make: Make) -> None:
    kernel = make(n=2, max_tokens=20, max_lag=1)
    first, second = prompt_chunk(MIXED[:2]), prompt_chunk(MIXED[:4], range(10, 14))
    third = prompt_chunk(MIXED[4:], [20])
    metrics, sizes = kernel._session.metrics, [4, 8, 2]
    lengths: dict[int, list[int]] = {0: [], 1: [], 2: []}
    joins = [second, third]
    for batch in kernel.run(first):
        if joins:
            kernel.join(joins.pop(0))
        for position, ids in zip(batch.keys.position, batch.ragged("completion_ids"), strict=True):
            lengths[int(position) // 10].append(len(ids))
        rows = [len(rows) for rows in lengths.values()]
        told = [count for _, count in metrics.get("generate/tokens", [])]
        whole = [size for count, size in zip(rows, sizes, strict=True) if count == size]
        assert sorted(told) == sorted(whole), "each size is another"
    assert len(set(sizes)) == len(set(rows)) == 3
    means = {len(rows): pytest.approx(np.mean(rows)) for rows in lengths.values()}
    assert {count: mean for mean, count in metrics["generate/tokens"]} == means
    written = sum(map(sum, lengths.values()))
    decoded = sum((1 - idle) * slots for idle, slots in metrics["generate/slot_idle"])
    assert decoded == pytest.approx(written - sum(sizes)), "the first tokens are the prefill's"


def test_a_joined_chunk_may_lose_its_prompts(make: Make) -> None:
    kernel = make(n=2, max_lag=1, max_prompt_tokens=13, overlong_prompt="drop")
    lost = prompt_chunk([MIXED[3]], [7])
    batches = run_joined(
        kernel, prompt_chunk(MIXED[:3]), [(1, lost), (2, prompt_chunk(["a"], [9]))]
    )
    assert set(Batch.concat(batches).keys.position.tolist()) == {0, 1, 2, 9}
    assert [key for key, _ in kernel._session.tombstones] == [(7, 0, 0)]


def test_a_run_without_an_end_keeps_no_more_than_is_in_it(make: Make) -> None:
    kernel = make(n=2, max_tokens=6, max_lag=1)
    joined = rows = 0
    for batch in kernel.run(prompt_chunk(MIXED)):
        rows += len(batch)
        under_way = 2 * (5 + 2 * joined) - rows
        if joined < 40 and under_way <= 10:
            joined += 1
            kernel.join(prompt_chunk(PREFIXED[:1] + MIXED[:1], [100 * joined, 100 * joined + 1]))
            loop, leaving = kernel._running.loop, kernel._running.leaving
            assert len(loop.written.length) <= 60
            assert leaving.chunks <= 12
    assert (joined, rows) == (40, 2 * (5 + 80))


def test_nothing_joins_where_nothing_runs(make: Make) -> None:
    kernel = make(max_lag=1)
    assert isinstance(kernel, Joinable)
    for _ in range(2):
        with pytest.raises(KernelError, match="chunk 0: expected a chunk that runs"):
            kernel.join(prompt_chunk(["a"]))
        generated(kernel, MIXED)


__all__ += [name for name in dir() if name.startswith("test_")]
