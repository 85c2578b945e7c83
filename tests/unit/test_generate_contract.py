"""What every kernel of `generate` promises, on the torch kernel."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.kernel import Layout
from operators.kernels.torch.generate import TorchGenerate
from tests.kit.generate_suite import *  # noqa: F403
from tests.kit.joined_rows import *  # noqa: F403
from tests.kit.kernels import open_kernel
from tests.kit.models import save_tiny

# This kernel against itself: it would prove nothing.
del test_rows_are_those_of_the_torch_kernel  # noqa: F821


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def tolerance() -> float:
    return 1e-5


@pytest.fixture
def make(base: str) -> Any:
    def opened(**given: Any) -> TorchGenerate:
        how = {"n": 1, "max_tokens": 12, "layout": Layout(slots=8)} | given
        kernel = open_kernel(TorchGenerate(), base, **how)
        kernel._static = None  # the step with shared keys, on a card too
        return kernel

    return opened
