"""The decoding schedule: against one that goes pass by pass, and what holds for every batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dataflow.errors import PlanError
from engine.plan.cost.decode import DecodeBatch, cache_capacity, schedule_decode
from engine.plan.cost.devices import catalogue_place, device
from engine.plan.cost.distribution import lognormal
from engine.plan.cost.model_passes import Passes, Sizes
from engine.plan.cost.models import Shape
from tests.kit.turns import example_count

SHAPE = Shape(
    layers=28,
    hidden=3584,
    intermediate=18944,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocabulary=152064,
    context=32768,
    tied=False,
)
MODEL = Sizes(parameters=7_615_616_512, shape=SHAPE)
H100 = catalogue_place(device("H100"))

LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 120)), max_size=24)


def batch(
    lengths: list[tuple[int, int]], *, slots: int = 256, times: float = 0.0, shared: int = 1
) -> DecodeBatch:
    """Rows of these prompts and answers; times: a cache of so many of the longest rows, 0: of any
    size."""
    prompts, answers = np.array(lengths, dtype=np.int64).reshape(-1, 2).T
    room = int(times * (prompts + answers).max(initial=1))
    return DecodeBatch(prompts=prompts, answers=answers, slots=slots, room=room, shared=shared)


class PassByPass:
    """The same rules as the schedule's, one pass after another, with lists."""

    def __init__(self, rows: DecodeBatch) -> None:
        self.rows, count = rows, len(rows.answers)
        self.now, self.passes, self.sent_back = 0.0, 0, 0
        self.waiting, self.active, self.made = list(range(count)), [], [0] * count
        self.begins, self.ends = [-1.0] * count, [0.0] * count

    def run(self) -> PassByPass:
        decoding, prefill = Passes(MODEL, H100, "decode"), Passes(MODEL, H100, "prefill")
        while self.waiting or self.active:
            fed = keys = 0.0
            while self.waiting and self.fits(self.waiting[0]):
                row = self.waiting.pop(0)
                self.active.append(row)
                if self.begins[row] < 0:
                    self.begins[row] = self.now
                fed += self.held(row)
                prompt = int(self.rows.prompts[row])
                keys += (sum(range(prompt)) + prompt / 2.0) / self.rows.shared
                keys += sum(prompt + i + 0.5 for i in range(self.made[row]))
            if fed:
                self.now += prefill.at(fed, keys, predicted=0.0).seconds
            rows, cached = len(self.active), self.cached()
            if self.rows.room and rows > 1 and cached + rows > self.rows.room:
                self.waiting.insert(0, self.active.pop())
                self.sent_back += 1
                continue
            self.now += decoding.at(rows, cached + rows, cached=cached, rows=rows).seconds
            self.passes += 1
            for row in list(self.active):
                self.made[row] += 1
                if self.made[row] == self.rows.answers[row]:
                    self.active.remove(row)
                    self.ends[row] = self.now
        return self

    def fits(self, row: int) -> bool:
        """Whether there is a slot, and room for it and a token of each row's next pass."""
        wanted = self.cached() + self.held(row) + len(self.active) + 1
        tight = self.active and self.rows.room and wanted > self.rows.room
        return len(self.active) < self.rows.slots and not tight

    def held(self, row: int) -> float:
        return float(self.rows.prompts[row]) / self.rows.shared + self.made[row]

    def cached(self) -> float:
        return sum(self.held(row) for row in self.active)


@settings(max_examples=example_count(80))
@given(
    lengths=LENGTHS,
    slots=st.integers(1, 26),
    shared=st.sampled_from([1, 1, 4]),
    times=st.sampled_from([0.0, 1.0, 1.5, 4.0]),
)
@example(lengths=[], slots=1, shared=1, times=0.0)
def test_it_is_the_schedule_that_goes_pass_by_pass(
    lengths: list[tuple[int, int]], slots: int, shared: int, times: float
) -> None:
    rows = batch(lengths, slots=slots, shared=shared, times=times)
    decoded, one = schedule_decode(MODEL, H100, rows), PassByPass(rows).run()
    assert (decoded.passes, decoded.sent_back) == (one.passes, one.sent_back)
    np.testing.assert_allclose(decoded.begins, one.begins, rtol=1e-9)
    np.testing.assert_allclose(decoded.ends, one.ends, rtol=1e-9)


@settings(max_examples=example_count(80))
@given(
    lengths=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 4000)), max_size=40),
    slots=st.integers(1, 50),
    shared=st.sampled_from([1, 8]),
    times=st.sampled_from([0.0, 1.0, 3.0, 20.0]),
)
def test_every_row_begins_before_it_ends_within_slots_and_room(
    lengths: list[tuple[int, int]], slots: int, shared: int, times: float
) -> None:
    rows = batch(lengths, slots=slots, shared=shared, times=times)
    decoded = schedule_decode(MODEL, H100, rows)
    assert (decoded.begins >= 0).all()
    assert (decoded.begins < decoded.ends).all()
    assert decoded.passes * min(slots, max(len(lengths), 1)) >= rows.answers.sum()
    assert decoded.seconds == pytest.approx(decoded.time.seconds)
    assert not rows.room or decoded.busiest <= rows.room + 1e-6


@settings(max_examples=example_count(40))
@given(rows=st.integers(1, 200), prompt=st.integers(0, 500), answer=st.integers(1, 900))
def test_equal_rows_take_the_sum_of_their_passes(rows: int, prompt: int, answer: int) -> None:
    decoded = schedule_decode(MODEL, H100, batch([(prompt, answer)] * rows))
    decoding, prefill = Passes(MODEL, H100, "decode"), Passes(MODEL, H100, "prefill")
    middle = rows * (prompt + (answer - 1) / 2.0)
    closed = answer * decoding.at(rows, middle + rows, cached=middle, rows=rows).seconds
    fed = rows * prompt
    if fed:
        count = -(-fed // 16384)
        one = prefill.at(fed / count, fed * prompt / 2.0 / count, predicted=0.0)
        closed += count * one.seconds
    assert decoded.passes == answer
    assert decoded.seconds == pytest.approx(closed)
    assert decoded.busiest == rows * (prompt + answer)


def seconds(rows: DecodeBatch) -> float:
    return schedule_decode(MODEL, H100, rows).seconds


@settings(max_examples=example_count(60))
@given(lengths=LENGTHS, more=st.tuples(st.integers(0, 40), st.integers(1, 120)), at=st.integers(0))
def test_time_grows_with_rows_and_lengths(
    lengths: list[tuple[int, int]], more: tuple[int, int], at: int
) -> None:
    before = seconds(batch(lengths)) * (1 - 1e-9)
    assert seconds(batch([*lengths, more])) >= before
    if lengths:
        prompt, answer = lengths.pop(at % len(lengths))
        assert seconds(batch([*lengths, (prompt + more[0], answer + more[1])])) >= before


@settings(max_examples=example_count(60))
@given(lengths=LENGTHS, times=st.floats(1.0, 12.0))
@example(lengths=[(10, 100)] * 12, times=2.5)
def test_room_for_all_is_never_slower_than_a_tight_cache(
    lengths: list[tuple[int, int]], times: float
) -> None:
    rows, tight = batch(lengths), batch(lengths, times=times)
    wide = replace(rows, room=int((rows.prompts + rows.answers).sum()) + len(lengths) + 1)
    assert seconds(wide) <= seconds(tight) * (1 + 1e-9)
    assert seconds(wide) == seconds(rows)


def test_few_rows_are_bound_by_memory_and_many_by_compute() -> None:
    few, many = batch([(100, 1000)] * 8), batch([(10, 20)] * 4096, slots=4096)
    slow = schedule_decode(MODEL, H100, few)
    assert schedule_decode(MODEL, catalogue_place(device("H200")), few).seconds < slow.seconds
    assert slow.time.bound == "memory"
    assert schedule_decode(MODEL, H100, many).time.bound == "compute"


@pytest.mark.parametrize("shared", [1, 8])
def test_a_row_that_no_cache_holds_is_refused_before_it_starts(shared: int) -> None:
    rows = batch([(5, 5), (100, 50), (5, 5)], shared=shared, times=1.0)
    assert seconds(rows) > 0
    with pytest.raises(PlanError, match=r"longest row, 150 tokens.* cache of 149\. Fix: "):
        schedule_decode(MODEL, H100, replace(rows, room=149))


def test_a_tight_cache_of_many_rows_sends_back_and_ends() -> None:
    answers = lognormal(3000, 0.9, 20000).spread(1024)
    rows = DecodeBatch(prompts=np.full(1024, 500), answers=answers, room=100_000)
    decoded = schedule_decode(MODEL, H100, rows)
    assert decoded.sent_back > 1024
    assert decoded.busiest <= rows.room


@given(memory=st.integers(-(1 << 34), 1 << 36), tensor=st.sampled_from([1, 2, 4]))
def test_room_is_what_fits_and_never_the_word_for_no_limit(memory: int, tensor: int) -> None:
    tokens = cache_capacity(MODEL, catalogue_place(device("H100"), tensor=tensor), memory)
    fitting = memory * tensor // MODEL.cached_bytes
    assert tokens == max(1, fitting)


@settings(max_examples=example_count(30))
@given(LENGTHS, st.integers(1, 8))
def test_copied_prompts_are_fed_once_and_read_by_each_row(
    lengths: list[tuple[int, int]], shared: int
) -> None:
    once = batch(lengths, shared=shared)
    each = replace(once, copied=True)
    shared_reads, copied_reads = (schedule_decode(MODEL, H100, rows) for rows in (once, each))
    assert copied_reads.passes == shared_reads.passes
    assert copied_reads.time.compute == shared_reads.time.compute
    # A row of an answer of t tokens reads its prompt in t passes.
    passes = Passes(MODEL, H100, "decode")
    one_key = passes.at(1, 1, cached=1.0).memory - passes.at(1, 1).memory
    reads = sum(prompt * answer for prompt, answer in lengths) * (1.0 - 1.0 / shared)
    more = copied_reads.time.memory - shared_reads.time.memory
    assert more == pytest.approx(one_key * reads, rel=1e-6, abs=1e-12)
