"""Runs that distil a teacher's likeliest tokens: apart, resumed, on several ranks."""

from __future__ import annotations

from functools import partial

import pytest

from engine.api import resume
from tests.kit import algorithms, runs
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(240), pytest.mark.long]
distilled = partial(algorithms.small, "distill")


def test_apart_and_resumed_it_has_the_same_bits(tiny: TinyRuns) -> None:
    one = tiny.run(distilled, 4, name="one", checkpoint_every=2)
    apart = tiny.run(distilled, 2, name="apart", checkpoint_every=2, pin={"teacher": "other"})
    resume(apart.folder, steps=4)
    runs.require_same_numbers(apart, one)


@pytest.mark.parametrize("kind", ["ranks", "tensor"])
def test_two_ranks_distil_as_one_does(tiny: TinyRuns, kind: str) -> None:
    one = tiny.run(distilled, name="one")
    two = tiny.run(distilled, name="two", **{kind: {"train_policy": 2}})
    for name in ("loss/distillation_loss", "distill/student_mass", "optim/grad_norm"):
        assert runs.column(two, name) == pytest.approx(runs.column(one, name), rel=1e-4)
