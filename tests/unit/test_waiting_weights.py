"""Weights of forward kernels that wait on the host give the numbers of those that stay."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dataflow.batch import Batch
from dataflow.errors import DataError
from dataflow.kernel import Layout
from dataflow.model import Model
from operators.kernels.torch.forward import TorchLogprobs
from operators.kernels.torch.models import load_model, pieces
from tests.kit.forward_ranks import KERNELS
from tests.kit.kernels import FakeSession, open_kernel, rows_chunk
from tests.kit.models import save_critic, save_tiny
from tests.kit.rows import random_rows

WAITS = Layout(offload="weights", tokens=40)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU as if it had memory of its own: weights are copied for each pass."""
    monkeypatch.setattr(
        "operators.kernels.torch.waiting_weights.has_own_memory", lambda device: True
    )


def numbers_of(kernel: Any, rows: Batch, column: str) -> list[Any]:
    (batch,) = kernel.run(rows_chunk(rows))
    return batch.records.column(column).to_pylist()


def addresses(kernel: Any) -> list[int]:
    return [weight.data_ptr() for weight in kernel._module.parameters()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", KERNELS)
def test_no_bit_differs_also_after_new_weights(
    base: str, tmp_path: Path, name: str, dtype: Any, apart: None
) -> None:
    kernel_class, head, column = KERNELS[name]
    first = base if head == "lm" else save_critic(tmp_path / "critic", base)
    other = save_tiny(tmp_path / "other", seed=1)
    second = other if head == "lm" else save_critic(tmp_path / "other critic", other)
    model = Model("m", first, head=head, dtype=dtype, trainable=True)
    usual = open_kernel(kernel_class(), model, layout=Layout(tokens=40))
    waiting = open_kernel(kernel_class(), model, layout=WAITS)
    rows, host_memory = random_rows(3, 3), addresses(waiting)
    ids = rows.ragged("prompt_ids")
    for version in (0, 1):
        if version:
            new_pieces = list(pieces(load_model(replace(model, base=second))))
            usual.load(new_pieces, version)
            waiting.load(new_pieces, version)
        assert numbers_of(waiting, rows, column) == numbers_of(usual, rows, column)
        assert (waiting.probe(ids) == usual.probe(ids)).all()
        waiting.sleep()
        waiting.wake()
        assert addresses(waiting) == host_memory


def record_addresses(kernel: Any, in_passes: list[list[int]]) -> None:
    """Note where the weights are as each pass begins."""

    def note(module: Any, inputs: Any) -> None:
        in_passes.append(addresses(kernel))

    kernel._module.base_model.register_forward_pre_hook(note)


def test_a_pass_has_a_copy_that_is_dropped_with_it(base: str, apart: None) -> None:
    kernel = open_kernel(TorchLogprobs(), base, layout=WAITS)
    host_memory, in_passes = addresses(kernel), list[list[int]]()
    record_addresses(kernel, in_passes)
    rows = random_rows(4, 3)
    numbers_of(kernel, rows, "logprobs")
    assert len(in_passes) > 1
    assert all(copies == in_passes[0] for copies in in_passes), "one copy for a chunk"
    kernel.probe(rows.ragged("prompt_ids"))
    assert all(set(copies).isdisjoint(host_memory) for copies in in_passes)
    assert addresses(kernel) == host_memory


def test_where_the_device_is_the_host_nothing_is_copied(base: str) -> None:
    kernel = open_kernel(TorchLogprobs(), base, layout=WAITS)
    host_memory, in_passes = addresses(kernel), list[list[int]]()
    record_addresses(kernel, in_passes)
    numbers_of(kernel, random_rows(2, 2), "logprobs")
    assert in_passes == [host_memory]


def test_weights_wait_after_a_pass_that_failed(base: str, apart: None) -> None:
    kernel = open_kernel(TorchLogprobs(), base, layout=WAITS)
    host_memory = addresses(kernel)
    first: Tensor = next(kernel._module.parameters())
    with torch.no_grad():
        first.fill_(float("nan"))
    with pytest.raises(DataError, match="expected a finite"):
        numbers_of(kernel, random_rows(2, 2), "logprobs")
    assert addresses(kernel) == host_memory


def test_kernels_share_weights_that_wait(base: str, apart: None) -> None:
    session = FakeSession()
    one, other = (
        open_kernel(TorchLogprobs(), base, layout=WAITS, session=session) for _ in range(2)
    )
    host_memory, rows = addresses(one), random_rows(2, 2)
    assert numbers_of(one, rows, "logprobs") == numbers_of(other, rows, "logprobs")
    assert addresses(other) == host_memory
    assert one._waiting is other._waiting


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_no_weight_is_there_between_passes(tmp_path: Path) -> None:
    wide = save_tiny(tmp_path / "wide", hidden_size=512, intermediate_size=1024)
    gc.collect()
    before, rows = torch.cuda.memory_allocated(), random_rows(3, 3)
    usual = open_kernel(TorchLogprobs(), wide, layout=Layout(tokens=40))
    expected = numbers_of(usual, rows, "logprobs")
    weights = sum(weight.nbytes for weight in usual._module.parameters())
    usual.close()
    gc.collect()
    kernel = open_kernel(TorchLogprobs(), wide, layout=WAITS)
    assert all(weight.is_pinned() for weight in kernel._module.parameters())
    assert numbers_of(kernel, rows, "logprobs") == expected
    kernel.load(list(pieces(load_model(Model("m", wide)))), 1)
    kernel.sleep()
    kernel.wake()
    assert all(weight.is_pinned() for weight in kernel._module.parameters())
    assert numbers_of(kernel, rows, "logprobs") == expected
    gc.collect()
    assert torch.cuda.memory_allocated() - before < weights / 10
