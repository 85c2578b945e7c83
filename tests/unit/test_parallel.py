"""Data-parallel training: two ranks give the numbers of one, with whole weights and with split
ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from dataflow.errors import KernelError
from operators.kernels.torch import heads
from tests.kit.kernels import FakeSession
from tests.kit.models import save_tiny
from tests.kit.train_ranks import CASES, FAULTY, NARROW, SAVED, STEPS, look, main, train, weights
from tests.kit.training import PG, alike, as_ranks, distance, opened

pytestmark = pytest.mark.long
SPLIT = pytest.mark.parametrize("shard", [False, True], ids=["whole", "split"])
LIMIT = 90.0
"""Seconds that both ranks may take; about 15 on an idle core."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bases")
    found = {kind: save_tiny(folder / kind, kind) for kind in ("qwen2", "llama")}
    critic = save_tiny(folder / "critic")
    AutoModelForTokenClassification.from_pretrained(found["qwen2"], num_labels=1).save_pretrained(
        critic
    )
    return found | {"critic": critic}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, bases: dict[str, str]) -> Path:
    """With what one rank saved after two Steps, and what two ranks wrote of everything that they
    did.
    """
    made = tmp_path_factory.mktemp("ranks")
    for name, case in (("saved", SAVED), ("narrow", NARROW)):
        kernel = case.open(bases)
        train(case, kernel, STEPS[:2])
        kernel.save(made / f"{name} of one")
    as_ranks(2, main, made, bases, limit=LIMIT)
    return made


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[Any, Any]]:
    return [torch.load(folder / f"rank {number}.pt", weights_only=True) for number in range(2)]


@SPLIT
@pytest.mark.parametrize("name", list(CASES))
def test_two_ranks_give_the_weights_and_metrics_of_one(
    bases: dict[str, str],
    ranks: list[dict[Any, Any]],
    name: str,
    shard: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CASES[name]
    if case.chunk:
        monkeypatch.setattr(heads, "CHUNK", case.chunk)
    alone = case.open(bases)
    before, wanted = weights(alone), train(case, alone, STEPS[:1])
    looked = look(alone)
    wanted += train(case, alone, STEPS[1:])
    first, second = (rank[name, shard] for rank in ranks)
    assert float((first["looked"] - looked).abs().max()) < 1e-5
    assert torch.equal(first["looked"], second["looked"])
    assert distance(first["weights"], weights(alone)) < 1e-6
    assert distance(first["weights"], before) > 1e-4
    assert first["metrics"] == second["metrics"]
    for step, metrics in enumerate(first["metrics"]):
        alike(metrics, wanted[step], rel=1e-4)
    if shard:
        assert not second["weights"]
    else:
        assert distance(first["weights"], second["weights"]) == 0.0


def test_gradients_are_summed_and_what_nobody_has_stays_none(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        *sums, none = rank["gradients"]
        assert [(float(g.min()), float(g.max()), tuple(g.shape)) for g in sums] == [
            (value, value, (20, 30)) for value in (0.0, 21.0, 21.0)
        ]
        assert none is None


@SPLIT
def test_a_checkpoint_of_two_ranks_goes_on_with_one(
    bases: dict[str, str], folder: Path, ranks: list[dict[Any, Any]], shard: bool
) -> None:
    target = folder / f"saved of two{', split' if shard else ''}"
    alone = SAVED.open(bases)
    alone.restore(target)
    metrics = train(SAVED, alone, STEPS[2:])
    first = ranks[0]["saved", shard]
    assert distance(first["weights"], weights(alone)) < 1e-6
    alike(first["metrics"][0], metrics[0], rel=1e-4)
    assert AutoModelForCausalLM.from_pretrained(target).num_parameters() == sum(
        p.numel() for p in weights(alone).values()
    )


@SPLIT
def test_a_checkpoint_of_one_rank_goes_on_with_two(
    bases: dict[str, str], folder: Path, ranks: list[dict[Any, Any]], shard: bool
) -> None:
    alone = SAVED.open(bases)
    alone.restore(folder / "saved of one")
    train(SAVED, alone, STEPS[2:])
    assert distance(ranks[0]["saved", shard]["restored"], weights(alone)) < 1e-6


@SPLIT
def test_narrow_weights_keep_their_wide_copies(
    bases: dict[str, str], folder: Path, ranks: list[dict[Any, Any]], shard: bool
) -> None:
    one, two = (
        torch.load(folder / f"narrow of {which}" / "optimizer.pt", weights_only=True)
        for which in ("one", "two, split" if shard else "two")
    )
    assert one["names"] == two["names"]
    assert [copy.shape for copy in one["copies"]] == [copy.shape for copy in two["copies"]]
    assert {copy.dtype for copy in two["copies"]} == {torch.float32}
    # A product in bfloat16 has 8 bits, and other rows in it are another product.
    for number, of in one["adam"]["state"].items():
        mean, other = of["exp_avg"], two["adam"]["state"][number]["exp_avg"]
        assert 0.0 < float((mean - other).abs().max()) < 0.02 * float(mean.abs().max())
    alone = NARROW.open(bases)
    alone.restore(folder / f"narrow of {'two, split' if shard else 'two'}")
    train(NARROW, alone, STEPS[2:])
    assert distance(ranks[0]["narrow", shard]["weights"], weights(alone)) < 1e-3
    assert next(iter(ranks[0]["narrow", shard]["restored"].values())).dtype == torch.bfloat16


@SPLIT
def test_what_fails_on_one_rank_fails_on_both_by_name(
    ranks: list[dict[Any, Any]], shard: bool
) -> None:
    first, second = (rank["faults", shard]["said"] for rank in ranks)
    row = r"(13, 0, 0)"
    assert first["loss"] == second["loss"]
    assert first["loss"].startswith(
        "KernelError: train_policy: step 1: expected a loss that is finite, found "
    )
    assert f"first row {row}" in first["loss"]
    assert first["gradient"] == second["gradient"]
    assert "expected a gradient norm that is finite" in first["gradient"]
    for said in (first["raised"], second["raised"]):
        assert said.startswith(
            "KernelError: train_policy: step 1: loss 'picky' failed: it raised ValueError: an"
            " advantage"
        )
    assert second["column"].startswith("DataError: picky.advantage.advantage: row ")
    assert first["column"] == second["column"].replace("DataError", "KernelError")
    assert first["lonely"] == second["lonely"]
    assert (
        "expected each of 18 rows with exactly one of 2 ranks, found row 15 with 0"
        in first["lonely"]
    )


@SPLIT
def test_a_step_after_faults_is_as_if_they_had_not_been(
    bases: dict[str, str], ranks: list[dict[Any, Any]], shard: bool
) -> None:
    alone = FAULTY.open(bases)
    (metrics,) = train(FAULTY, alone, [1])
    assert distance(ranks[0]["faults", shard]["weights"], weights(alone)) < 1e-6
    alike(ranks[0]["faults", shard]["metrics"][0], metrics, rel=1e-4)


def test_ranks_without_a_group_are_refused(bases: dict[str, str]) -> None:
    with pytest.raises(
        KernelError, match="train_policy: expected a process group for its 2 ranks, found none"
    ):
        opened(bases["qwen2"], PG, session=FakeSession(world=2))
