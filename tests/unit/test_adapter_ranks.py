"""Two ranks that train an adapter, or a subset, give the numbers of one; what they send and save
is what is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dataflow.model import Model
from operators.kernels.torch.models import read_pieces
from tests.kit import adapter_ranks as ar
from tests.kit.training import as_ranks, assert_metrics_alike, distance, weights_of

pytest.importorskip("peft")
LIMIT = 120.0
"""Seconds that the ranks may take; about 10 on an idle core."""

Report = dict[str, Any]


@pytest.fixture(scope="module")
def alone(bases: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """What one rank comes to in each case."""
    folder = tmp_path_factory.mktemp("alone")
    reports: dict[str, Report] = {}
    for name, case in ar.CASES.items():
        kernel = case.open(bases)
        before = weights_of(kernel)
        reports[name] = ar.report_of(case, kernel, folder / name)
        assert distance(reports[name]["weights"], before) > 1e-3
    return reports


@pytest.fixture(scope="module")
def trained(
    bases: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Trains a world; returns the folder of what its ranks saved and reported."""

    @cache
    def folder_of(world: str) -> Path:
        folder = tmp_path_factory.mktemp(world.replace(" ", "-"))
        as_ranks(2, ar.main, ar.WORLDS[world], folder, bases, limit=LIMIT)
        return folder

    return folder_of


def in_cases() -> list[tuple[str, str]]:
    return [(world, name) for world in ar.WORLDS for name in ar.WORLDS[world].cases]


def reports_of(folder: Path, name: str) -> list[Report]:
    ranks = [torch.load(folder / f"rank {number}.pt", weights_only=True) for number in range(2)]
    return [rank[name] for rank in ranks]


@pytest.mark.long
@pytest.mark.parametrize(("world", "name"), in_cases())
def test_two_ranks_give_the_numbers_of_one(
    world: str, name: str, trained: Callable[[str], Path], alone: dict[str, Report]
) -> None:
    first, second = reports_of(trained(world), name)
    assert distance(first["weights"], alone[name]["weights"]) < 1e-5
    assert distance(first["restored"], first["weights"]) == 0.0
    for metrics, expected in zip(first["metrics"], alone[name]["metrics"], strict=True):
        assert_metrics_alike(metrics, expected, 1e-4)
    assert second["metrics"] == first["metrics"]
    if world not in ("whole", "tokens"):
        assert not second["weights"], "the first rank alone is given whole weights"


@pytest.mark.long
@pytest.mark.parametrize(("world", "name"), in_cases())
def test_what_is_sent_and_saved_is_what_is_trained(
    world: str, name: str, trained: Callable[[str], Path], bases: dict[str, str]
) -> None:
    folder = trained(world)
    first, _ = reports_of(folder, name)
    saved = folder / name / "weights"
    model = Model("policy", bases["qwen2"], **{"trainable": True, **model_fields(name)})
    pieces = read_pieces(model, saved, torch.device("cpu"))
    assert {piece.name for piece in pieces} == set(first["weights"])
    is_adapter = model.adapter is not None
    assert (saved / "adapter_model.safetensors").is_file() == is_adapter
    if is_adapter:
        with safe_open(saved / "adapter_model.safetensors", framework="pt") as file:
            assert len(file.keys()) == len(first["weights"])
            assert file.metadata()["base_digest"]
    trained_names = " ".join(first["weights"])
    assert "embed_tokens" not in trained_names
    assert ("lora_A" in trained_names) == is_adapter


def model_fields(name: str) -> dict[str, Any]:
    fields = {"trainable", "adapter"}
    return {key: ar.PARTS[name][key] for key in fields & ar.PARTS[name].keys()}
