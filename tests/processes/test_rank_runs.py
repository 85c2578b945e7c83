"""Whole runs whose train node has two ranks with parts of the weights: one rank's numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from engine.api import resume
from tests.kit.run_graphs import evaluated, small
from tests.kit.runs import require_alike, require_whole_models
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

TWO: dict[str, Any] = {"ranks": {"train_policy": 2}, "shard": True}


def test_split_weights_are_evaluated_saved_and_go_on_whole(tiny: TinyRuns) -> None:
    graph = partial(evaluated, keep_best=1)
    one = tiny.run(graph, 4, name="one", checkpoint_every=2)
    two = tiny.run(graph, 2, name="two", checkpoint_every=2, **TWO)
    assert any(two.best.values())
    require_whole_models(two, tiny.folder / "model")
    resume(two.folder, steps=4, ranks={}, shard=False)
    require_alike(two, one)


def test_split_weights_reach_a_reader_elsewhere_and_go_on_from_one_rank(tiny: TinyRuns) -> None:
    one = tiny.run(small, name="one")
    two = tiny.run(small, 1, name="two")
    resume(two.folder, steps=3, **TWO, pin={"rollout": "gen"})
    require_alike(two, one)
