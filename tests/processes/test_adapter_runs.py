"""Runs that train a part of a Model: what travels, what is saved, what stays as it is."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dataflow.adapters import lora, subset
from dataflow.errors import CheckpointError, DataflowError, KernelError
from dataflow.graph import Graph, Phase
from dataflow.kernel import Piece
from dataflow.model import Model
from dataflow.program import Program
from engine.api import resume
from engine.cli import main
from engine.keep.flow.records import Flow
from engine.keep.flow.segments import read_steps
from engine.keep.run_measurements import EVENTS
from operators.kernels.torch.base_piece import NAME
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.train import TorchTrain
from tests.kit import algorithms, runs
from tests.kit.adapted_graphs import adapted, require_same_when_resumed
from tests.kit.models import save_tiny
from tests.kit.processes import KillWorkers
from tests.kit.tiny_runs import TinyRuns

pytest.importorskip("peft")
pytestmark = pytest.mark.timeout(180)


STEPS, KIB = 3, 1024
ONE_UPDATE: dict[str, Any] = {"beta": 0.1, "minibatches": 1}


def hash_of(folder: Path) -> str:
    """Of the weights of a base."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def training_norms(folder: Path) -> Graph:
    """GRPO that trains the norms of its policy."""

    def train_norms(node: Any) -> Any:
        states = dict(node.states)
        for name, state in states.items():
            if isinstance(state, Model) and state.trainable:
                states[name] = Model("policy", state.base, trainable=subset(parts=("norm",)))
        return node.changed(states=states)

    return algorithms.small("grpo", folder).map(train_norms)


PARTS = {
    "adapter": adapted(partial(algorithms.small, "grpo")),
    "subset": training_norms,
}


def require_trained(result: runs.Run, steps: int = STEPS) -> list[dict[str, Any]]:
    """The metrics of a run each of whose Steps moved the adapter away from its base."""
    rows = runs.metrics(result)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    norms = [row["adapter/norm"] for row in rows]
    assert 0.0 < norms[0] < norms[-1]
    return rows


def require_small_versions(result: runs.Run, size: float) -> None:
    """A reader fetched the adapter's bytes of each version, and little beside each piece."""
    [saved] = runs.folder_of(result).glob("checkpoints/*/train_policy/adapter_model.safetensors")
    pieces = 1 + len(load_file(saved))  # and the digest of its base
    assert size <= mean_version_bytes(result) <= size + KIB * pieces


def mean_version_bytes(result: runs.Run) -> float:
    """What a version's reader fetched, on average."""
    records = read_steps(runs.folder_of(result) / EVENTS)
    flows = [record for record in records if isinstance(record, Flow)]
    by_step = [flow.weights["policy->rollout@rollout"] for flow in flows]
    loads = sum(each.loads for each in by_step)
    assert loads >= STEPS
    return sum(each.bytes for each in by_step) / loads


@pytest.mark.parametrize("workers", ["one", "apart"])
def test_an_adapter_is_trained_and_the_base_stays(tiny: TinyRuns, workers: str) -> None:
    before = hash_of(tiny.folder / "model")
    graph = algorithms.small("grpo", tiny.folder, adapter=lora(rank=4), **ONE_UPDATE)
    result = tiny.run(graph, workers=workers)
    rows = require_trained(result)
    # A fresh adapter is its base to the bit: what the sampler wrote is what the trainer computes.
    assert rows[0]["policy/kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert hash_of(tiny.folder / "model") == before
    saved = [Path(path).name for path in runs.weights(result)]
    assert set(saved) == {"adapter_model.safetensors"}
    assert any("weights/policy/load" in row for row in rows) == (workers == "apart")
    if workers == "apart":
        require_small_versions(result, rows[0]["adapter/bytes"])


def test_a_version_of_rank_16_is_a_tenth_of_two_layers(tiny: TinyRuns, tmp_path: Path) -> None:
    """Of width 256: a matrix of rank 16 has 2 x 16 / 256 of a square one's numbers."""
    wide = tmp_path / "inputs"
    shutil.copytree(tiny.folder, wide, ignore=shutil.ignore_patterns("runs", "model"))
    save_tiny(wide / "model", hidden_size=256, intermediate_size=768)
    sent: list[float] = []
    for name, adapter in (("whole", None), ("adapter", lora(rank=16))):
        graph = algorithms.small("grpo", wide, adapter=adapter, **ONE_UPDATE)
        sent.append(mean_version_bytes(tiny.run(graph, name=name, workers="apart")))
    assert 0.09 < sent[1] / sent[0] < 0.11


@pytest.mark.parametrize(("workers", "max_lag"), [("one", 0), ("one", 1), ("apart", 1)])
def test_a_generation_merges_each_version(tiny: TinyRuns, workers: str, max_lag: int) -> None:
    """In float32 its rows are those of the adapter beside its base, but for rounding."""
    graph = algorithms.small("grpo", tiny.folder, adapter=lora(rank=4), **ONE_UPDATE)
    graph = algorithms.lagging(graph, max_lag)
    rows = require_trained(tiny.run(merging(graph), workers=workers))
    errors = [row["generate/merge_error"] for row in rows if "generate/merge_error" in row]
    assert set(errors) == {0.0}
    if not max_lag:
        # What was sampled by the merged policy is what the trainer computes, at each version.
        assert max(row["policy/mismatch/mean"] for row in rows) < 1e-4
        assert rows[-1]["adapter/norm"] > 0.01


def merging(graph: Graph) -> Graph:
    """The graph whose generations merge their adapters."""

    def change(node: Any) -> Any:
        if not node.operator.traits.generates:
            return node
        return node.changed(params=node.params | {"merge": True})

    return graph.map(change)


def test_policy_and_critic_have_adapters_beside_one_base(tiny: TinyRuns) -> None:
    graph = algorithms.small("ppo", tiny.folder, adapter=lora(rank=4))
    rows = runs.metrics(tiny.run(graph))
    for row in rows[1:]:
        assert min(row["adapter/policy/norm"], row["adapter/critic/norm"]) > 0.0


def test_two_ranks_with_parts_of_the_weights_train_it_as_one(tiny: TinyRuns) -> None:
    graph = algorithms.small("grpo", tiny.folder, adapter=lora(rank=4))
    alone = require_trained(tiny.run(graph, 2, name="alone"), 2)
    how: dict[str, Any] = {
        "ranks": {"train_policy": 2},
        "shard": True,
        "workers": "auto",
        "name": "split",
    }
    split = require_trained(tiny.run(graph, 2, **how), 2)
    for one, two in zip(alone, split, strict=True):
        assert two["adapter/norm"] == pytest.approx(one["adapter/norm"], rel=1e-4)
        assert two["reward/mean"] == one["reward/mean"]


def test_a_run_that_is_resumed_goes_on_to_the_bit(tiny: TinyRuns) -> None:
    graph = algorithms.small("grpo", tiny.folder, adapter=lora(rank=4))
    require_same_when_resumed(tiny, graph)


def test_a_later_phase_goes_on_with_the_adapter(tiny: TinyRuns) -> None:
    adapter = lora(rank=4)
    first = algorithms.small("sft", tiny.folder, adapter=adapter)
    second = algorithms.small("grpo", tiny.folder, adapter=adapter, lr=1e-9)
    program = Program(Phase(first, steps=2), Phase(second, steps=1))
    norms = [row["adapter/norm"] for row in runs.metrics(tiny.run(program, None))]
    assert norms[2] == pytest.approx(norms[1], rel=1e-3)


def test_an_adapter_is_beside_what_an_earlier_phase_trained(tiny: TinyRuns) -> None:
    """The reference, which is at the base, is not moved with it."""
    first = algorithms.small("sft", tiny.folder, lr=1e-2)
    second = algorithms.small("grpo", tiny.folder, adapter=lora(rank=4), **ONE_UPDATE)
    program = Program(Phase(first, steps=2), Phase(second, steps=2))
    whole = tiny.run(program, None, name="whole", checkpoint_every=1)
    rows = runs.metrics(whole)
    assert rows[2]["policy/kl_reference"] > 1e-3
    assert rows[2]["policy/mismatch/max"] < 1e-4
    assert rows[3]["adapter/norm"] > rows[2]["adapter/norm"] > 0.0
    killed = tiny.run(
        program,
        None,
        name="killed",
        checkpoint_every=1,
        workers="apart",
        on_step=[KillWorkers({3: "train_policy"})],
    )
    runs.require_same_numbers(killed, whole)


@pytest.mark.parametrize("part", ["adapter", "subset"])
def test_a_run_is_not_resumed_on_another_base(tiny: TinyRuns, tmp_path: Path, part: str) -> None:
    shutil.copytree(tiny.folder, tmp_path / "inputs")
    model = tmp_path / "inputs" / "model" / "model.safetensors"
    graph = PARTS[part](tmp_path / "inputs")
    first = tiny.run(graph, 1)
    content = model.read_bytes()
    changed = {name: tensor + 1e-3 for name, tensor in load_file(model).items()}
    save_file(changed, model, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="its content changed"):
        resume(first.folder, steps=2)
    with pytest.raises(KernelError, match="trained beside its base"):
        resume(first.folder, steps=2, accept_changes=True)
    model.write_bytes(content)
    assert resume(first.folder, steps=2, accept_changes=True).step == 2


def test_a_later_phase_without_it_begins_with_it_merged(tiny: TinyRuns) -> None:
    first = algorithms.small("sft", tiny.folder, adapter=lora(rank=4), lr=1e-2)
    second = algorithms.small("grpo", tiny.folder, lr=1e-9, **ONE_UPDATE)
    result = tiny.run(Program(Phase(first, steps=2), Phase(second, steps=1)), None)
    rows = runs.metrics(result)
    assert "adapter/norm" in rows[1]
    assert "adapter/norm" not in rows[2]
    # The reference is at the base, of which the policy has moved away.
    assert rows[2]["policy/kl_reference"] > 1e-5
    assert rows[2]["policy/mismatch/mean"] < 1e-4
    (merged,) = (result.folder / "checkpoints/merged").iterdir()
    alone = tiny.folder / "merged_by_hand"
    adapter = result.folder / "checkpoints" / merged.name.replace("_train", "/train", 1)
    assert main(["merge", str(adapter), str(alone)]) == 0
    assert hash_of(merged) == hash_of(alone)


def test_a_death_in_a_phase_that_began_merged_changes_no_bit(tiny: TinyRuns) -> None:
    first = algorithms.small("sft", tiny.folder, adapter=lora(rank=4), lr=1e-2)
    second = algorithms.small("grpo", tiny.folder, **ONE_UPDATE)
    program = Program(Phase(first, steps=2), Phase(second, steps=2))
    whole = tiny.run(program, None, name="whole")
    death = KillWorkers({4: "train_policy"})
    how: dict[str, Any] = {"checkpoint_every": 1, "workers": "apart", "on_step": [death]}
    killed = tiny.run(program, None, name="killed", **how)
    assert len(death.killed) == 1
    runs.require_same_numbers(killed, whole)
    part = tiny.run(Program(Phase(first, steps=2), Phase(second, steps=1)), None, name="part")
    again = resume(part.folder, graph=program, accept_changes=True)
    runs.require_same_numbers(again, whole)


class Forgetful(TorchTrain):
    """Offers versions without the adapter."""

    def pieces(self) -> Iterable[Piece]:
        return ()


class OfAnotherBase(TorchTrain):
    """Offers versions that were trained beside another base."""

    def pieces(self) -> Iterable[Piece]:
        for piece in super().pieces():
            changed = piece.data + 1 if piece.name == NAME else piece.data
            yield Piece(piece.name, changed)


class KeepsItsFirst(TorchGenerate):
    """Says that it has each version, and goes on with the adapter that it began with."""

    def load(self, pieces: Iterable[Piece], version: int, rate: float = 1.0) -> None:
        del pieces, rate
        self._version = version


def with_kernel(graph: Graph, work: str, kernel: type) -> Graph:
    path = f"{kernel.__module__}:{kernel.__name__}"

    def change(node: Any) -> Any:
        if node.operator.work != work:
            return node
        kernels = dict.fromkeys(node.operator.kernels, path)
        return node.changed(operator=replace(node.operator, kernels=kernels))

    return graph.map(change)


@pytest.mark.parametrize(
    ("work", "kernel", "message"),
    [
        ("train", Forgetful, "expected the adapter of 'policy' in version 0, found no weight"),
        ("train", OfAnotherBase, "expected weights that were trained beside it as it is here"),
        (
            "decode",
            KeepsItsFirst,
            "rollout has version 1 of train_policy, bit for bit, but",
        ),
    ],
)
def test_a_reader_without_its_adapter_ends_the_run_by_version_1(
    tiny: TinyRuns, work: str, kernel: type, message: str
) -> None:
    graph = algorithms.small("grpo", tiny.folder, adapter=lora(rank=4))
    with pytest.raises(DataflowError, match=message):
        tiny.run(with_kernel(graph, work, kernel), workers="apart")


def test_a_subset_travels_alone(tiny: TinyRuns) -> None:
    rows = runs.metrics(tiny.run(training_norms(tiny.folder), workers="apart"))
    assert rows[-1]["optim/changed"] > 0.9
    assert not any(name.startswith("adapter/") for row in rows for name in row)
