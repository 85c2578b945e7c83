"""The benchmark of who knows the longest answers: its task, and what it compares."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks import length_ranks, length_task


def test_an_answer_is_the_digits_after_each_pass_of_bubble_sort() -> None:
    assert list(length_task.list_passes("5291")) == ["2519", "2159", "1259"]
    assert list(length_task.list_passes("12")) == ["12"]


@pytest.mark.parametrize("digits", ["87654321", "12345678", "9", "3311"])
def test_every_habit_of_the_teacher_sorts_and_fits(digits: str) -> None:
    rng = random.Random(0)
    answers = [length_task.answer(digits, rng) for _ in range(40)]
    rewards = length_task.sorts_digits(completions=answers, prompts=[f"{digits}="] * 40)
    assert rewards == [1.0] * 40
    assert max(map(len, answers)) < length_task.LONGEST
    assert length_task.sorts_digits(completions=["21."], prompts=["21="]) == [0.0]


def test_prompts_of_the_ranker_are_others() -> None:
    unseen = frozenset(length_task.draw_prompts(64, seed=0))
    train = length_task.draw_prompts(256, seed=1, without=unseen)
    assert len(set(train)) == 256
    assert unseen.isdisjoint(train)


def test_who_knows_the_mean_knows_most_and_chance_nothing() -> None:
    draw = np.random.default_rng(0)
    mean = draw.uniform(5, 50, size=2 * length_ranks.BATCH)
    answers = length_ranks.EARLIER + length_ranks.STEP + length_ranks.KNOWN
    lengths = draw.poisson(mean[:, None], size=(len(mean), answers))
    numbers = length_ranks.compare_orders(lengths, scores=-mean)
    assert numbers["mean"][0] > 0.8
    assert numbers["statistics"][0] > 0.7
    assert numbers["ranker"] == (0.0, pytest.approx(-numbers["mean"][1], abs=0.1))
    assert numbers["chance"] == (pytest.approx(0.2, abs=0.01), 0.0)


def test_the_share_of_ranking_is_of_a_steps_seconds() -> None:
    row = {"time/step": 10.0, "time/rollout": 6.0, "time/rank": 0.5, "time/train_ranker": 0.5}
    warm_up = [row | {"time/rank": 1e9}] * length_ranks.WARM_UP
    untrained = row | {"time/step": 20.0}
    del untrained["time/train_ranker"]
    assert length_ranks.find_share([*warm_up, row, untrained]) == pytest.approx(1.5 / 30)
