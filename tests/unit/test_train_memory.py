"""Training that fits: layers computed again and state on the host change no bit, and keep less."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataflow.errors import KernelError
from operators.kernels.torch.offload import HostTensors, cut_buckets
from operators.kernels.torch.recompute import recompute_layers
from operators.kernels.torch.train import TorchTrain
from tests.kit.models import save_tiny
from tests.kit.rows import random_rows
from tests.kit.train_ranks import GRPO
from tests.kit.training import distance, opened, weights_of, with_advantage

LAYOUTS: dict[str, dict[str, Any]] = {
    "layers": {"recompute": "layers"},
    "optimizer": {"offload": "optimizer"},
    "both": {"recompute": "layers", "offload": "optimizer"},
}
Trained = tuple[list[dict[str, float]], dict[str, Tensor], dict[str, Any]]
"""Metrics of Steps, weights after them, and the optimizer's state."""


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets, as in a Model of a usable size."""
    monkeypatch.setattr("operators.kernels.torch.optimizer.BUCKET", 3000)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, small_buckets: None) -> None:
    """A CPU as if it had memory of its own: state is copied, and its memory given back."""
    monkeypatch.setattr("operators.kernels.torch.optimizer.has_own_memory", lambda device: True)


def take_steps(kernel: TorchTrain, steps: tuple[int, ...] = (1, 2)) -> Trained:
    metrics: list[dict[str, float]] = []
    for step in steps:
        rows = random_rows(6, 3, seed=step)
        assignment = with_advantage(rows, step, "clipped_policy_loss", seed=step)
        metrics.append(dict(kernel.step(assignment)))
    return metrics, weights_of(kernel), kernel._optimizer.state(steps[-1])


def open_several(base: str, dtype: str, **layout: Any) -> TorchTrain:
    """A kernel whose Steps have two epochs, two minibatches and several micro-batches."""
    return opened(base, GRPO, dtype=dtype, epochs=2, minibatches=2, tokens=24, **layout)


def assert_same_bits(one: Trained, other: Trained) -> None:
    assert one[0] == other[0]
    assert one[0][0]["train/micro_batches"] > 4
    assert distance(one[1], other[1]) == 0.0
    assert_same_state(one[2], other[2])


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (one["names"], one["step"]) == (other["names"], other["step"])
    assert one["adam"]["param_groups"] == other["adam"]["param_groups"]
    states, other_states = one["adam"]["state"], other["adam"]["state"]
    assert states.keys() == other_states.keys()
    for index, moments in states.items():
        for name, tensor in moments.items():
            assert torch.equal(tensor, other_states[index][name]), name
    for copy, other_copy in zip(one["copies"], other["copies"], strict=True):
        assert torch.equal(copy, other_copy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_bit_differs(base: str, dtype: str, name: str, apart: None) -> None:
    usual = take_steps(open_several(base, dtype))
    assert_same_bits(take_steps(open_several(base, dtype, **LAYOUTS[name])), usual)


def test_where_the_device_is_the_host_no_state_is_copied(base: str, small_buckets: None) -> None:
    kernel = open_several(base, "bfloat16", offload="optimizer")
    assert_same_bits(take_steps(kernel), take_steps(open_several(base, "bfloat16")))
    assert len(kernel._optimizer._buckets) > 3
    assert all(master.host is None for master in kernel._optimizer._all_masters)


def count_waiting(kernel: TorchTrain) -> int:
    """Count the numbers that wait; none of them has memory on the device."""
    count = 0
    for bucket in kernel._optimizer._buckets:
        for _, _, tensor in bucket._list_waiting():
            assert tensor.untyped_storage().nbytes() == 0
            count += tensor.numel()
    return count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_waits_has_no_memory_on_the_device(base: str, dtype: str, apart: None) -> None:
    new = open_several(base, dtype, offload="optimizer")
    kernel = open_several(base, dtype, offload="optimizer")
    take_steps(kernel, (1,))
    sizes = [master.numel() for master in kernel._optimizer.masters]
    copies = sum(sizes) if dtype == "bfloat16" else 0
    assert count_waiting(new) == copies
    assert count_waiting(kernel) == 2 * sum(sizes) + copies


@pytest.mark.parametrize(("before", "after", "dtype"), [
    ("optimizer", "none", "bfloat16"),
    ("none", "optimizer", "bfloat16"),
    ("optimizer", "none", "float32"),
])  # fmt: skip
def test_saved_state_is_that_of_both_layouts(
    base: str, tmp_path: Path, before: str, after: str, dtype: str, apart: None
) -> None:
    usual = open_several(base, dtype)
    take_steps(usual)
    first = open_several(base, dtype, offload=before)
    take_steps(first)
    first.save(tmp_path / "saved")
    second = open_several(base, dtype, offload=after)
    second.restore(tmp_path / "saved")
    saved = torch.load(tmp_path / "saved" / "optimizer.pt", weights_only=True)
    assert_same_state(saved, usual._optimizer.state(2))
    assert_same_bits(take_steps(second, (3,)), take_steps(usual, (3,)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_nap_changes_nothing_of_what_waits(base: str, dtype: str, apart: None) -> None:
    kernel = open_several(base, dtype, **LAYOUTS["both"])
    take_steps(kernel)
    kernel.sleep()
    kernel.wake()
    usual = open_several(base, dtype)
    take_steps(usual)
    assert_same_bits(take_steps(kernel, (3,)), take_steps(usual, (3,)))


def test_a_transposed_tensor_comes_back_as_it_was() -> None:
    tensor = torch.arange(12.0).view(3, 4).T
    before = tensor.clone()
    host = HostTensors(tensor, 2)
    host.park(1, tensor)
    assert torch.equal(host.view(1), before)
    host.fetch(1, tensor)
    assert torch.equal(tensor, before)


@pytest.mark.parametrize(("sizes", "cuts"), [
    ([], []),
    ([3, 3, 3], [[0, 1], [2]]),
    ([9, 1, 9], [[0], [1], [2]]),
    ([6, 1], [[0], [1]]),
    ([0, 0], [[0, 1]]),
])  # fmt: skip
def test_buckets_have_so_many_weights_at_most(sizes: list[int], cuts: list[list[int]]) -> None:
    assert [list(cut) for cut in cut_buckets(sizes, 6)] == cuts


# --- what is computed again --------------------------------------------------------------------


class AdapterLinear(nn.Linear):
    """A linear part that computes by the attribute that says which adapter is active."""

    _active_adapter = 1.0
    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input * self._active_adapter).tanh()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = AdapterLinear(4, 4)

    def forward(self, states: Tensor, *, attention_pass: float) -> Tensor:
        return states + self.inner(self.inner(states) * attention_pass)


class Backbone(nn.Module):
    _no_split_modules = ["Layer"]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, states: Tensor, attention_pass: float) -> Tensor:
        for layer in self.layers:
            states = layer(states, attention_pass=attention_pass)
        return states

    def switch(self, scale: float) -> None:
        """Make another adapter active."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.inner._active_adapter = scale


def share_weights() -> tuple[Backbone, Backbone]:
    """Two modules with the same weights."""
    torch.manual_seed(0)
    one, other = Backbone(), Backbone()
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        theirs.data = mine.data
    return one, other


def gradients_of(run: Callable[[Backbone, Backbone], Tensor], recompute: bool) -> list[Tensor]:
    one, other = share_weights()
    if recompute:
        recompute_layers(one)
        recompute_layers(other)
    run(one, other).backward()
    return [p.grad for m in (one, other) for p in m.parameters() if p.grad is not None]


def call_both(one: Backbone, other: Backbone) -> Tensor:
    """Two modules and two passes, both forward before any backward."""
    states = torch.linspace(-1.0, 1.0, 12).view(3, 4)
    first = one(states, 0.5)
    return (first * other(states * 2.0, 3.0)).sum()


def switch_between(one: Backbone, _: Backbone) -> Tensor:
    """One module called for two adapters, and left with a third."""
    states = torch.linspace(-1.0, 1.0, 12).view(3, 4)
    one.switch(0.25)
    first = one(states, 1.0)
    one.switch(2.0)
    second = one(states, 1.0)
    one.switch(7.0)
    return (first * second).sum()


@pytest.mark.parametrize("run", [call_both, switch_between])
def test_a_pass_computed_again_has_its_own_state(run: Callable[..., Tensor]) -> None:
    usual, again = gradients_of(run, False), gradients_of(run, True)
    assert len(usual) == len(again) > 0
    for expected, gradient in zip(usual, again, strict=True):
        assert torch.equal(expected, gradient)


def test_the_state_between_is_as_it_was_left() -> None:
    module = Backbone()
    recompute_layers(module)
    module.switch(0.5)
    total = module(torch.ones(3, 4), 1.0).sum()
    module.switch(3.0)
    total.backward()
    assert [layer.inner._active_adapter for layer in module.layers] == [3.0, 3.0]  # type: ignore[union-attr]


def test_each_layer_is_computed_again_once_and_only_for_a_backward_pass() -> None:
    module = Backbone()
    recompute_layers(module)
    recompute_layers(module)  # by a second node that shares it
    states = torch.ones(3, 4)
    with torch.no_grad():
        module(states, 1.0)
    with torch.inference_mode():
        module(states, 1.0)
    first = module.layers[0].inner
    assert isinstance(first, AdapterLinear)
    assert first.calls == 4
    module(states, 1.0).sum().backward()
    assert first.calls == 8


def test_what_replaced_a_forward_before_is_computed_again() -> None:
    """As compiled layers do."""
    module = Backbone()
    first = module.layers[0]
    usual, calls = first.forward, []

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return usual(*args, **kwargs)

    first.forward = forward
    recompute_layers(module)
    module(torch.ones(3, 4), 1.0).sum().backward()
    assert len(calls) == 2


needs_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_a_card
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["optimizer", "both"])
def test_on_a_gpu_state_waits_in_pinned_memory(
    base: str, dtype: str, name: str, tmp_path: Path, small_buckets: None
) -> None:
    usual, kernel = open_several(base, dtype), open_several(base, dtype, **LAYOUTS[name])
    take_steps(usual)
    metrics, _, _ = take_steps(kernel)
    assert [each["optim/changed"] > 0.9 for each in metrics] == [True, True]
    assert count_waiting(kernel) > 0
    hosts = [master.host for master in kernel._optimizer._all_masters]
    assert all(host is not None and host.view(0).is_pinned() for host in hosts)
    kernel.sleep()
    kernel.wake()
    # Sums on a GPU have no fixed order, so bits of two runs may differ; 8 updates of 1e-3 each.
    assert distance(weights_of(kernel), weights_of(usual)) < 2e-2
    kernel.save(tmp_path / "saved")
    other = open_several(base, dtype)
    other.restore(tmp_path / "saved")
    assert_same_moments(other._optimizer.state(2), kernel._optimizer.state(2))


def assert_same_moments(one: dict[str, Any], other: dict[str, Any]) -> None:
    for index, moments in one["adam"]["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(tensor.cpu(), other["adam"]["state"][index][name].cpu()), name
    for copy, other_copy in zip(one["copies"], other["copies"], strict=True):
        assert torch.equal(copy.cpu(), other_copy.cpu())


@pytest.mark.gpu
@needs_a_card
def test_on_a_gpu_a_step_leaves_no_state_there(tmp_path: Path) -> None:
    wide = save_tiny(tmp_path / "wide", hidden_size=512, intermediate_size=1024)

    def count_held(**layout: Any) -> int:
        gc.collect()
        kernel = open_several(wide, "bfloat16", **layout)
        take_steps(kernel, (1,))
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        kernel.close()
        return held

    weights = sum(weight.numel() for weight in weights_of(open_several(wide, "bfloat16")).values())
    assert count_held(offload="optimizer") < count_held() - 11 * weights


def test_a_module_without_layers_is_refused() -> None:
    with pytest.raises(KernelError, match=r"Linear: expected decoder layers .* Fix: recompute"):
        recompute_layers(nn.Linear(2, 2))
