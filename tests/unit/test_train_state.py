"""The train kernel: its state on disk and asleep, and how it leaves a shared module."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dataflow.errors import CheckpointError
from tests.kit.models import save_tiny
from tests.kit.rows import random_rows
from tests.kit.training import (
    PG,
    SUPERVISED,
    assignment,
    distance,
    opened,
    weights_of,
    with_advantage,
)


def test_restored_training_goes_on_with_the_same_bits(base: str, tmp_path: Path) -> None:
    rows = random_rows(4, 2)
    first = opened(base, PG, minibatches=2)
    for step in (1, 2):
        first.step(with_advantage(rows, step, seed=step))
    first.save(tmp_path / "saved")
    second = opened(base, PG, minibatches=2)
    second.restore(tmp_path / "saved")
    assert distance(weights_of(first), weights_of(second)) == 0.0
    a, b = (kernel.step(with_advantage(rows, 3, seed=3)) for kernel in (first, second))
    assert a == b
    assert distance(weights_of(first), weights_of(second)) == 0.0


def test_the_state_of_another_model_is_refused(base: str, tmp_path: Path) -> None:
    opened(save_tiny(tmp_path / "larger", layers=3), PG).save(tmp_path / "saved")
    kernel = opened(base, PG)
    with pytest.raises(CheckpointError, match="found that of another model"):
        kernel._optimizer.restore(tmp_path / "saved" / "optimizer.pt")
    with pytest.raises(CheckpointError, match="found nothing"):
        kernel._optimizer.restore(tmp_path / "nowhere.pt")


@pytest.mark.parametrize("content", [pickle.dumps(os.getcwd), b"", b"PK torn"], ids=repr)
def test_a_file_that_is_no_state_is_refused_without_a_word_on_how_to_run_it(
    base: str, tmp_path: Path, content: bytes
) -> None:
    state = tmp_path / "optimizer.pt"
    state.write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        opened(base, PG)._optimizer.restore(state)
    assert str(refused.value).startswith(f"{state}: expected the state of an optimizer, found a")
    assert "weights_only" not in str(refused.value)


def test_bfloat16_weights_move_by_less_than_they_can_show(base: str, tmp_path: Path) -> None:
    rows = random_rows(4, 2)
    kernel = opened(base, SUPERVISED, dtype="bfloat16", lr=1e-5)
    before = weights_of(kernel)
    for step in range(1, 4):
        kernel.step(assignment(rows, step))
    masters = kernel._optimizer.stored_masters
    assert masters[0].dtype == torch.float32
    moved = distance({n: m.detach() for n, m in zip(before, masters, strict=True)}, before)
    assert moved == pytest.approx(3e-5, rel=0.3)
    kernel.save(tmp_path / "narrow")
    other = opened(base, SUPERVISED, dtype="bfloat16", lr=1e-5)
    other.restore(tmp_path / "narrow")
    for kept, found in zip(masters, other._optimizer.stored_masters, strict=True):
        assert torch.equal(kept, found)


def test_the_module_is_left_as_generation_needs_it(base: str) -> None:
    kernel = opened(base, PG)
    addresses = [p.data_ptr() for p in kernel._module.parameters()]
    kernel.step(with_advantage(random_rows(2, 2)))
    assert not kernel._module.training
    assert all(p.grad is None and p.requires_grad for p in kernel._module.parameters())
    assert [p.data_ptr() for p in kernel._module.parameters()] == addresses


def napping(base: str, dtype: str, nap: bool) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Two Steps of a kernel, with a nap between them or without."""
    kernel = opened(base, PG, dtype=dtype, minibatches=2)
    before = [id(p) for p in kernel._module.parameters()]
    metrics = []
    for step in (1, 2):
        metrics.append(dict(kernel.step(with_advantage(random_rows(4, 2), step, seed=step))))
        if nap:
            kernel.sleep()
            asleep = [*kernel._module.parameters(), *kernel._optimizer.masters]
            for moments in kernel._optimizer.state(step)["adam"]["state"].values():
                asleep += moments.values()
            assert {tensor.device.type for tensor in asleep} == {"cpu"}
            assert all(p.grad is None for p in kernel._module.parameters())
            kernel.wake()
            assert {p.device for p in kernel._module.parameters()} == {kernel._device}
            assert [id(p) for p in kernel._module.parameters()] == before, "others use them"
    return metrics, weights_of(kernel)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_that_slept_goes_on_with_the_same_bits(base: str, dtype: str) -> None:
    (rested, a), (awake, b) = napping(base, dtype, True), napping(base, dtype, False)
    assert rested == awake
    assert distance(a, b) == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_kernel_that_sleeps_lets_the_gpu_go(base: str) -> None:
    kernel = opened(base, PG)
    weights = list(kernel._module.parameters())
    kernel.step(with_advantage(random_rows(2, 2)))
    used = torch.cuda.memory_allocated()
    kernel.sleep()  # cuBLAS keeps its workspace
    assert torch.cuda.memory_allocated() <= used - 3 * sum(w.nbytes for w in weights)
    kernel.wake()
    assert all(a is b for a, b in zip(weights, kernel._module.parameters(), strict=True))
    kernel.step(with_advantage(random_rows(2, 2), 2))
