"""What weights of rows are worth where these are cut into chunks, or bound late."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.weights import CASES, TAIL, DrawnStep, draw_step, time_chunks, time_late
from engine.coordinator.units import cut_by_weight
from engine.plan.cost.dispatch_price import Deal, _cut
from engine.plan.passes import dispatch as dispatch_pass
from engine.plan.passes.dispatch import choose_dispatch
from tests.kit.turns import example_count
from tests.unit.test_dispatch import DealPrices, weighed_draft

pytestmark = pytest.mark.usefixtures("tiny")
STREAMRL = CASES[0]
"""1,024 prompts on 8 replicas (arXiv:2504.15930, section 5)."""


@pytest.fixture(scope="module")
def step() -> DrawnStep:
    return draw_step(STREAMRL, 0)


def test_a_tail_is_worth_it_with_more_chunks_than_its_share_and_with_good_weights_only(
    step: DrawnStep,
) -> None:
    whole = time_chunks(STREAMRL, step, 1.0)
    assert time_chunks(STREAMRL, step, 1.0, TAIL, 5) < 0.96 * whole
    assert time_chunks(STREAMRL, step, 1.0, TAIL) > whole, "by its share of the weight"
    assert time_chunks(STREAMRL, step, 0.8, TAIL, 5) > time_chunks(STREAMRL, step, 0.8)
    assert time_chunks(STREAMRL, step, 0.2, TAIL, 5) > 1.2 * time_chunks(STREAMRL, step, None)


def test_good_weights_make_late_rows_shorter_and_chance_does_not_make_them_longer() -> None:
    case = replace(CASES[2], prompts=512)
    steps = [draw_step(case, seed) for seed in range(3)]
    plain = sum(time_late(case, step, None) for step in steps)
    assert sum(time_late(case, step, 1.0) for step in steps) < 0.9 * plain
    assert sum(time_late(case, step, 0.2) for step in steps) < 1.02 * plain


def seconds_of(deal: Deal) -> float:
    """As of a tail that is worth it in two chunks."""
    if not deal.tail or not deal.is_weighed:
        return 10.0
    if deal.is_misled:
        return 13.0
    return {1: 9.0, 2: 7.0}.get(deal.apart, 11.0)


def test_a_tail_that_weights_by_chance_would_make_dear_is_only_had_by_asking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DealPrices, "seconds", lambda self, deal: seconds_of(deal))
    assert choose_dispatch(weighed_draft()).node("rollout").tail == 0
    asked = choose_dispatch(weighed_draft(tail={"rollout": 0.2}))
    assert (asked.node("rollout").tail, asked.node("rollout").tail_chunks) == (0.2, 2)
    assert any("the 20% of most weight apart, in 2 chunks" in note for note in asked.notes)


def test_few_of_many_numbers_of_chunks_are_tried() -> None:
    assert dispatch_pass._list_aparts(0.0, 8) == [0]
    assert dispatch_pass._list_aparts(0.2, 4) == [0, 1, 2, 3]
    numbers = dispatch_pass._list_aparts(0.2, 64)
    assert len(numbers) <= 9
    assert numbers[-1] == 63


@settings(max_examples=example_count(60), deadline=None)
@given(
    weights=st.lists(st.integers(1, 50), min_size=2, max_size=30),
    parts=st.integers(2, 6),
    tail=st.sampled_from([0.1, 0.3, 0.5]),
    apart=st.integers(0, 5),
)
def test_the_tail_has_as_many_chunks_as_it_is_told(
    weights: list[int], parts: int, tail: float, apart: int
) -> None:
    numbers = np.array(weights)
    chunks = cut_by_weight(numbers, np.arange(len(numbers)), parts, tail, apart)
    assert sorted(np.concatenate(chunks).tolist()) == list(range(len(numbers)))
    heavy = set(np.argsort(-numbers, kind="stable")[: int(np.ceil(tail * len(numbers)))].tolist())
    of_heavy = [set(chunk.tolist()) for chunk in chunks if heavy & set(chunk.tolist())]
    assert set().union(*of_heavy) == heavy, "no light row is with them"
    assert len(of_heavy) <= min(apart or parts, parts - 1)
    priced = _cut(numbers, parts, Deal(tail=tail, apart=apart))
    assert len(set(priced[list(heavy)].tolist())) == len(of_heavy)
