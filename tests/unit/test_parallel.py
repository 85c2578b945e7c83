"""Parallel training: ranks give the numbers of one, with whole, split and tensor weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dataflow.errors import KernelError
from operators.kernels.torch import heads
from operators.kernels.torch.slices import Slices
from tests.kit import train_ranks as tr
from tests.kit.architectures import ARCHITECTURES
from tests.kit.kernels import FakeSession
from tests.kit.models import save_tiny
from tests.kit.training import PG, as_ranks, assert_metrics_alike, distance, opened, weights_of

LIMIT = 120.0
"""Seconds that the ranks may take; about 15 on an idle core."""
BY_ROWS, BY_MATRICES = ("whole", "split"), ("1 x 2", "2 x 2")

Reports = list[dict[str, Any]]
"""What each rank of a world wrote of everything that it did."""


def worlds(*names: str, cases: bool = False) -> pytest.MarkDecorator:
    """The tests of these worlds, each for all its cases."""
    if not cases:
        return pytest.mark.parametrize("world", [tr.WORLDS[name] for name in names], ids=names)
    chosen = [
        pytest.param(tr.WORLDS[name], case, id=f"{name}-{case}")
        for name in names
        for case in tr.WORLDS[name].cases
    ]
    return pytest.mark.parametrize(("world", "name"), chosen)


@pytest.fixture(scope="module")
def all_bases(bases: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With one whose linear layers have biases, and one with norms of queries and keys."""
    folder = tmp_path_factory.mktemp("more")
    biased = save_tiny(folder / "biased", "llama", attention_bias=True, mlp_bias=True)
    return bases | {"biased": biased, "qwen3": save_tiny(folder / "qwen3", "qwen3", head_dim=8)}


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, all_bases: dict[str, str]
) -> Callable[[tr.World], Path]:
    """Trains a world, once; returns what one rank saved, and what all saved and reported."""

    @cache
    def folder_of(world: tr.World) -> Path:
        path = tmp_path_factory.mktemp("ranks")
        for name, case in (("saved", tr.SAVED), ("narrow", tr.NARROW)):
            kernel = case.open(all_bases)
            tr.train(case, kernel, tr.STEPS[:2])
            kernel.save(path / f"{name} of one")
        as_ranks(world.size, tr.main, world, path, all_bases, limit=LIMIT)
        return path

    return folder_of


@pytest.fixture
def folder(world: tr.World, trained: Callable[[tr.World], Path]) -> Path:
    return trained(world)


@pytest.fixture
def ranks(folder: Path) -> Reports:
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank *.pt"))]


@pytest.fixture
def rel(world: tr.World) -> float:
    """How near metrics are to those of one rank."""
    return 1e-5 if world.tensor > 1 else 1e-4


@pytest.mark.long
@worlds(*BY_ROWS, *BY_MATRICES, cases=True)
def test_the_ranks_give_the_weights_and_metrics_of_one(
    all_bases: dict[str, str],
    world: tr.World,
    ranks: Reports,
    name: str,
    rel: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = tr.CASES[name]
    monkeypatch.setattr(heads, "CHUNK", case.chunk or heads.CHUNK)
    alone = case.open(all_bases)
    before, wanted = weights_of(alone), tr.train(case, alone, tr.STEPS[:1])
    looked = tr.look(alone)
    wanted += tr.train(case, alone, tr.STEPS[1:])
    first, *others = (rank[name] for rank in ranks)
    assert float((first["looked"] - looked).abs().max()) < 1e-5
    assert distance(first["weights"], weights_of(alone)) < 1e-6
    assert distance(first["weights"], before) > 1e-4
    for step, metrics in enumerate(first["metrics"]):
        assert_metrics_alike(metrics, wanted[step], rel)
    for other in others:
        assert other["metrics"] == first["metrics"]
        assert torch.equal(other["looked"], first["looked"])
        if world.shard or world.tensor > 1:
            assert not other["weights"], "the first rank alone is given whole weights"
        else:
            assert distance(first["weights"], other["weights"]) == 0.0


@pytest.mark.long
@worlds(*BY_MATRICES, cases=True)
def test_what_every_rank_has_stays_the_same_to_the_bit(ranks: Reports, name: str) -> None:
    first = ranks[0][name]
    split = {n for n, data in first["held"].items() if data.shape != first["weights"][n].shape}
    assert {n.split(".")[-2] for n in split} >= {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj"),
    }
    assert not any("norm" in n or "embed" in n or "head" in n for n in split)
    for number, rank in enumerate(ranks):
        held = rank[name]["held"]
        for n, data in first["held"].items():
            twin = ranks[number % 2][name]["held"][n]
            assert torch.equal(held[n], twin if n in split else data), f"{n} of rank {number}"


@pytest.mark.long
@worlds(*BY_ROWS)
def test_gradients_are_summed_and_what_nobody_has_stays_none(ranks: Reports) -> None:
    for rank in ranks:
        *sums, none = rank["gradients"]
        assert [(float(g.min()), float(g.max()), tuple(g.shape)) for g in sums] == [
            (value, value, (20, 30)) for value in (0.0, 21.0, 21.0)
        ]
        assert none is None


@pytest.mark.long
@worlds(*BY_ROWS, *BY_MATRICES)
def test_the_greatest_of_a_metric_is_that_of_all_ranks(world: tr.World, ranks: Reports) -> None:
    only = {f"only{share}/max": -1.0 - share for share in range(world.shares)}
    for rank in ranks:
        assert rank["greatest"] == {"every/max": world.shares - 1.0} | only
        if "grpo" in rank:
            first = rank["grpo"]["metrics"][0]
            assert first["policy/mismatch/max"] > first["policy/mismatch/mean"] > 0.0


@pytest.mark.long
@worlds(*BY_ROWS, *BY_MATRICES)
def test_a_checkpoint_of_many_ranks_goes_on_with_one(
    all_bases: dict[str, str], folder: Path, ranks: Reports, rel: float
) -> None:
    alone = tr.SAVED.open(all_bases)
    alone.restore(folder / "saved of many")
    metrics = tr.train(tr.SAVED, alone, tr.STEPS[2:])
    first = ranks[0]["saved"]
    assert distance(first["weights"], weights_of(alone)) < 1e-6
    assert_metrics_alike(first["metrics"][0], metrics[0], rel)
    for saved in ("saved of many", "saved of many, weights"):
        module = AutoModelForCausalLM.from_pretrained(folder / saved)
        assert module.num_parameters() == sum(p.numel() for p in weights_of(alone).values())


@pytest.mark.long
@worlds(*BY_ROWS, *BY_MATRICES)
def test_a_checkpoint_of_one_rank_goes_on_with_many(
    all_bases: dict[str, str], folder: Path, ranks: Reports
) -> None:
    alone = tr.SAVED.open(all_bases)
    alone.restore(folder / "saved of one")
    tr.train(tr.SAVED, alone, tr.STEPS[2:])
    assert distance(ranks[0]["saved"]["restored"], weights_of(alone)) < 1e-6


@pytest.mark.long
@worlds(*BY_ROWS, *BY_MATRICES)
def test_narrow_weights_keep_their_wide_copies(
    all_bases: dict[str, str], world: tr.World, folder: Path, ranks: Reports
) -> None:
    one, many = (
        torch.load(folder / f"narrow of {which}" / "optimizer.pt", weights_only=True)
        for which in ("one", "many")
    )
    assert one["names"] == many["names"]
    assert [copy.shape for copy in one["copies"]] == [copy.shape for copy in many["copies"]]
    assert {copy.dtype for copy in many["copies"]} == {torch.float32}
    if world.tensor == 1:
        # A product in bfloat16 has 8 bits, and other rows in it are another product.
        for number, of in one["adam"]["state"].items():
            mean, other = of["exp_avg"], many["adam"]["state"][number]["exp_avg"]
            assert 0.0 < float((mean - other).abs().max()) < 0.02 * float(mean.abs().max())
    alone = tr.NARROW.open(all_bases)
    alone.restore(folder / "narrow of many")
    tr.train(tr.NARROW, alone, tr.STEPS[2:])
    assert distance(ranks[0]["narrow"]["weights"], weights_of(alone)) < 1e-3
    assert next(iter(ranks[0]["narrow"]["restored"].values())).dtype == torch.bfloat16


@pytest.mark.long
@worlds(*BY_ROWS, *BY_MATRICES)
def test_what_fails_on_one_share_fails_on_all_by_name(world: tr.World, ranks: Reports) -> None:
    errors = [rank["faults"]["errors"] for rank in ranks]
    first, *others = errors
    step = "KernelError: train_policy: step 1: "
    assert first["loss"].startswith(step + "expected a loss that is finite, found ")
    assert "expected a gradient norm that is finite" in first["gradient"]
    assert "found row 15 with 0" in first["lonely"]
    for other in others:
        assert [other[n] for n in ("loss", "gradient", "lonely")] == [
            first[n] for n in ("loss", "gradient", "lonely")
        ]
    for error in errors:
        assert error["raised"].endswith("Error: an advantage of 3")
        assert "picky.advantage.advantage: row " in error["column"], "it failed on others"
    if world.tensor == 1:
        assert "first row (13, 0, 0)" in first["loss"]
        assert "expected each of 18 rows with exactly one of 2 ranks" in first["lonely"]
        for error in errors:
            raised = "loss 'picky' failed: it raised ValueError: an advantage"
            assert error["raised"].startswith(step + raised)
        assert others[0]["column"].startswith("DataError: picky.advantage.advantage: row ")
        assert first["column"] == others[0]["column"].replace("DataError", "KernelError")
    else:
        assert "expected each of 18 rows with exactly 2 of" in first["lonely"]
        assert "found row 15 with 1" in first["uneven"]
        assert all(other["uneven"] == first["uneven"] for other in others)


@pytest.mark.long
@worlds(*BY_ROWS, *BY_MATRICES)
def test_a_step_after_faults_is_as_if_they_had_not_been(
    all_bases: dict[str, str], ranks: Reports, rel: float
) -> None:
    alone = tr.FAULTY.open(all_bases)
    (metrics,) = tr.train(tr.FAULTY, alone, [1])
    assert distance(ranks[0]["faults"]["weights"], weights_of(alone)) < 1e-6
    assert_metrics_alike(ranks[0]["faults"]["metrics"][0], metrics, rel)


@pytest.mark.long
@worlds(*BY_MATRICES)
def test_every_group_is_bounded_in_time_as_the_whole_one(ranks: Reports) -> None:
    assert {limit for rank in ranks for limit in rank["limits"]} == {20.0}


@pytest.mark.parametrize(("size", "group", "split", "told"), [
    (2, None, {}, "expected a process group for its 2 ranks, found none"),
    (3, object(), {"tensor": 2}, "expected ranks in shares of 2, found 3"),
    (
        2,
        object(),
        {"tensor": 2, "shard": True},
        "expected weights split in one way, found shard and tensor=2",
    ),
], ids=["no group", "no shares", "split in two ways"])  # fmt: skip
def test_ranks_that_cannot_be_are_refused(
    base: str, size: int, group: Any, split: dict[str, Any], told: str
) -> None:
    with pytest.raises(KernelError, match=f"train_policy: {told}"):
        opened(base, PG, session=FakeSession(world=size, group=group), **split)


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
def test_what_cannot_be_split_is_refused(base: str, message: str) -> None:
    module = AutoModelForCausalLM.from_pretrained(base)
    ranks, plan = REFUSED[message]
    module.config.base_model_tp_plan = module.config.base_model_tp_plan if plan == {} else plan
    with pytest.raises(KernelError, match="train_policy: ") as caught:
        Slices(module, Mesh(ranks), "train_policy")  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_weights_that_a_plan_leaves_out_are_refused() -> None:
    config = ARCHITECTURES["phi"](qk_layernorm=True)
    module = AutoModelForCausalLM.from_config(config)
    message = "train_policy: .* found nothing of layers.0.self_attn.q_layernorm.weight, whose"
    with pytest.raises(KernelError, match=message):
        Slices(module, Mesh(2), "train_policy")  # type: ignore[arg-type]
