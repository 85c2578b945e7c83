"""Tensor-parallel training: ranks with a part of each matrix give the numbers of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_ranks import ALL, QUICK, main
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dataflow.errors import KernelError
from operators.kernels.torch import heads
from operators.kernels.torch.slices import Slices
from tests.kit.kernels import FakeSession
from tests.kit.models import save_tiny
from tests.kit.train_ranks import FAULTY, NARROW, SAVED, STEPS, look, train, weights
from tests.kit.training import PG, alike, as_ranks, distance, opened

LIMIT = 120.0
"""Seconds that the ranks may take."""

WORLDS = [
    pytest.param(size, id=name, marks=pytest.mark.long)
    for size, name in (((2, 2), "1 x 2"), ((4, 2), "2 x 2"))
]


def save_qwen3(directory: Path) -> str:
    """As save_tiny's qwen2, with norms of queries and keys."""
    base = save_tiny(directory)
    config = AutoModelForCausalLM.from_pretrained(base).config.to_dict()
    kept = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    kept += (
        "num_key_value_heads",
        "max_position_embeddings",
        "initializer_range",
        "pad_token_id",
        "eos_token_id",
    )
    Qwen3ForCausalLM(
        Qwen3Config(**{name: config[name] for name in kept}, head_dim=8)
    ).save_pretrained(directory)
    return base


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bases")
    found = {kind: save_tiny(folder / kind, kind) for kind in ("qwen2", "llama")}
    critic = save_tiny(folder / "critic")
    AutoModelForTokenClassification.from_pretrained(found["qwen2"], num_labels=1).save_pretrained(
        critic
    )
    biased = save_tiny(folder / "biased", "llama", attention_bias=True, mlp_bias=True)
    return found | {"critic": critic, "biased": biased, "qwen3": save_qwen3(folder / "qwen3")}


@pytest.fixture(scope="module", params=WORLDS)
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory, bases: dict[str, str]) -> Path:
    """With what one rank saved after two Steps, and what all ranks wrote of everything that they
    did.
    """
    made = tmp_path_factory.mktemp("ranks")
    for name, case in (("saved", SAVED), ("narrow", NARROW)):
        kernel = case.open(bases)
        train(case, kernel, STEPS[:2])
        kernel.save(made / f"{name} of one")
    world, tensor = request.param
    as_ranks(world, main, world, tensor, made, bases, limit=LIMIT)
    return made


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank *.pt"))]


@pytest.mark.parametrize("name", QUICK)
def test_the_ranks_give_the_weights_and_metrics_of_one(
    bases: dict[str, str], ranks: list[dict[str, Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ALL[name]
    if case.chunk:
        monkeypatch.setattr(heads, "CHUNK", case.chunk)
    alone = case.open(bases)
    before, wanted = weights(alone), train(case, alone, STEPS[:1])
    looked = look(alone)
    wanted += train(case, alone, STEPS[1:])
    first, *others = (rank[name] for rank in ranks)
    assert float((first["looked"] - looked).abs().max()) < 1e-5
    assert distance(first["weights"], weights(alone)) < 1e-6
    assert distance(first["weights"], before) > 1e-4
    for step, metrics in enumerate(first["metrics"]):
        alike(metrics, wanted[step], rel=1e-5)
    for other in others:
        assert other["metrics"] == first["metrics"]
        assert torch.equal(other["looked"], first["looked"])
        assert not other["weights"], "the first rank alone is given whole weights"


@pytest.mark.parametrize("name", QUICK)
def test_what_every_rank_has_stays_the_same_to_the_bit(
    ranks: list[dict[str, Any]], name: str
) -> None:
    first = ranks[0][name]
    split = {n for n, data in first["held"].items() if data.shape != first["weights"][n].shape}
    assert {n.split(".")[-2] for n in split} >= {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
    }
    assert not any("norm" in n or "embed" in n or "head" in n for n in split)
    for number, rank in enumerate(ranks):
        held = rank[name]["held"]
        for n, data in first["held"].items():
            twin = ranks[number % 2][name]["held"][n]
            assert torch.equal(held[n], twin if n in split else data), f"{n} of rank {number}"


def test_a_checkpoint_of_many_ranks_goes_on_with_one(
    bases: dict[str, str], folder: Path, ranks: list[dict[str, Any]]
) -> None:
    alone = SAVED.open(bases)
    alone.restore(folder / "saved of many")
    metrics = train(SAVED, alone, STEPS[2:])
    first = ranks[0]["saved"]
    assert distance(first["weights"], weights(alone)) < 1e-6
    alike(first["metrics"][0], metrics[0], rel=1e-5)
    for saved in ("saved of many", "saved of many, weights"):
        found = AutoModelForCausalLM.from_pretrained(folder / saved)
        assert found.num_parameters() == sum(p.numel() for p in weights(alone).values())


def test_a_checkpoint_of_one_rank_goes_on_with_many(
    bases: dict[str, str], folder: Path, ranks: list[dict[str, Any]]
) -> None:
    alone = SAVED.open(bases)
    alone.restore(folder / "saved of one")
    train(SAVED, alone, STEPS[2:])
    assert distance(ranks[0]["saved"]["restored"], weights(alone)) < 1e-6


def test_narrow_weights_keep_their_wide_copies(
    bases: dict[str, str], folder: Path, ranks: list[dict[str, Any]]
) -> None:
    one, many = (
        torch.load(folder / f"narrow of {which}" / "optimizer.pt", weights_only=True)
        for which in ("one", "many")
    )
    assert one["names"] == many["names"]
    assert [copy.shape for copy in one["copies"]] == [copy.shape for copy in many["copies"]]
    assert {copy.dtype for copy in many["copies"]} == {torch.float32}
    alone = NARROW.open(bases)
    alone.restore(folder / "narrow of many")
    train(NARROW, alone, STEPS[2:])
    assert distance(ranks[0]["narrow"]["weights"], weights(alone)) < 1e-3
    assert next(iter(ranks[0]["narrow"]["restored"].values())).dtype == torch.bfloat16


def test_what_fails_on_one_share_fails_on_all_by_name(ranks: list[dict[str, Any]]) -> None:
    first, *others = (rank["faults"]["said"] for rank in ranks)
    assert first["loss"].startswith(
        "KernelError: train_policy: step 1: expected a loss that is finite, found "
    )
    assert "expected a gradient norm that is finite" in first["gradient"]
    assert first["raised"].endswith("Error: an advantage of 3")
    assert "picky.advantage.advantage: row " in first["column"], "it failed on others"
    assert "expected each of 18 rows with exactly 2 of" in first["lonely"]
    assert "found row 15 with 0" in first["lonely"]
    assert "found row 15 with 1" in first["uneven"]
    for other in others:
        for name in ("loss", "gradient", "lonely", "uneven"):
            assert other[name] == first[name]
        assert other["raised"].endswith("Error: an advantage of 3")
        assert "picky.advantage.advantage: row " in other["column"]


def test_a_step_after_faults_is_as_if_they_had_not_been(
    bases: dict[str, str], ranks: list[dict[str, Any]]
) -> None:
    alone = FAULTY.open(bases)
    (metrics,) = train(FAULTY, alone, [1])
    assert distance(ranks[0]["faults"]["weights"], weights(alone)) < 1e-6
    alike(ranks[0]["faults"]["metrics"][0], metrics, rel=1e-5)


def test_every_group_is_bounded_in_time_as_the_whole_one(ranks: list[dict[str, Any]]) -> None:
    assert {limit for rank in ranks for limit in rank["limits"]} == {20.0}


def test_ranks_that_are_no_shares_are_refused(bases: dict[str, str]) -> None:
    with pytest.raises(KernelError, match="train_policy: expected ranks in shares of 2, found 3"):
        opened(bases["qwen2"], PG, session=FakeSession(world=3, group=object()), tensor=2)


class Mesh:
    """As much of a DeviceMesh as is looked at before anything is split."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


REFUSED = {
    "expected sizes divisible by its 3 tensor ranks, found num_attention_heads of 4": (3, {}),
    "found one with colwise_gather_output": (
        2,
        {"layers.*.self_attn.qkv_proj": "colwise_gather_output"},
    ),
    "for 'qwen2', found none. Fix: tensor=1": (2, None),
    "found none": (2, {"layers.*.attention.query": "colwise"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_split_is_refused(bases: dict[str, str], message: str) -> None:
    module = AutoModelForCausalLM.from_pretrained(bases["qwen2"])
    ranks, plan = REFUSED[message]
    module.config.base_model_tp_plan = module.config.base_model_tp_plan if plan == {} else plan
    with pytest.raises(KernelError, match="train_policy: ") as caught:
        Slices(module, Mesh(ranks), "train_policy")  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_weights_are_split_in_one_way(bases: dict[str, str]) -> None:
    with pytest.raises(
        KernelError,
        match="train_policy: expected weights split in one way, found shard and tensor=2",
    ):
        opened(
            bases["qwen2"], PG, session=FakeSession(world=2, group=object()), tensor=2, shard=True
        )
