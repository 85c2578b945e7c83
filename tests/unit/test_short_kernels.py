"""Torch kernels whose memory runs out: called again with less, they give what they would have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.errors import KernelError, ShortOfMemory
from dataflow.kernel import Assignment
from dataflow.memory_limits import MemoryLimits, is_out_of_memory
from operators.kernels.torch import forward
from operators.kernels.torch.decode import Decoder
from operators.kernels.torch.forward import TorchLogprobs
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.loss_backward import LossBackward
from operators.kernels.torch.train import TorchTrain
from tests.kit.kernels import FakeSession, open_kernel, prompt_chunk, rows_chunk
from tests.kit.rows import random_rows
from tests.kit.training import (
    PG,
    as_ranks,
    assert_metrics_alike,
    distance,
    gloo_world,
    opened,
    weights_of,
    with_advantage,
)

OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Have one call of this, by its number, run out of memory when it has done its work."""
    of_owner, count = getattr(owner, name), iter(range(1000))

    def failing(*args: Any, **kwargs: Any) -> Any:
        returned = of_owner(*args, **kwargs)
        if next(count) == call:
            raise OUT
        return returned

    monkeypatch.setattr(owner, name, failing)


def step_with_shorts(
    kernel: TorchTrain, assignment: Assignment
) -> tuple[dict[str, float], list[int]]:
    """Metrics of a Step, and how many updates were done whenever memory ran out."""
    updates: list[int] = []
    while True:
        try:
            return dict(kernel.step(assignment)), updates
        except (torch.OutOfMemoryError, ShortOfMemory):
            need = kernel.give_back()
            assert need.is_kept
            updates.append(need.updates)


@pytest.mark.parametrize("call", range(4))
def test_no_update_is_made_twice(base: str, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Two updates of two micro-batches: to the bit as without, whichever of them was short."""
    assignment = with_advantage(random_rows(4, 2, seed=3))
    ways = {"minibatches": 2, "tokens": 16}
    usual = opened(base, PG, **ways)
    wanted = dict(usual.step(assignment))
    kernel = opened(base, PG, **ways)
    fail_once(monkeypatch, LossBackward, "run", call)
    metrics, updates = step_with_shorts(kernel, assignment)
    by_call = [0, 0, 1, 1]
    assert wanted["train/micro_batches"] == len(by_call)
    assert updates == [by_call[call]]
    assert metrics == wanted
    assert distance(weights_of(kernel), weights_of(usual)) == 0
    # And it is over: the next Step has nothing of it.
    following = with_advantage(random_rows(4, 2, seed=4), 2)
    assert kernel.step(following) == usual.step(following)


def test_less_at_once_trains_alike(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assignment = with_advantage(random_rows(4, 2, seed=3))
    usual, kernel = opened(base, PG), opened(base, PG)
    wanted = dict(usual.step(assignment))
    fail_once(monkeypatch, LossBackward, "run", 0)
    with pytest.raises(torch.OutOfMemoryError):
        kernel.step(assignment)
    need = kernel.give_back()
    assert need.rows == 7
    assert need.is_divisible
    assert need.key is not None
    assert need.longest > 1
    kernel.limit(MemoryLimits(slots=256, tokens=30, recompute="layers"))
    metrics = dict(kernel.step(assignment))
    assert metrics["train/micro_batches"] > wanted["train/micro_batches"]
    assert_metrics_alike(metrics, wanted, rel=1e-4)
    assert distance(weights_of(kernel), weights_of(usual)) < 1e-5


def test_other_rows_after_half_a_step_are_refused(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = opened(base, PG, minibatches=2)
    fail_once(monkeypatch, LossBackward, "run", 1)
    with pytest.raises(torch.OutOfMemoryError):
        kernel.step(with_advantage(random_rows(4, 2, seed=3)))
    kernel.give_back()
    with pytest.raises(KernelError, match="expected the rest of step 1, of which 1 updates"):
        kernel.step(with_advantage(random_rows(4, 2, seed=4), 2))


def test_a_failing_update_of_the_weights_is_not_kept(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the weights may have moved."""
    kernel = opened(base, PG)
    fail_once(monkeypatch, type(kernel._optimizer), "step", 0)
    with pytest.raises(torch.OutOfMemoryError):
        kernel.step(with_advantage(random_rows(4, 2, seed=3)))
    need = kernel.give_back()
    assert not need.is_kept
    assert not need.is_divisible


def test_parts_are_not_kept(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = opened(base, PG)
    fail_once(monkeypatch, LossBackward, "run", 0)
    with pytest.raises(torch.OutOfMemoryError):
        kernel.train_part(with_advantage(random_rows(4, 2, seed=3)))
    assert not kernel.give_back().is_kept


def a_rank(rank: int, store: Path, base: str, failing: int) -> None:
    """Two updates of two ranks, in the second of which one of them is short."""
    assignment = with_advantage(random_rows(4, 2, seed=3))
    shares = [np.arange(4), np.arange(4, 8)]
    mine = _share(assignment, shares[rank])
    weights: list[dict[str, torch.Tensor]] = []
    with gloo_world(store, rank, 2), pytest.MonkeyPatch.context() as monkeypatch:
        for is_short in (False, True):
            group = torch.distributed.group.WORLD
            session = FakeSession(5, "train_policy", rank=rank, world=2, group=group)
            kernel = opened(base, PG, epochs=2, session=session)
            if is_short and rank == failing:
                fail_once(monkeypatch, LossBackward, "run", 1)
            metrics, updates = step_with_shorts(kernel, mine)
            assert metrics["optim/updates"] == 2
            assert updates == ([1] if is_short else [])
            weights.append(weights_of(kernel))
    assert distance(*weights) == 0


def _share(assignment: Assignment, mine: np.ndarray) -> Assignment:
    inputs = {name: batch.take(mine) for name, batch in assignment.inputs.items()}
    return Assignment(
        sequence=1, step=1, keys=assignment.keys.take(mine), inputs=inputs, mine=mine, total=8
    )


@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_give_up_an_update_together(base: str, tmp_path: Path, failing: int) -> None:
    """Neither waits for ever, and no update is made twice."""
    as_ranks(2, a_rank, tmp_path / "store", base, failing, limit=60.0)


def a_split_rank(rank: int, store: Path, base: str) -> None:
    """Layers are computed again of a module that is split already."""
    assignment = with_advantage(random_rows(4, 2, seed=3))
    mine = _share(assignment, [np.arange(4), np.arange(4, 8)][rank])
    weights: list[dict[str, torch.Tensor]] = []
    with gloo_world(store, rank, 2):
        for recompute in ("none", "layers"):
            group = torch.distributed.group.WORLD
            session = FakeSession(5, "train_policy", rank=rank, world=2, group=group)
            kernel = opened(base, PG, shard=True, session=session)
            kernel.limit(MemoryLimits(slots=256, tokens=30, recompute=recompute))
            kernel.step(mine)
            weights.append(weights_of(kernel))
    assert distance(*weights) == 0 if rank == 0 else not any(weights)


def test_split_weights_take_lower_limits(base: str, tmp_path: Path) -> None:
    as_ranks(2, a_split_rank, tmp_path / "store", base, limit=60.0)


def rows_of(kernel: Any, chunk: Any) -> dict[tuple[int, int, int], Any]:
    """What a kernel says of each row."""
    rows: dict[tuple[int, int, int], Any] = {}
    for batch in kernel.run(chunk):
        rows |= dict(zip(batch.keys.rows(), batch.records.to_pylist(), strict=True))
    return rows


Make = Callable[[str], tuple[Any, Any]]


def generating(base: str) -> tuple[Any, Any]:
    prompts = ["a", "bcd", "efghi"]
    kernel = open_kernel(TorchGenerate(), base, n=2, max_tokens=5, returns=("completion_ids",))
    return kernel, prompt_chunk(prompts)


def passing(base: str) -> tuple[Any, Any]:
    return open_kernel(TorchLogprobs(), base, node="reference"), rows_chunk(random_rows(4, 2))


@pytest.mark.parametrize(
    ("make", "owner", "name"),
    [(generating, Decoder, "_advance"), (passing, forward, "predictions")],
    ids=["generate", "logprobs"],
)
def test_a_chunk_that_was_short_runs_again_with_less(
    base: str, monkeypatch: pytest.MonkeyPatch, make: Make, owner: Any, name: str
) -> None:
    kernel, chunk = make(base)
    wanted = rows_of(kernel, chunk)
    fail_once(monkeypatch, owner, name, 0)
    with pytest.raises(torch.OutOfMemoryError):
        rows_of(kernel, chunk)
    need = kernel.give_back()
    assert need.is_kept
    assert need.is_divisible
    assert need.rows > 1
    assert need.key in wanted
    kernel.limit(MemoryLimits(slots=1, tokens=8))
    rows = rows_of(kernel, chunk)
    assert rows.keys() == wanted.keys()
    for key, columns in wanted.items():
        for column, numbers in columns.items():
            np.testing.assert_allclose(rows[key][column], numbers, atol=1e-4)


@pytest.mark.parametrize(
    ("error", "is_short"),
    [
        (OUT, True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (KernelError("a reward wrote: out of memory"), False),
        (ShortOfMemory("another rank"), True),
    ],
)
def test_which_errors_say_that_memory_ran_out(error: Exception, is_short: bool) -> None:
    assert is_out_of_memory(error) == is_short
