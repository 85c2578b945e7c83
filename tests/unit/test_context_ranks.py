"""Context ranks: each computes a part of the tokens of the same rows, and all train as one does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.errors import KernelError
from tests.kit import context_attention
from tests.kit import train_ranks as tr
from tests.kit.kernels import FakeSession
from tests.kit.models import save_tiny
from tests.kit.train_worlds import CONTEXT_WORLDS
from tests.kit.training import PG, as_ranks, assert_metrics_alike, distance, opened, weights_of

LIMIT = 120.0
"""Seconds that the ranks may take; about 10 on an idle core."""

Reports = list[dict[str, Any]]
"""What each rank of a world wrote of everything that it did."""

in_every_world = pytest.mark.parametrize("world", CONTEXT_WORLDS)
in_every_case = pytest.mark.parametrize(
    ("world", "name"),
    [(name, case) for name, world in CONTEXT_WORLDS.items() for case in world.cases],
)


@pytest.fixture(scope="module")
def all_bases(bases: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With one that has norms of queries and keys."""
    return bases | {"qwen3": save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=8)}


@pytest.fixture(scope="module")
def alone(all_bases: dict[str, str]) -> Callable[[str], dict[str, Any]]:
    """What one rank comes to in a case, by its name."""

    @cache
    def report_of(name: str) -> dict[str, Any]:
        return tr.train_with_a_nap(tr.CASES[name], tr.CASES[name].open(all_bases))

    return report_of


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, all_bases: dict[str, str]
) -> Callable[[str], Path]:
    """Trains a world, beside checkpoints of one rank; returns the folder of its reports."""
    folder = tmp_path_factory.mktemp("context")
    for name, case in tr.STATES.items():
        kernel = case.open(all_bases)
        tr.train(case, kernel, tr.FIRST)
        kernel.save(folder / f"{name} of one")

    @cache
    def folder_of(world: str) -> Path:
        path = folder / world.replace(" ", "-")
        path.mkdir()
        ranks = CONTEXT_WORLDS[world]
        as_ranks(ranks.size, tr.main, ranks, path, all_bases, limit=LIMIT)
        return path

    return folder_of


@pytest.fixture
def folder(world: str, trained: Callable[[str], Path]) -> Path:
    return trained(world)


@pytest.fixture
def ranks(folder: Path) -> Reports:
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank *.pt"))]


@pytest.mark.long
@in_every_case
def test_ranks_that_divide_tokens_give_the_weights_and_metrics_of_one(
    alone: Callable[[str], dict[str, Any]], world: str, ranks: Reports, name: str
) -> None:
    wanted = alone(name)
    first, *others = (rank[name] for rank in ranks)
    assert distance(first["weights"], wanted["weights"]) < 1e-6
    for metrics, wanted_metrics in zip(first["metrics"], wanted["metrics"], strict=True):
        assert_metrics_alike(metrics, wanted_metrics, 1e-4)
    for other in others:
        assert other["metrics"] == first["metrics"]
        assert torch.equal(other["looked"], first["looked"])
        if other["weights"]:
            assert distance(first["weights"], other["weights"]) == 0.0
    ways = CONTEXT_WORLDS[world]
    assert bool(others[-1]["weights"]) == (not ways.shard and ways.tensor == 1)


@pytest.mark.long
@in_every_world
def test_a_checkpoint_of_context_ranks_goes_on_with_one_rank(
    all_bases: dict[str, str], folder: Path, ranks: Reports
) -> None:
    kernel = tr.SAVED.open(all_bases)
    kernel.restore(folder / "saved of many")
    tr.train(tr.SAVED, kernel, tr.SECOND)
    assert distance(ranks[0]["saved"]["weights"], weights_of(kernel)) < 1e-6


@pytest.mark.long
@in_every_world
def test_what_fails_on_some_tokens_fails_on_all_ranks(world: str, ranks: Reports) -> None:
    errors = [rank["faults"]["errors"] for rank in ranks]
    first, *others = errors
    assert "train_policy: step 1: expected a loss that is finite, found " in first["loss"]
    assert "expected a gradient norm that is finite" in first["gradient"]
    for name in ("loss", "gradient", "uneven"):
        assert {other[name] for other in others} == {first[name]}
    alike = CONTEXT_WORLDS[world].alike
    assert f"expected each of 18 rows with exactly {alike} of" in first["uneven"]
    assert all(error["raised"].endswith("Error: an advantage of 3") for error in errors)


@pytest.mark.long
@in_every_world
def test_a_step_of_context_ranks_after_faults_is_as_if_they_had_not_been(
    all_bases: dict[str, str], ranks: Reports
) -> None:
    kernel = tr.FAULTY.open(all_bases)
    tr.train(tr.FAULTY, kernel, tr.FIRST)
    assert distance(ranks[0]["faults"]["weights"], weights_of(kernel)) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("world", ["tokens and matrices"])
def test_the_group_that_divides_tokens_is_bounded_in_time(ranks: Reports) -> None:
    assert {limit for rank in ranks for limit in rank["limits"]} == {60.0}


@pytest.mark.long
def test_each_of_two_ranks_keeps_half_for_backward_passes(
    all_bases: dict[str, str], tmp_path: Path
) -> None:
    case = tr.CASES["grpo"]
    whole = tr.count_kept(case, case.open(all_bases))
    as_ranks(2, tr.main_that_counts, tmp_path, all_bases, limit=LIMIT)
    halves = [torch.load(tmp_path / f"rank {number}.pt") for number in range(2)]
    assert all(0.45 * whole < half < 0.6 * whole for half in halves)


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_attention_of_every_kind_is_that_of_one_rank(count: int, tmp_path: Path) -> None:
    as_ranks(count, context_attention.main, tmp_path, count, limit=LIMIT)
    reports = [torch.load(tmp_path / f"rank {number}.pt") for number in range(count)]
    for name, kind in context_attention.KINDS.items():
        for index, whole in enumerate(context_attention.attend_alone(kind, count)):
            parts = [report[name][index] for report in reports]
            if whole.dim() == 1:  # of sinks, of which each rank has used its own heads'
                joined = torch.stack(parts).sum(0)
            else:
                joined = torch.stack(parts, dim=1).flatten(0, 1)[: len(whole)]
            assert float((joined - whole).abs().max()) < 1e-5, f"{name} {index}"


def test_heads_that_context_ranks_cannot_share_are_refused(base: str) -> None:
    session = FakeSession(world=3, group=None)
    with pytest.raises(KernelError, match="expected a process group for its 3 ranks"):
        opened(base, PG, session=session, context=3)
