"""Parallel training: ranks give the numbers of one, with whole, split and tensor weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from dataflow.errors import KernelError
from operators.kernels.torch.slices import Slices
from tests.kit import train_ranks as tr
from tests.kit.architectures import ARCHITECTURES
from tests.kit.kernels import FakeSession
from tests.kit.models import save_tiny
from tests.kit.train_worlds import THREE, WORLDS
from tests.kit.training import PG, as_ranks, assert_metrics_alike, distance, opened, weights_of

LIMIT = 120.0
"""Seconds that the ranks may take; about 10 on an idle core."""
BY_ROWS, BY_MATRICES, BOTH = ("whole", "split"), ("1 x 2", "2 x 2"), "2 x 2, split"

Reports = list[dict[str, Any]]
"""What each rank of a world wrote of everything that it did."""


def in_worlds(worlds: Iterable[str]) -> list[Any]:
    """Parameters of a test. "1 x 2" is a part of "2 x 2", and runs train in it, too."""
    again = pytest.mark.repeats(turn=1)
    return [pytest.param(each, marks=again if each == "1 x 2" else ()) for each in worlds]


def in_cases(worlds: Iterable[str]) -> list[Any]:
    """Parameters of a test: each case of each world."""
    return [
        pytest.param(*world.values, name, marks=world.marks)
        for world in in_worlds(worlds)
        for name in WORLDS[world.values[0]].cases
    ]


in_every_world = pytest.mark.parametrize("world", in_worlds(WORLDS))
in_every_case = pytest.mark.parametrize(("world", "name"), in_cases(WORLDS))


@pytest.fixture(scope="module")
def all_bases(bases: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With one that has norms of queries and keys."""
    return bases | {"qwen3": save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=8)}


@pytest.fixture(scope="module")
def alone(all_bases: dict[str, str]) -> Callable[[str], dict[str, Any]]:
    """What one rank comes to in a case, by its name."""

    @cache
    def report_of(name: str) -> dict[str, Any]:
        kernel = tr.CASES[name].open(all_bases)
        before = weights_of(kernel)
        report = tr.train_with_a_nap(tr.CASES[name], kernel)
        assert distance(report["weights"], before) > 1e-4
        return report

    return report_of


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory, all_bases: dict[str, str]
) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    """A folder with the checkpoints of one rank, and the weights after its next Step."""
    folder, after = tmp_path_factory.mktemp("ranks"), {}
    for name, case in tr.STATES.items():
        kernel = case.open(all_bases)
        tr.train(case, kernel, tr.FIRST)
        kernel.save(folder / f"{name} of one")
        tr.train(case, kernel, tr.SECOND)
        after[name] = weights_of(kernel)
    return folder, after


@pytest.fixture(scope="module")
def trained(saved: tuple[Path, Any], all_bases: dict[str, str]) -> Callable[[str], Path]:
    """Trains a world; returns the folder of what one rank saved, and what all reported."""

    @cache
    def folder_of(world: str) -> Path:
        path = saved[0] / world.replace(" ", "-")
        path.mkdir()
        ranks = WORLDS[world]
        as_ranks(ranks.size, tr.main, ranks, path, all_bases, limit=LIMIT)
        return path

    return folder_of


@pytest.fixture
def folder(world: str, trained: Callable[[str], Path]) -> Path:
    return trained(world)


@pytest.fixture
def ranks(folder: Path) -> Reports:
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank *.pt"))]


@pytest.fixture
def rel(world: str) -> float:
    """How near metrics are to those of one rank."""
    return 1e-4 if world in BY_ROWS else 1e-5


@pytest.mark.long
@pytest.mark.repeats
@in_every_case
def test_the_ranks_give_the_weights_and_metrics_of_one(
    alone: Callable[[str], dict[str, Any]], world: str, ranks: Reports, name: str, rel: float
) -> None:
    wanted = alone(name)
    first, *others = (rank[name] for rank in ranks)
    assert float((first["looked"] - wanted["looked"]).abs().max()) < 1e-5
    assert distance(first["weights"], wanted["weights"]) < 1e-6
    for found, metrics in zip(first["metrics"], wanted["metrics"], strict=True):
        assert_metrics_alike(found, metrics, rel)
    for other in others:
        assert other["metrics"] == first["metrics"]
        assert torch.equal(other["looked"], first["looked"])
        if world == "whole":
            assert distance(first["weights"], other["weights"]) == 0.0
        else:
            assert not other["weights"], "the first rank alone is given whole weights"


@pytest.mark.long
def test_three_ranks_that_train_in_parts_give_the_weights_and_metrics_of_one(
    alone: Callable[[str], dict[str, Any]], tmp_path: Path, all_bases: dict[str, str]
) -> None:
    as_ranks(THREE.size, tr.main_of_three, tmp_path, all_bases, limit=LIMIT)
    for path in sorted(tmp_path.glob("rank *.pt")):
        rank = torch.load(path, weights_only=True)
        for name in THREE.cases:
            wanted = alone(name)
            assert distance(rank[name]["weights"], wanted["weights"]) < 1e-6
            for found, metrics in zip(rank[name]["metrics"], wanted["metrics"], strict=True):
                assert_metrics_alike(found, metrics, 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("world", in_worlds(("split", "1 x 2", BOTH)))
def test_layers_computed_again_and_state_on_the_host_change_no_bit(ranks: Reports) -> None:
    first = ranks[0]  # which alone is given whole weights
    assert first["fitted"]["metrics"] == first["grpo"]["metrics"]
    assert distance(first["fitted"]["weights"], first["grpo"]["weights"]) == 0.0
    for moment in ("weights", "restored"):
        usual, waiting = first["narrow"][moment], first["waiting"][moment]
        assert distance(usual, waiting) == 0.0


@pytest.mark.long
@in_every_world
def test_every_rank_says_whether_the_weights_of_all_changed(ranks: Reports) -> None:
    for rank in ranks:
        assert [metrics["optim/changed"] for metrics in rank["still"]] == [0.0]
        assert rank["saved"]["metrics"][0]["optim/changed"] > 0.9


def tables_of(weights: Iterable[str]) -> set[str]:
    """The names of embedding and head over the vocabulary."""
    return {n for n in weights if "embed" in n or "head" in n}


def split_tables(weights: Iterable[str]) -> set[str]:
    """Those that tensor ranks split: a language model's."""
    return set() if "score.weight" in weights else tables_of(weights)


@pytest.mark.long
@pytest.mark.parametrize(("world", "name"), in_cases(BY_MATRICES))
def test_what_every_rank_has_stays_the_same_to_the_bit(ranks: Reports, name: str) -> None:
    first = ranks[0][name]
    split = {n for n, data in first["held"].items() if data.shape != first["weights"][n].shape}
    assert {n.split(".")[-2] for n in split} >= {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj"),
    }
    assert not any("norm" in n or "score" in n for n in split)
    assert split & tables_of(first["held"]) == split_tables(first["held"])
    for number, rank in enumerate(ranks):
        held = rank[name]["held"]
        for n, data in first["held"].items():
            twin = ranks[number % 2][name]["held"][n]
            assert torch.equal(held[n], twin if n in split else data), f"{n} of rank {number}"


@pytest.mark.long
@pytest.mark.parametrize("world", [BOTH])
@pytest.mark.parametrize("name", WORLDS[BOTH].cases)
def test_four_ranks_have_a_quarter_of_a_matrix_each_and_half_of_the_rest(
    ranks: Reports, name: str
) -> None:
    whole = ranks[0][name]["weights"]
    halves = {n for n in whole if "norm" in n or "score" in n}
    halves |= tables_of(whole) - split_tables(whole)
    assert halves < whole.keys()
    for n, data in whole.items():
        parts = [rank[name]["held"][n] for rank in ranks]
        assert sum(part.numel() for part in parts) == data.numel() * (1 + (n in halves))
        if n in halves:
            assert torch.equal(parts[0], parts[1]), n
            assert torch.equal(parts[2], parts[3]), n


@pytest.mark.long
@pytest.mark.parametrize("world", BY_ROWS)
def test_a_weight_that_one_rank_used_has_a_gradient_on_all_and_others_none(
    ranks: Reports,
) -> None:
    for rank in ranks:
        used, unused = rank["gradients"]
        assert torch.equal(used, torch.full((20, 30), 21.0))
        assert unused is None


@pytest.mark.long
@in_every_world
def test_a_checkpoint_of_many_ranks_goes_on_with_one(
    all_bases: dict[str, str], folder: Path, ranks: Reports, rel: float
) -> None:
    kernel = tr.SAVED.open(all_bases)
    kernel.restore(folder / "saved of many")
    [metrics] = tr.train(tr.SAVED, kernel, tr.SECOND)
    first, weights = ranks[0]["saved"], weights_of(kernel)
    assert distance(first["weights"], weights) < 1e-6
    assert_metrics_alike(first["metrics"][0], metrics, rel)
    module = AutoModelForCausalLM.from_pretrained(folder / "saved of many, weights")
    assert module.num_parameters() == sum(p.numel() for p in weights.values())


@pytest.mark.long
@in_every_world
def test_a_checkpoint_of_one_rank_goes_on_with_many(
    saved: tuple[Path, dict[str, Any]], ranks: Reports
) -> None:
    _, after = saved
    assert distance(ranks[0]["saved"]["restored"], after["saved"]) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("name", tr.STATES)
@in_every_world
def test_readers_get_the_bits_that_a_checkpoint_has(
    all_bases: dict[str, str], folder: Path, ranks: Reports, name: str
) -> None:
    kernel = tr.STATES[name].open(all_bases)
    kernel.restore(folder / f"{name} of many")
    assert distance(ranks[0][name]["sent"], weights_of(kernel)) == 0.0


@pytest.mark.long
@in_every_world
def test_narrow_weights_keep_their_wide_copies(
    all_bases: dict[str, str], world: str, folder: Path, ranks: Reports
) -> None:
    one, many = (
        torch.load(path / "optimizer.pt", weights_only=True)
        for path in (folder.parent / "narrow of one", folder / "narrow of many")
    )
    assert {copy.dtype for copy in many["copies"]} == {torch.float32}
    if world in BY_ROWS:
        # A product in bfloat16 has 8 bits, and other rows in it are another product.
        for number, of in one["adam"]["state"].items():
            mean, other = of["exp_avg"], many["adam"]["state"][number]["exp_avg"]
            assert 0.0 < float((mean - other).abs().max()) < 0.02 * float(mean.abs().max())
    kernel = tr.NARROW.open(all_bases)
    kernel.restore(folder / "narrow of many")
    tr.train(tr.NARROW, kernel, tr.SECOND)
    assert distance(ranks[0]["narrow"]["weights"], weights_of(kernel)) < 1e-3
    assert next(iter(ranks[0]["narrow"]["restored"].values())).dtype == torch.bfloat16


@pytest.mark.long
@in_every_world
def test_what_fails_on_one_share_fails_on_all_by_name(world: str, ranks: Reports) -> None:
    errors = [rank["faults"]["errors"] for rank in ranks]
    first, *others = errors
    step = "KernelError: train_policy: step 1: "
    assert first["loss"].startswith(step + "expected a loss that is finite, found ")
    assert "expected a gradient norm that is finite" in first["gradient"]
    for name in ("loss", "gradient", "uneven"):
        assert {other[name] for other in others} == {first[name]}
    # Ranks with whole weights compute a part each by itself.
    parts = {error["part"] for error in errors}
    assert parts == {first["loss"]} | ({"nothing"} if world == "whole" else set())
    for error in errors:
        assert error["raised"].endswith("Error: an advantage of 3")
        assert "picky.advantage.advantage: row " in error["column"], "it failed on others"
    if world in BY_ROWS:
        assert "first row (13, 0, 0)" in first["loss"]
        assert "expected each of 18 rows with exactly one of 2 ranks" in first["uneven"]
        assert "found row 15 with 0" in first["uneven"]
        raised = "loss 'picky' failed: it raised ValueError: an advantage"
        assert all(error["raised"].startswith(step + raised) for error in errors)
        assert others[0]["column"].startswith("DataError: picky.advantage.advantage: row ")
        assert first["column"] == others[0]["column"].replace("DataError", "KernelError")
    else:
        assert "expected each of 18 rows with exactly 2 of" in first["uneven"]
        assert "found row 15 with 1" in first["uneven"]


@pytest.mark.long
@in_every_world
def test_a_step_after_faults_is_as_if_they_had_not_been(
    all_bases: dict[str, str], ranks: Reports, rel: float
) -> None:
    kernel = tr.FAULTY.open(all_bases)
    [metrics] = tr.train(tr.FAULTY, kernel, tr.FIRST)
    assert distance(ranks[0]["faults"]["weights"], weights_of(kernel)) < 1e-6
    assert_metrics_alike(ranks[0]["faults"]["metrics"][0], metrics, rel)


@pytest.mark.long
@pytest.mark.parametrize("world", in_worlds((*BY_MATRICES, BOTH)))
def test_every_group_is_bounded_in_time_as_the_whole_one(ranks: Reports) -> None:
    assert {limit for rank in ranks for limit in rank["limits"]} == {60.0}


@pytest.mark.parametrize(("size", "group", "split", "told"), [
    (2, None, {}, "expected a process group for its 2 ranks, found none"),
    (3, object(), {"tensor": 2}, "expected ranks in shares of 2, found 3"),
], ids=["no group", "no shares"])  # fmt: skip
def test_ranks_that_cannot_be_are_refused(
    base: str, size: int, group: Any, split: dict[str, Any], told: str
) -> None:
    with pytest.raises(KernelError, match=f"train_policy: {told}"):
        opened(base, PG, session=FakeSession(world=size, group=group), **split)


def mesh(ranks: int) -> Any:
    """As much of a DeviceMesh as is looked at before anything is split."""
    return Mock(size=Mock(return_value=ranks))


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
        Slices(module, mesh(ranks), "train_policy")
    assert message in str(caught.value)


def test_weights_that_a_plan_leaves_out_are_refused() -> None:
    module = AutoModelForCausalLM.from_config(ARCHITECTURES["phi"](qk_layernorm=True))
    message = "train_policy: .* found nothing of layers.0.self_attn.q_layernorm.weight, whose"
    with pytest.raises(KernelError, match=message):
        Slices(module, mesh(2), "train_policy")
