"""Whole runs with context ranks: the numbers of one rank, parts of a Step, deaths, resumes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dataflow.graph import Graph
from engine.api import Result, resume
from graphs.grpo import grpo
from tests.kit.processes import KillWorkers
from tests.kit.run_graphs import deadly, evaluated, followed, small, two_models, vowels, with_score
from tests.kit.runs import column, require_alike, require_alike_weights, require_whole_models
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

TWO: dict[str, Any] = {"context": {"train_policy": 2}}
GEN: dict[str, Any] = {"pin": {"rollout": "gen"}}
FOUR: dict[str, Any] = {"ranks": {"train_policy": 2}, "shard": True, **TWO}
"""Two shares of the rows; each of the four ranks has a part of the weights."""


def with_reference(folder: Path) -> Graph:
    """GRPO with a term for the distance from where it began."""
    base, data = str(folder / "model"), str(folder / "train.parquet")
    return grpo(base, data, vowels, n=4, batch=4, max_tokens=6, lr=1e-3, beta=0.1)


def test_two_context_ranks_train_as_one_does_and_each_row_is_fetched_once(tiny: TinyRuns) -> None:
    one = tiny.run(small, name="one", pin={"rollout": "gen", "train_policy": "train"})
    pin = {"rollout": "gen", "train_policy": "train,train-1"}
    two = tiny.run(small, name="two", pin=pin, **TWO)
    require_alike(two, one)
    assert sum(column(two, "edge/broadcast/bytes")) > 0
    assert sum(column(two, "edge/shm/bytes")) == sum(column(one, "edge/shm/bytes"))
    require_alike_weights(two, one)


def test_split_ranks_of_rows_and_tokens_go_on_with_one_and_back(tiny: TinyRuns) -> None:
    graph = partial(evaluated, keep_best=1)
    one = tiny.run(graph, 4, name="one", checkpoint_every=2)
    four = tiny.run(graph, 2, name="four", checkpoint_every=2, **FOUR, **GEN)
    require_whole_models(four, tiny.folder / "model")
    resume(four.folder, steps=3, ranks={}, context={}, shard=False)
    resume(four.folder, steps=4, **FOUR)
    require_alike(four, one)


def test_ranks_of_tokens_and_matrices_train_parts_while_rows_are_generated(
    tiny: TinyRuns,
) -> None:
    how: dict[str, Any] = {"stream": "ordered", "part_tokens": 60, **GEN}
    one = tiny.run(small, name="one", **how)
    two = tiny.run(small, name="two", **how, **TWO)
    four = tiny.run(small, name="four", **how, **TWO, tensor={"train_policy": 2})
    for parts in (two, four):
        require_alike(parts, one)
        nodes = json.loads((parts.folder / "plan.json").read_text())["nodes"]
        assert [node["name"] for node in nodes if node["in_parts"] and node["work"] == "train"]


def test_policy_and_critic_of_context_ranks_train_as_one_rank_does(tiny: TinyRuns) -> None:
    both = {"context": {"train_policy": 2, "train_critic": 2}}
    one = tiny.run(followed, 4, name="one")
    two = tiny.run(followed, 4, name="two", weights="collective", **both, **GEN)
    require_alike(two, one)


@pytest.mark.parametrize("worker", ["main", "main-1"])
def test_after_the_death_of_a_context_rank_all_go_back_and_the_numbers_are_the_same(
    tiny: TinyRuns, worker: str
) -> None:
    death = KillWorkers({3: worker})
    whole = tiny.run(small, 5, name="whole")
    again = tiny.run(small, 5, name="again", checkpoint_every=2, **TWO, **GEN, on_step=[death])
    assert death.killed
    require_alike(again, whole)


def test_a_context_rank_that_dies_in_a_step_is_not_what_the_other_failed_with(
    tiny: TinyRuns, tmp_path: Path
) -> None:
    def dying(name: str, **how: Any) -> Result:
        marked = partial(deadly, marker=str(tmp_path / name))
        return tiny.run(with_score(tiny.folder, None, marked), 4, name=name, **how)

    whole, again = dying("whole"), dying("again", checkpoint_every=2, **TWO)
    assert (tmp_path / "again").exists()
    require_alike(again, whole)


def test_a_reference_of_context_ranks_gives_the_numbers_of_one_also_after_a_death(
    tiny: TinyRuns,
) -> None:
    how: dict[str, Any] = {"context": {"reference": 2}, "pin": {"reference": "r0,r1"}}
    death = KillWorkers({2: "r1"})
    one = tiny.run(with_reference, 4, name="one", pin={"reference": "r0"})
    two = tiny.run(with_reference, 4, name="two", **how, on_step=[death])
    assert death.killed
    require_alike(two, one)
    require_alike_weights(two, one)


def test_values_are_read_in_the_shares_that_train_their_critic(tiny: TinyRuns) -> None:
    one = tiny.run(two_models, name="one", checkpoint_every=2)
    ranks = "t0,t1,t2,t3"
    pins = {"train_policy": ranks, "train_critic": ranks, "values": ranks, "reference": "t2,t3"}
    context = dict.fromkeys(pins, 2)
    four = tiny.run(two_models, name="four", checkpoint_every=2, pin=pins, context=context)
    require_alike(four, one)
