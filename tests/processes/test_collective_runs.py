"""Whole runs with weights by collectives or IPC: the bits of the pull route, and a death."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from dataflow.set_expressions import edited
from tests.kit.processes import KillWorkers
from tests.kit.run_graphs import followed, small
from tests.kit.runs import column, require_each_row_once, require_same_numbers, require_same_runs
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(240), pytest.mark.long]
APART = {"rollout": "gen", "train_policy": "train"}
COLLECTIVE = "edge/collective/bytes"


@pytest.mark.repeats
@pytest.mark.parametrize(("make", "spread"), [
    (small, {"replicas": {"rollout": 2}}),
    (small, {"ranks": {"train_policy": 2}, "shard": True, "pin": {"rollout": "main,gen"}}),
    (followed, {"pin": {"train_policy": "train", "train_critic": "train", "past": "slow"}}),
], ids=["replicas", "a split writer, a reader beside its first rank", "followers"])  # fmt: skip
def test_the_bits_of_the_pull_route(tiny: TinyRuns, make: Any, spread: dict[str, Any]) -> None:
    pull = tiny.run(make, 4, name="pull", weights="pull", **spread)
    sent = tiny.run(make, 4, name="sent", weights="collective", **spread)
    require_same_runs(sent, pull)
    assert sum(column(sent, COLLECTIVE)) > 0
    assert not any(column(pull, COLLECTIVE))


def test_memory_that_both_map_has_the_bits_of_the_pull_route(tiny: TinyRuns) -> None:
    pull = tiny.run(small, 4, name="pull", weights="pull", pin=APART)
    mapped = tiny.run(small, 4, name="mapped", weights="ipc", pin=APART)
    require_same_runs(mapped, pull)
    assert sum(column(mapped, "edge/ipc/bytes")) > 0
    assert not any(column(pull, "edge/ipc/bytes"))
    assert sum(column(mapped, "weights/policy/offered_to_loaded")) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("turns", [(), (("gen", "train"),)], ids=["beside each other", "by turns"])
def test_two_workers_on_one_gpu_pass_weights_there(tiny: TinyRuns, turns: Any) -> None:
    """The probe of each version compares what both compute with it."""
    result = tiny.run(small, 4, pin=APART, turns=turns)
    assert sum(column(result, "edge/ipc/bytes")) > 0
    assert sum(column(result, "weights/policy/offered_to_loaded")) > 0


@pytest.mark.parametrize("route", ["collective", "ipc"])
def test_after_a_death_of_the_writer_all_meet_anew(tiny: TinyRuns, route: str) -> None:
    death = KillWorkers({3: "train"})
    stored = partial(tiny.run, small, 5, checkpoint_every=2)
    whole = stored(name="whole")
    again = stored(name="again", pin=APART, weights=route, on_step=[death])
    assert death.killed
    require_same_numbers(again, whole)


@pytest.mark.parametrize(
    ("on_update", "route"),
    [("drain", "collective"), ("interrupt", "collective"), ("interrupt", "ipc")],
)
def test_with_lag_a_generator_that_is_killed_goes_on(
    tiny: TinyRuns, on_update: str, route: str
) -> None:
    deaths = KillWorkers({2: "rollout", 4: "rollout"})
    graph = edited(small(tiny.folder, max_lag=1), [f"rollout.on_update={on_update}"])
    result = tiny.run(graph, 6, workers="auto", weights=route, on_step=[deaths])
    assert len(deaths.killed) == 2
    require_each_row_once(result, 24, 4)
    assert sum(column(result, f"edge/{route}/bytes")) > 0
    assert max(column(result, "policy/lag/max")) <= 1
