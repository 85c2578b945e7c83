"""Products with large weights: the numbers of torch's own to rounding, by another library."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from dataflow.batch import Batch
from operators.kernels.torch import products
from operators.kernels.torch.generate import TorchGenerate
from tests.kit.generate_suite import MIXED, generated, tokens_of
from tests.kit.kernels import open_kernel
from tests.kit.models import save_tiny

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)
SHAPE = (512, 1024)
"""Of a weight that is just large enough."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands for what says, of each product by `linear`, whether oneDNN is to compute it."""
    spy = Mock(side_effect=products._large)
    monkeypatch.setattr(products, "_large", spy)
    return spy


@pytest.mark.parametrize(("rows", "biased"), [(1, True), (7, False), (64, True)])
def test_a_large_product_is_that_of_torch_to_rounding(rows: int, biased: bool) -> None:
    draw = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(1, rows, SHAPE[1], generator=draw), torch.randn(SHAPE, generator=draw)
    bias = torch.randn(SHAPE[0], generator=draw) if biased else None
    with torch.inference_mode():
        found = products.linear_product(x, weight, bias)
    exact = nn.functional.linear(x.double(), weight.double())
    exact += 0.0 if bias is None else bias.double()
    assert not torch.equal(found, exact.float())
    torch.testing.assert_close(found.double(), exact, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((511, 1024), torch.float32), (SHAPE, torch.bfloat16)]
)
def test_other_products_are_torchs_to_the_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, shape[1], dtype=dtype), torch.randn(*shape, dtype=dtype)
    assert torch.equal(products.linear_product(x, weight), nn.functional.linear(x, weight))


def test_a_module_of_small_weights_is_left_alone(asked: Mock) -> None:
    module = nn.Linear(8, 8)
    with products.fast_products(module):
        module(torch.zeros(1, 8))
    assert asked.call_count == 2  # its weight and its bias, and no product


def test_rows_of_a_model_with_large_weights_are_those_without_it(
    tmp_path: Path, asked: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_tiny(tmp_path, hidden_size=512, intermediate_size=1024, initializer_range=0.05)

    def answers() -> Batch:
        kernel = open_kernel(TorchGenerate(), base, n=3, max_tokens=12, temperature=0.9)
        return generated(kernel, MIXED)

    large, by_onednn = asked.side_effect, answers()
    # three large products of a layer, two layers, twelve tokens
    assert sum(large(*call.args) for call in asked.call_args_list) > 3 * 2 * 12
    monkeypatch.setattr(products, "LARGE", 1 << 60)
    by_torch = answers()
    assert tokens_of(by_onednn) == tokens_of(by_torch)
    said = (batch.ragged("sampler_logprobs").values for batch in (by_onednn, by_torch))
    np.testing.assert_allclose(*said, atol=1e-5)
