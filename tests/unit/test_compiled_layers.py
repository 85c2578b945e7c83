"""Compiled layers: the numbers of the plain ones, compiled once for all layers and lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dataflow.errors import KernelError
from dataflow.model import Model
from operators.kernels.torch.attention import forward
from operators.kernels.torch.compiled_layers import compile_layers
from operators.kernels.torch.decoder_layers import find_decoder_layers
from operators.kernels.torch.models import load_model
from operators.kernels.torch.packing import pack
from operators.kernels.torch.recompute import recompute_layers
from operators.kernels.torch.shared_attention import TreePass
from tests.kit.models import save_tiny
from tests.kit.rows import ragged


def logits_of(module: Any, length: int) -> Tensor:
    """The logits of two rows that share a prompt of `length` tokens."""
    prompt = [(7 * place) % 90 for place in range(length)]
    packed = pack(ragged([prompt, prompt]), ragged([[1, 2, 3], [4, 5]]), np.arange(2))
    ids, positions = torch.from_numpy(packed.ids), torch.from_numpy(packed.positions)
    return forward(module, ids, positions, TreePass(packed))


def count_graphs() -> int:
    """How many graphs this process has compiled."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@pytest.mark.long
def test_layers_are_compiled_once_and_compute_what_they_did_also_again(tmp_path: Path) -> None:
    model = Model("policy", save_tiny(tmp_path, layers=3))
    plain, compiled = load_model(model, "cpu"), load_model(model, "cpu")
    compile_layers(compiled)
    wrapped = [layer.forward for layer in find_decoder_layers(compiled)]
    compile_layers(compiled)
    assert [layer.forward for layer in find_decoder_layers(compiled)] == wrapped
    recompute_layers(compiled)
    before, graphs = count_graphs(), []
    for length in (20, 33, 57, 130):
        expected, logits = logits_of(plain, length), logits_of(compiled, length)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
        expected.square().mean().backward()
        logits.square().mean().backward()
        graphs.append(count_graphs() - before)
    # A layer is cut where attention is called; torch compiles a part anew once its lengths differ.
    assert 0 < graphs[-1] == graphs[-2] < 8
    pairs = zip(compiled.named_parameters(), plain.parameters(), strict=True)
    for (name, weight), other in pairs:
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.long
def test_a_compiler_that_fails_is_named_with_the_flag(tmp_path: Path) -> None:
    import torch._inductor.config as inductor

    settings: Any = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
    module = load_model(Model("policy", save_tiny(tmp_path)), "cpu")
    compile_layers(module)
    torch._dynamo.reset()  # no layer of another test has been compiled
    with (
        inductor.patch(settings),
        pytest.raises(KernelError, match=r"Qwen2DecoderLayer: .*Fix: --compiled none"),
    ):
        logits_of(module, 20)
