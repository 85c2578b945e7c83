"""Whole runs whose train node has two ranks with a part of the weights each: the numbers of one
rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_graphs import evaluated, small
from transformers import AutoModelForCausalLM

from engine.api import resume, run
from engine.options import RunOptions

Options = Callable[..., RunOptions]

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

TWO: dict[str, Any] = {"ranks": {"train_policy": 2}, "shard": True}


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def alike(here: Path, there: Path) -> None:
    """What was trained and how well, Step by Step, but for the last digits."""
    ours, theirs = metrics(here), metrics(there)
    assert len(ours) == len(theirs)
    for one, two in zip(ours, theirs, strict=True):
        for name in (
            "reward/mean",
            "completion/tokens",
            "train/tokens",
            "optim/updates",
            "optim/grad_norm",
        ):
            assert two.get(name) == pytest.approx(one.get(name), rel=1e-4), name


def test_split_weights_are_evaluated_saved_and_go_on_whole(tiny: Path, options: Options) -> None:
    one = run(evaluated(tiny, keep_best=1), options(4, name="one", checkpoint_every=2))
    two = run(evaluated(tiny, keep_best=1), options(2, name="two", checkpoint_every=2, **TWO))
    kept = [path for paths in two.best.values() for path in paths]
    assert kept
    for path in (*kept, *two.trained.values()):
        found = AutoModelForCausalLM.from_pretrained(path).state_dict()
        assert {n: t.shape for n, t in found.items()} == {
            n: t.shape
            for n, t in AutoModelForCausalLM.from_pretrained(tiny / "model").state_dict().items()
        }
    resume(two.folder, steps=4, ranks={}, shard=False)
    alike(one.folder, two.folder)


def test_split_weights_reach_a_reader_elsewhere_and_go_on_from_one_rank(
    tiny: Path, options: Options
) -> None:
    apart = {"pin": {"rollout": "gen"}}
    one = run(small(tiny), options(3, name="one"))
    two = run(small(tiny), options(1, name="two"))
    resume(two.folder, steps=3, **TWO, **apart)
    alike(one.folder, two.folder)
