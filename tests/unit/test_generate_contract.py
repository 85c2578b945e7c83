"""What every kernel of `generate` promises, on the torch kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataflow.kernel import Layout
from operators.kernels.torch.generate import TorchGenerate
from tests.kit.generate_suite import *  # noqa: F403
from tests.kit.kernels import open_kernel
from tests.kit.models import save_tiny


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("base") / request.param, request.param)


@pytest.fixture(scope="module")
def other(base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("other"), Path(base).name, seed=1)


@pytest.fixture
def tolerance() -> float:
    return 1e-5


@pytest.fixture
def make(base: str) -> Any:
    def opened(**given: Any) -> TorchGenerate:
        how = {"n": 1, "max_tokens": 12, "layout": Layout(slots=8)} | given
        return open_kernel(TorchGenerate(), base, **how)

    return opened
