"""Activations of a training pass, counted tensor by tensor, against what a plan says of them."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dataflow.adapters import lora, subset
from dataflow.kernel import Layout, Recompute
from dataflow.model import Model
from engine.plan.cost import memory, training_memory
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import Work
from engine.plan.cost.models import cost_of_model, model_cost
from engine.plan.cost.running_parts import RunningKernel, running_parts
from operators.kernels.torch import offload
from operators.kernels.torch.train import TorchTrain
from tests.kit.models import save_tiny
from tests.kit.rows import rollout
from tests.kit.side_modules import READER, WIDTH
from tests.kit.training import PG, opened, with_advantage

LAYERS, ROWS, PROMPT, ANSWER = 24, 128, 8, 24
"""4,096 tokens. Rows are short: what a pass says of who sees whom is no activation."""


class AliveBytes(TorchDispatchMode):
    """Counts the memory of all tensors that come to be inside it: now, and at most. `known` tensors
    do not count.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._storages: Any = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        self.most = max(self.most, self.now)
        return output

    def _count(self, storage: Any) -> None:
        if storage not in self._storages:
            self._storages.add(storage)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._forget, storage.nbytes())

    def _forget(self, size: int) -> None:
        self.now -= size


class SavedBytes:
    """Counts what autograd keeps of a forward pass, by torch's own hooks; no parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.sizes: dict[int, int] = {}
        self._parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor


def count_bytes(base: str, **layout: Any) -> tuple[int, int]:
    """The bytes that a micro-batch's forward pass keeps, and the most that are there in it and its
    backward pass.
    """
    kernel: TorchTrain = opened(base, PG, **layout)
    saved = SavedBytes(kernel._module)
    known: list[Tensor] = []
    for parameter in kernel._module.parameters():
        parameter.grad = torch.zeros_like(parameter)
        known += [parameter, parameter.grad]
    alive = AliveBytes(known)
    backward = kernel._loop.backward
    run, ask = backward.run, backward._ask

    def run_counted(*arguments: Any) -> None:
        with alive:
            run(*arguments)

    def ask_counted(*arguments: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            return ask(*arguments)

    vars(backward).update(run=run_counted, _ask=ask_counted)
    rng = np.random.default_rng(0)
    prompts, answers = (
        [rng.integers(0, 90, length).tolist() for _ in range(ROWS)] for length in (PROMPT, ANSWER)
    )
    metrics = kernel.step(with_advantage(rollout(np.arange(ROWS), prompts, answers)))
    assert metrics["train/micro_batches"] == 1.0
    return sum(saved.sizes.values()), alive.most


def estimate_parts(model: Model, recompute: Recompute = "none") -> tuple[dict[str, int], Work]:
    """What a plan says of the rows of `count_bytes`, in bytes by part; and these rows."""
    cost = cost_of_model(model)
    kernel = RunningKernel(
        kind="train",
        layout=Layout(recompute=recompute),
        dtype="float32",
        passed_layers=cost.passed_layers,
        read_layers=cost.read_layers,
        narrow=cost.narrow,
    )
    lengths = Lengths(prompt=PROMPT, completion=ANSWER)
    work = Work(lengths=lengths, prompts=ROWS, rows=ROWS)
    return running_parts(cost.version, cost.shape, (work,), kernel), work


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("deep")
    return save_tiny(folder, layers=LAYERS, hidden_size=32, intermediate_size=96)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_computed_again_keep_little_and_as_much_as_the_plan_says(
    deep: str, dtype: str
) -> None:
    kept, most = count_bytes(deep, dtype=dtype)
    kept_again, most_again = count_bytes(deep, dtype=dtype, recompute="layers")
    assert kept_again <= 0.15 * kept
    assert most_again <= 0.15 * most
    shape = model_cost(deep, "lm").shape
    assert shape is not None
    lengths = Lengths(prompt=PROMPT, completion=ANSWER)
    work = Work(lengths=lengths, prompts=ROWS, rows=ROWS)
    usual = memory.train_parts(1000, shape, work, dtype, "lm")
    again = training_memory.recompute_parts(usual, shape, work, dtype)
    estimates = [parts["activations"] + parts.get("logits", 0) for parts in (usual, again)]
    assert 1.0 <= estimates[1] / most_again <= 1.25
    assert 0.9 <= estimates[0] / most <= 1.25


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "layers"])
@pytest.mark.parametrize(("trainable", "share"), [(subset(last=4), 0.25), (True, 1.1)])
def test_a_part_of_a_model_keeps_as_much_as_the_plan_says(
    deep: str, recompute: Recompute, trainable: Any, share: float
) -> None:
    part: dict[str, Any] = {"trainable": trainable}
    if trainable is True:
        pytest.importorskip("peft")
        part["adapter"] = lora(rank=4)
    whole_kept, _ = count_bytes(deep)
    kept, most = count_bytes(deep, recompute=recompute, **part)
    assert kept <= share * whole_kept
    parts, _ = estimate_parts(Model("policy", deep, **part), recompute)
    estimate = parts["activations"] + parts.get("logits", 0)
    assert 0.9 <= estimate / most <= 1.25


@pytest.mark.long
def test_a_side_module_keeps_what_it_reads_and_as_much_as_the_plan_says(deep: str) -> None:
    whole_kept, _ = count_bytes(deep)
    kept, most = count_bytes(deep, adapter=READER)
    assert kept <= 0.2 * whole_kept
    parts, work = estimate_parts(Model("policy", deep, trainable=True, adapter=READER))
    # The user's own module keeps more: here two narrow tensors a layer.
    of_side = 2 * LAYERS * WIDTH * 4 * work.at_once
    estimate = parts["activations"] + parts.get("logits", 0) + of_side
    assert 0.9 <= estimate / most <= 1.25


def test_the_plan_counts_the_buckets_that_the_kernel_makes() -> None:
    assert training_memory.BUCKET == offload.BUCKET
