"""Runs of adapters on several processes, of which some die, join or leave: the numbers of one."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dataflow.program import Program
from dataflow.set_expressions import edited
from engine.api import rerun, resume, run
from tests.kit import algorithms, architectures, run_graphs, run_programs
from tests.kit.adapted_graphs import adapted
from tests.kit.processes import KillWorkers
from tests.kit.runs import (
    best_names,
    column,
    metrics,
    require_alike,
    require_each_row_once,
    require_same_numbers,
    require_same_runs,
    weights,
)
from tests.kit.scaled_runs import Scaler
from tests.kit.tiny_runs import TinyRuns

pytest.importorskip("peft")
pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
LONG = 300.0
"""Seconds after which waiting for a run counts as a hang."""
COUNTS = "/rollout"
"""The end of the metric that a run of fixed replicas lacks."""
ADAPTER_FILE = "adapter_model.safetensors"


def require_adapters_alone(result: Any) -> None:
    """What is on disk of the trained Models is their adapters."""
    names = {path.rpartition("/")[2] for path in weights(result)}
    assert names == {ADAPTER_FILE}


@pytest.mark.parametrize("route", ["pull", "collective"])
def test_deaths_of_writer_and_replica_change_no_number_and_no_best_version(
    tiny: TinyRuns, route: str
) -> None:
    make = adapted(run_graphs.evaluated, keep_best=1)
    chunks: dict[str, Any] = {"chunks": {"rollout": 2}}
    whole = tiny.run(make, 5, name="whole", **chunks)
    death = KillWorkers({2: "rollout-1", 3: "train_policy"})
    apart: dict[str, Any] = {"workers": "apart", "replicas": {"rollout": 2}, "weights": route}
    killed = tiny.run(
        make, 5, name="killed", checkpoint_every=2, on_step=[death], **apart, **chunks
    )
    assert len(death.killed) == 2
    require_same_numbers(killed, whole)
    assert best_names(killed) == best_names(whole)
    require_adapters_alone(killed)


def test_split_ranks_go_on_after_a_death_and_as_one(tiny: TinyRuns) -> None:
    make = adapted(run_graphs.evaluated, keep_best=1)
    two: dict[str, Any] = {"ranks": {"train_policy": 2}, "shard": True, "workers": "auto"}
    places = {"train_policy": "first,second", "rollout": "gen"}
    usual: dict[str, Any] = {"checkpoint_every": 1, "pin": places}
    split = tiny.run(make, 3, name="split", **two, **usual)
    death = KillWorkers({2: "second"})
    killed = tiny.run(make, 3, name="killed", on_step=[death], **two, **usual)
    assert len(death.killed) == 1
    require_same_numbers(killed, split)
    require_adapters_alone(killed)
    half = tiny.run(make, 1, name="half", **two)
    resume(half.folder, steps=3, ranks={}, shard=False)
    require_alike(half, tiny.run(make, 3, name="one"))


def test_with_a_lag_an_interrupted_generator_that_dies_goes_on(tiny: TinyRuns) -> None:
    death = KillWorkers({2: "rollout-0", 4: "rollout-1"})
    graph = edited(
        adapted(run_graphs.small, max_lag=1)(tiny.folder), ["rollout.on_update=interrupt"]
    )
    apart: dict[str, Any] = {"workers": "apart", "replicas": {"rollout": 2}}
    result = tiny.run(graph, 6, on_step=[death], checkpoint_every=2, **apart)
    assert len(death.killed) == 2
    require_each_row_once(result, 24, 4)
    assert max(column(result, "policy/lag/max")) <= 1
    norms = column(result, "adapter/norm")
    assert norms[-1] > norms[0] > 0.0


def test_replicas_that_join_have_the_adapter(tiny: TinyRuns) -> None:
    scaler = Scaler("rollout", [3, 1, 2])
    graph = adapted(run_graphs.small, batch=6)(tiny.folder)
    elastic = {"replicas": {"rollout": "1..3"}, "scaling": "fixed", "name": "elastic"}
    asked = tiny.options(5000, workers="auto", **elastic)
    handle = run(graph, asked, on_step=[scaler], wait=False)
    scaler.handle = handle
    result = handle.result(LONG)
    assert {1, 2, 3} == set(scaler.seen)
    fixed = tiny.run(graph, result.step, chunks={"rollout": 3}, name="fixed")
    require_same_numbers(result, fixed, but=COUNTS)


def test_followers_move_as_in_one_process_after_deaths_and_resumed(tiny: TinyRuns) -> None:
    """One moves half of the way in float32, one every third Step."""
    make = adapted(run_graphs.followed)
    whole = tiny.run(make, 6, name="whole")
    death = KillWorkers({2: "values", 4: "train_critic"})
    killed = tiny.run(make, 6, name="killed", checkpoint_every=1, workers="apart", on_step=[death])
    assert len(death.killed) == 2
    require_same_numbers(killed, whole)
    require_adapters_alone(killed)
    half = tiny.run(make, 3, name="half", workers="apart")
    require_same_numbers(resume(half.folder, steps=6), whole)


def test_a_later_phase_begins_with_the_adapter_and_a_copy_of_it(tiny: TinyRuns) -> None:
    """At its first Step policy and copy are one; after it they are not."""
    warm = adapted(run_programs.warm)(tiny.folder)
    reinforced = adapted(run_programs.reinforced)(tiny.folder)
    program = Program((warm, 2), (reinforced, 3))
    whole = tiny.run(program, None, name="whole")
    divergences = column(whole, "policy/kl_reference")[2:]
    assert divergences[0] == pytest.approx(0.0, abs=1e-6)
    assert divergences[-1] > 1e-5
    death = KillWorkers({2: "train_policy", 4: "train_policy"})
    apart: dict[str, Any] = {"workers": "apart", "checkpoint_every": 1}
    killed = tiny.run(program, None, name="killed", on_step=[death], **apart)
    assert len(death.killed) == 2
    require_same_numbers(killed, whole)
    require_adapters_alone(killed)


def test_an_ordered_step_in_parts_has_the_same_bits_after_deaths_and_resumed(
    tiny: TinyRuns,
) -> None:
    make = adapted(partial(algorithms.small, "grpo"), beta=0.05, max_tokens=24)
    streamed: dict[str, Any] = {
        "workers": "apart",
        "chunks": {"rollout": 2},
        "stream": "ordered",
        "part_tokens": 40,
    }
    one = tiny.run(make, 4, name="one", **streamed)
    death = KillWorkers({1: "rollout-1", 2: "reference"})
    two: dict[str, Any] = {"replicas": {"rollout": 2}}
    killed = tiny.run(make, 4, name="killed", on_step=[death], **two, **streamed)
    assert len(death.killed) == 2
    require_same_numbers(killed, one)
    half = tiny.run(make, 2, name="half", **streamed)
    require_same_numbers(resume(half.folder, steps=4), one)


def test_episodes_are_made_with_the_adapter(tiny: TinyRuns) -> None:
    make = adapted(partial(algorithms.small, "agent"))
    chunks: dict[str, Any] = {"chunks": {"episode": 2}}
    apart: dict[str, Any] = {"workers": "apart", "replicas": {"episode": 2}}
    whole = tiny.run(make, 4, name="whole", **chunks)
    death = KillWorkers({1: "episode-0", 2: "train_policy"})
    killed = tiny.run(
        make, 4, name="killed", checkpoint_every=1, on_step=[death], **chunks, **apart
    )
    assert len(death.killed) == 2
    require_same_numbers(killed, whole)
    require_adapters_alone(killed)


def test_experts_are_served_as_they_are_trained(tiny: TinyRuns, tmp_path: Path) -> None:
    """They have weights of three dimensions, which no linear layer has."""
    inputs = tmp_path / "inputs"
    shutil.copytree(tiny.folder, inputs, ignore=shutil.ignore_patterns("model"))
    architectures.tiny("qwen3_moe", inputs / "model")
    graph = adapted(partial(algorithms.small, "grpo"), beta=0.1, minibatches=1)(inputs)
    one = tiny.run(graph, 3, name="one")
    assert max(column(one, "policy/mismatch/max")) < 1e-4
    require_same_numbers(tiny.run(graph, 3, name="apart", workers="apart"), one)
    split: dict[str, Any] = {"ranks": {"train_policy": 2}, "shard": True, "workers": "auto"}
    require_alike(tiny.run(graph, 3, name="split", **split), one)


def test_what_saves_memory_changes_no_bit(tiny: TinyRuns) -> None:
    """Policy and critic, which are on one base, compute their layers again."""
    make = adapted(partial(algorithms.small, "ppo"))
    usual = tiny.run(make, 3, name="usual")
    saving: dict[str, Any] = {
        "offload": {"train_policy": "optimizer"},
        "recompute": {"train_policy": "layers", "train_critic": "layers"},
    }
    require_same_numbers(tiny.run(make, 3, name="saving", **saving), usual)


def test_a_recorded_step_runs_again_to_the_same_bits(tiny: TinyRuns) -> None:
    make = adapted(run_graphs.followed)
    recorded = tiny.run(make, 4, record="all", checkpoint_every=2)
    again = rerun(recorded.folder, ["rollout", "values", "train_policy", "train_critic"], 4)
    assert again.same, again.nodes
    require_same_runs(recorded, tiny.run(make, 4, name="other"))
    assert all(row["adapter/policy/norm"] > 0.0 for row in metrics(recorded))
