"""The curve of a decode: as long as the schedule that it stands for, whatever the lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.errors import PlanError
from engine.plan.cost.decode import DecodeBatch, schedule_decode
from engine.plan.cost.decode_curve import (
    DecodeRows,
    RowDistributions,
    curve_of_batch,
    decode_curve,
    make_batch,
    time_curve,
)
from engine.plan.cost.devices import catalogue_place, device
from engine.plan.cost.distribution import constant_length, lognormal
from tests.kit.turns import example_count
from tests.unit.test_cost_decode import MODEL

PLACES = [catalogue_place(device(name), tensor=2) for name in ("H100", "L40S")]


@settings(max_examples=example_count(60), deadline=None)
@given(
    rows=st.integers(64, 700),
    slots=st.sampled_from([8, 32, 64, 256, 1024]),
    sigma=st.floats(0.0, 1.5),
    samples=st.sampled_from([1, 4, 16]),
    room=st.sampled_from([0.0, 0.0, 2.0, 8.0, 40.0]),
    copied=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_takes_as_long_as_the_schedule(
    rows: int, slots: int, sigma: float, samples: int, room: float, copied: bool, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    answers = np.clip(draw.lognormal(6.0, sigma, rows), 1, 8000).astype(np.int64)
    prompts = np.repeat(draw.integers(1, 900, rows), samples)[:rows]
    batch = DecodeBatch(
        prompts=prompts,
        answers=answers,
        shared=samples,
        slots=slots,
        room=int(room * (prompts + answers).max()),
        copied=copied,
    )
    curve = curve_of_batch(batch)
    for place in PLACES:
        exact, priced = schedule_decode(MODEL, place, batch).time, time_curve(MODEL, place, curve)
        assert priced.seconds == pytest.approx(exact.seconds, rel=0.01)
        assert priced.memory == pytest.approx(exact.memory, rel=1e-6)
        assert priced.compute == pytest.approx(exact.compute, rel=1e-6)


@pytest.mark.parametrize(("slots", "room"), [(256, 0), (16, 0), (256, 600_000)])
def test_of_many_rows_each_stands_for_several(slots: int, room: int) -> None:
    lengths = RowDistributions(lognormal(300, 0.5, 1000), lognormal(400, 0.9, 8000))
    rows = DecodeRows(rows=9000, samples=8, shared=8, slots=slots, room=room)
    curve = decode_curve(lengths, rows)
    exact = schedule_decode(MODEL, PLACES[0], make_batch(lengths, rows))
    assert time_curve(MODEL, PLACES[0], curve).seconds == pytest.approx(exact.seconds, rel=0.03)


def test_caches_of_nearly_equal_sizes_have_one_curve_and_none_holds_too_long_a_row() -> None:
    lengths = RowDistributions(constant_length(100), lognormal(400, 0.9, 8000))
    rows = DecodeRows(rows=256, slots=64, room=39_400)
    near, far = (DecodeRows(rows=256, slots=64, room=room) for room in (39_500, 60_000))
    assert decode_curve(lengths, rows) is decode_curve(lengths, near)
    assert decode_curve(lengths, rows) is not decode_curve(lengths, far)
    equal = RowDistributions(constant_length(100), constant_length(900))
    decode_curve(equal, DecodeRows(rows=256, slots=64, room=1000))
    with pytest.raises(PlanError, match="expected room for the longest row"):
        decode_curve(equal, DecodeRows(rows=256, slots=64, room=999))


def test_no_rows_take_no_time() -> None:
    lengths = RowDistributions(constant_length(100), constant_length(10))
    curve = decode_curve(lengths, DecodeRows(rows=0))
    assert time_curve(MODEL, PLACES[0], curve).seconds == 0
