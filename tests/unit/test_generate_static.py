"""What every kernel of `generate` promises, on the torch kernel that decodes at fixed places: the
same code as on a GPU, but for the capture of graphs.
"""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.kernel import Layout
from operators.kernels.torch import static_step
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.static_memory import StaticMemory
from tests.kit.generate_suite import *  # noqa: F403
from tests.kit.generate_suite import MIXED, generated
from tests.kit.joined_rows import *  # noqa: F403
from tests.kit.kernels import open_kernel
from tests.kit.models import save_tiny

del test_the_written_tokens_are_counted  # noqa: F821  of a step without padded rows


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def tolerance() -> float:
    return 1e-4


@pytest.fixture
def make(base: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rows and keys in such small powers of two that the chunks of these tests go through some."""
    monkeypatch.setattr(static_step, "FEWEST_ROWS", 2)
    monkeypatch.setattr(static_step, "FEWEST_KEYS", 8)

    def opened(**given: Any) -> TorchGenerate:
        how = {"n": 1, "max_tokens": 12, "layout": Layout(slots=8)} | given
        kernel = open_kernel(TorchGenerate(), base, **how)
        kernel._static = StaticMemory(kernel._module)
        return kernel

    return opened


def test_padded_rows_and_what_ended_rows_wrote_ahead_are_counted(make: Any) -> None:
    kernel = make(n=4, max_tokens=30)
    lengths = generated(kernel, MIXED * 4).ragged("completion_ids").lengths
    metrics = kernel._session.metrics
    [(waste, computed)] = metrics["generate/slot_waste"]
    assert (1 - waste) * computed == pytest.approx(lengths.sum() - 80)
    assert waste > 0
    [(idle, slots)] = metrics["generate/slot_idle"]
    assert (1 - idle) * slots == pytest.approx(lengths.sum() - 80)
