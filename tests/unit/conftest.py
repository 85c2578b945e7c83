"""Model directories and a run folder; only tests that ask for a model import torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.keep.run_folder import RunFolder

# As where `make setup` ran without VLLM=1: `make test` passes there, too.
sys.modules["vllm"] = None  # type: ignore[assignment]


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models by kind: qwen2, llama, and a critic on the first."""
    from tests.kit.models import save_critic, save_tiny

    folder = tmp_path_factory.mktemp("bases")
    paths = {kind: save_tiny(folder / kind, kind) for kind in ("qwen2", "llama")}
    return paths | {"critic": save_critic(folder / "critic", paths["qwen2"])}


@pytest.fixture(scope="session")
def base(bases: dict[str, str]) -> str:
    """A tiny model."""
    return bases["qwen2"]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model directory of known size, named `tiny`, in the working directory."""
    from tests.kit.plans import save_tiny_header

    save_tiny_header(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For plans alone: as if every package that a kernel needs could be imported."""
    monkeypatch.setattr("engine.plan.passes.kernels._is_installed", lambda module: True)


@pytest.fixture
def run_folder(tmp_path: Path) -> Iterator[RunFolder]:
    """A new run folder, open."""
    with RunFolder.create("first", tmp_path) as folder:
        yield folder
