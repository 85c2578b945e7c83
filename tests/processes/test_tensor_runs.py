"""Whole runs with tensor ranks: the numbers of one rank, rows fetched once, a death."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import KernelError
from engine.api import Result, resume
from tests.kit.processes import KillWorkers
from tests.kit.run_graphs import deadly, evaluated, followed, small, unlucky, with_score
from tests.kit.runs import column, require_alike, require_alike_weights, require_whole_models
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

TWO: dict[str, Any] = {"tensor": {"train_policy": 2}}
GEN: dict[str, Any] = {"pin": {"rollout": "gen"}}
FOUR: dict[str, Any] = {"ranks": {"train_policy": 2}, "shard": True, **TWO}
"""Two shares of the rows, and of each tensor rank's part of the weights."""


def test_two_tensor_ranks_train_as_one_does_and_each_row_is_fetched_once(tiny: TinyRuns) -> None:
    one = tiny.run(small, name="one", pin={"rollout": "gen", "train_policy": "train"})
    pin = {"rollout": "gen", "train_policy": "train,train-1"}
    two = tiny.run(small, name="two", pin=pin, **TWO)
    require_alike(two, one)
    assert sum(column(two, "edge/broadcast/bytes")) > 0
    assert sum(column(two, "edge/shm/bytes")) == sum(column(one, "edge/shm/bytes"))
    require_alike_weights(two, one)


def test_a_checkpoint_goes_on_with_other_ranks(tiny: TinyRuns) -> None:
    graph = partial(evaluated, keep_best=1)
    whole = tiny.run(graph, 4, name="whole", checkpoint_every=2)
    part = tiny.run(graph, 2, name="part", checkpoint_every=2, **TWO)
    require_whole_models(part, tiny.folder / "model")
    resume(part.folder, steps=3, tensor={})
    resume(part.folder, steps=4, **TWO)
    require_alike(part, whole)


def test_two_by_two_ranks_train_as_one_does(tiny: TinyRuns) -> None:
    one = tiny.run(small, name="one")
    four = tiny.run(small, name="four", ranks={"train_policy": 2}, **TWO, **GEN)
    require_alike(four, one)


def test_split_two_by_two_ranks_train_as_one_does_and_go_on_with_one_and_back(
    tiny: TinyRuns,
) -> None:
    graph = partial(evaluated, keep_best=1)
    one = tiny.run(graph, 4, name="one", checkpoint_every=2)
    four = tiny.run(graph, 2, name="four", checkpoint_every=2, **FOUR, **GEN)
    require_whole_models(four, tiny.folder / "model")
    resume(four.folder, steps=3, ranks={}, tensor={}, shard=False)
    resume(four.folder, steps=4, **FOUR)
    require_alike(four, one)


def test_split_two_by_two_ranks_train_parts_while_rows_are_generated(tiny: TinyRuns) -> None:
    one = tiny.run(small, name="one", stream="ordered", part_tokens=60, **GEN)
    four = tiny.run(small, name="four", stream="ordered", part_tokens=60, **FOUR, **GEN)
    require_alike(four, one)
    nodes = json.loads((four.folder / "plan.json").read_text())["nodes"]
    assert [node["name"] for node in nodes if node["in_parts"] and node["work"] == "train"]


def test_two_train_nodes_share_ranks_and_followers_get_whole_weights(tiny: TinyRuns) -> None:
    both = {"tensor": {"train_policy": 2, "train_critic": 2}}
    one = tiny.run(followed, 4, name="one")
    two = tiny.run(followed, 4, name="two", weights="collective", **both, **GEN)
    require_alike(two, one)
    assert sum(column(two, "edge/collective/bytes")) > 0


def test_after_the_death_of_a_rank_all_go_back_and_the_numbers_are_the_same(
    tiny: TinyRuns,
) -> None:
    """Of the first one, between two Steps; of the second: below."""
    death = KillWorkers({3: "main"})
    whole = tiny.run(small, 5, name="whole")
    again = tiny.run(small, 5, name="again", checkpoint_every=2, **TWO, **GEN, on_step=[death])
    assert death.killed
    require_alike(again, whole)


@pytest.mark.parametrize("spread", [TWO, {"ranks": {"train_policy": 2}}], ids=["tensor", "data"])
def test_what_one_rank_alone_fails_with_ends_the_run_at_once(
    tiny: TinyRuns, spread: dict[str, Any]
) -> None:
    """The other one waits in a collective meanwhile, whose time limit is half an hour."""
    with pytest.raises(KernelError, match="out of luck"):
        tiny.run(with_score(tiny.folder, None, unlucky), 4, **spread)


def test_a_rank_that_dies_in_a_step_is_not_what_the_other_failed_with(
    tiny: TinyRuns, tmp_path: Path
) -> None:
    def dying(name: str, **how: Any) -> Result:
        marked = partial(deadly, marker=str(tmp_path / name))
        return tiny.run(with_score(tiny.folder, None, marked), 4, name=name, **how)

    whole, again = dying("whole"), dying("again", checkpoint_every=2, **TWO)
    assert not (tmp_path / "whole").exists()
    assert (tmp_path / "again").exists()
    require_alike(again, whole)
