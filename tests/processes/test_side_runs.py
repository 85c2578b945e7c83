"""Runs that train a user's side module: what travels, what is saved, what stays as it is."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dataflow.graph import Phase
from dataflow.program import Program
from dataflow.side_module import side
from engine.api import rerun
from engine.keep.flow.records import Flow
from engine.keep.flow.segments import read_steps
from engine.keep.run_measurements import EVENTS
from tests.kit import algorithms, run_graphs, runs
from tests.kit.adapted_graphs import adapted, require_same_when_resumed
from tests.kit.processes import KillWorkers
from tests.kit.side_modules import READER, make_reader
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(180)

KIB = 1024
ONE_UPDATE: dict[str, Any] = {"beta": 0.1, "minibatches": 1, "lr": 1e-2}


def hash_of(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("workers", ["one", "apart"])
def test_it_is_trained_and_the_base_stays(tiny: TinyRuns, workers: str) -> None:
    before = hash_of(tiny.folder / "model")
    graph = algorithms.small("grpo", tiny.folder, adapter=READER, **ONE_UPDATE)
    result = tiny.run(graph, workers=workers)
    rows = runs.metrics(result)
    # One that adds zero is its base to the bit: what was sampled is what the trainer computes.
    assert rows[0]["policy/kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert rows[-1]["policy/kl_reference"] > 1e-5
    assert max(row["policy/mismatch/max"] for row in rows) < 1e-4
    assert 0.0 < rows[0]["adapter/norm"] < rows[-1]["adapter/norm"]
    assert hash_of(tiny.folder / "model") == before
    assert {Path(path).name for path in runs.weights(result)} == {"side_model.safetensors"}
    if workers == "apart":
        require_small_versions(result, rows[0]["adapter/bytes"])


def require_small_versions(result: runs.Run, size: float) -> None:
    """A reader fetched the side module's bytes of each version, and little beside each piece."""
    folder = runs.folder_of(result)
    flows = [record for record in read_steps(folder / EVENTS) if isinstance(record, Flow)]
    by_step = [flow.weights["policy->rollout@rollout"] for flow in flows]
    fetched, loads = sum(each.bytes for each in by_step), sum(each.loads for each in by_step)
    saved = next(folder.glob("checkpoints/*/train_policy/side_model.safetensors"))
    pieces = 1 + len(load_file(saved))  # and the digest of its base
    assert loads >= 3
    assert size <= fetched / loads <= size + KIB * pieces


def test_policy_and_critic_have_one_each_beside_one_base(tiny: TinyRuns) -> None:
    graph = algorithms.small("ppo", tiny.folder, adapter=READER, lr=1e-2)
    rows = runs.metrics(tiny.run(graph))
    for row in rows[1:]:
        assert min(row["adapter/policy/norm"], row["adapter/critic/norm"]) > 0.0
        assert row["policy/mismatch/max"] < 1e-4


def test_a_run_that_is_resumed_goes_on_to_the_bit(tiny: TinyRuns) -> None:
    graph = algorithms.small("grpo", tiny.folder, adapter=READER, **ONE_UPDATE)
    require_same_when_resumed(tiny, graph)


def test_a_run_begins_with_the_best_version_of_another(tiny: TinyRuns) -> None:
    make = adapted(run_graphs.evaluated, adapter=READER, keep_best=1)
    result = tiny.run(make, 4, name="first")
    ((best,),) = result.best.values()
    assert (best / "side_model.safetensors").is_file()
    greedy = [row["eval/vowels"] for row in runs.metrics(result) if "eval/vowels" in row]
    further = side(make_reader, start=str(best), **dict(READER.params))
    again = tiny.run(adapted(run_graphs.evaluated, adapter=further), 1, name="second")
    (row,) = runs.metrics(again)
    assert row["eval/initial/vowels"] == max(greedy)


def test_a_recorded_step_runs_again_to_the_same_bits(tiny: TinyRuns) -> None:
    graph = algorithms.small("grpo", tiny.folder, adapter=READER, **ONE_UPDATE)
    recorded = tiny.run(graph, 3, record="all", checkpoint_every=1)
    again = rerun(recorded.folder, ["rollout", "train_policy"], 3)
    assert again.same, again.nodes


def test_a_lost_worker_changes_no_bit(tiny: TinyRuns) -> None:
    graph = algorithms.small("grpo", tiny.folder, adapter=READER, **ONE_UPDATE)
    how: dict[str, Any] = {"workers": "apart", "checkpoint_every": 1}
    whole = tiny.run(graph, 3, name="whole", **how)
    kill = KillWorkers({2: "train_policy"})
    killed = tiny.run(graph, 3, name="killed", on_step=[kill], **how)
    runs.require_same_numbers(killed, whole)


@pytest.mark.parametrize("how", [{"ranks": {"train_policy": 2}}, {"replicas": {"rollout": 2}}])
def test_ranks_and_replicas_have_it_as_one_has(tiny: TinyRuns, how: dict[str, Any]) -> None:
    graph = algorithms.small("grpo", tiny.folder, adapter=READER, **ONE_UPDATE)
    alone = runs.metrics(tiny.run(graph, 2, name="alone"))
    several = runs.metrics(tiny.run(graph, 2, name="several", **{"workers": "auto", **how}))
    for one, other in zip(alone, several, strict=True):
        assert other["adapter/norm"] == pytest.approx(one["adapter/norm"], rel=1e-4)
        assert other["reward/mean"] == one["reward/mean"]


def test_a_later_phase_and_a_later_run_go_on_with_it(tiny: TinyRuns) -> None:
    first = algorithms.small("sft", tiny.folder, adapter=READER, lr=1e-2)
    second = algorithms.small("grpo", tiny.folder, adapter=READER, **ONE_UPDATE | {"lr": 1e-9})
    program = Program(Phase(first, steps=2), Phase(second, steps=1))
    result = tiny.run(program, None, name="program")
    rows = runs.metrics(result)
    # The reference is at the base, of which the first phase has moved the policy away.
    assert rows[2]["policy/kl_reference"] > 1e-5
    (saved,) = runs.weights(result)
    folder = (result.folder / saved).parent
    started = side(make_reader, start=str(folder), **dict(READER.params))
    graph = algorithms.small("grpo", tiny.folder, adapter=started, **ONE_UPDATE | {"lr": 1e-9})
    (row,) = runs.metrics(tiny.run(graph, 1, name="further"))
    assert row["policy/kl_reference"] > 1e-5
