"""CUDA graphs of decode steps: on a CPU which are kept and what a failure does, on a card that they
compute what single operations do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.model import Model
from operators.kernels.torch import captured_steps, static_step
from operators.kernels.torch.captured_steps import CapturedSteps
from operators.kernels.torch.decode import Decoder
from operators.kernels.torch.flash_decode import computes_by_length
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.models import load_model
from operators.kernels.torch.sampling import Sampling
from operators.kernels.torch.static_memory import StaticMemory
from tests.kit.decode_tasks import make_task, random_prompts, require_same, written_by
from tests.kit.generate_suite import MIXED, PREFIXED, generated, tokens_of
from tests.kit.kernels import open_kernel

STATE = torch.zeros(1)


class NotedGraph:
    """In place of a CUDAGraph."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self.replay = compute
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1


def make_steps(monkeypatch: pytest.MonkeyPatch, capture: Callable[..., Any]) -> CapturedSteps:
    """Steps that would capture, on a machine without a device."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    steps = CapturedSteps(torch.device("cuda"), "a model")
    monkeypatch.setattr(steps, "_capture", capture)
    return steps


def test_each_step_is_captured_once_and_the_longest_unused_graph_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured_steps, "MOST_GRAPHS", 2)
    graphs: list[NotedGraph] = []

    def capture(compute: Callable[[], None], _: torch.Tensor) -> NotedGraph:
        graphs.append(NotedGraph(compute))
        return graphs[-1]

    steps, runs = make_steps(monkeypatch, capture), []
    for key in "aabacab":
        steps.run(key, lambda key=key: runs.append(key), STATE)
    assert "".join(runs) == "aabacab", "a capture alone computes nothing"
    assert [graph.resets for graph in graphs] == [0, 1, 1, 0], "b, then c, then b anew"
    steps.clear()
    assert [graph.resets for graph in graphs] == [1, 1, 1, 1]


def test_where_a_capture_fails_steps_run_by_themselves_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[str] = []

    def capture(*_: object) -> None:
        tries.append("once")
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    steps, runs = make_steps(monkeypatch, capture), []
    with caplog.at_level(logging.WARNING):
        for key in "ab":
            steps.run(key, lambda key=key: runs.append(key), STATE)
    assert (runs, tries) == (["a", "b"], ["once"])
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("a model: expected decode steps that a CUDA graph can hold, found")
    assert "operation not permitted when stream is capturing. Each" in message


def test_too_little_memory_is_no_reason_to_go_on_without_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def capture(*_: object) -> None:
        raise torch.OutOfMemoryError("none left")

    steps = make_steps(monkeypatch, capture)
    with pytest.raises(torch.OutOfMemoryError):
        steps.run("a", lambda: None, STATE)


on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_step, "FEWEST_ROWS", 2)
    monkeypatch.setattr(static_step, "FEWEST_KEYS", 16)


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", [Sampling(), Sampling(top_k=20, top_p=0.8)], ids=str)
def test_graphs_compute_what_single_operations_do(
    base: str, dtype: str, how: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_sizes(monkeypatch)
    module = load_model(Model("policy", base, dtype=dtype))  # type: ignore[arg-type]
    replayed, launched = StaticMemory(module), StaticMemory(module)
    launched.steps._fails = True
    task = make_task(random_prompts([3, 30, 9] * 6, 0), n=4, how=how, max_tokens=40)
    for renewals in (0, 3):
        one, other = (Decoder(module, task, static=each) for each in (replayed, launched))
        require_same(written_by(one, renewals), written_by(other, renewals))
    assert replayed.steps.captures > 3
    assert not replayed.steps._fails
    if dtype == "float32":
        decoder = Decoder(module, task, static=replayed)
        require_same(written_by(decoder), written_by(Decoder(module, task)))


@pytest.mark.gpu
@on_a_card
def test_attention_by_length_is_trusted_on_this_card() -> None:
    computes_by_length.cache_clear()
    assert computes_by_length(torch.device("cuda", 0), torch.bfloat16)


@pytest.mark.gpu
@on_a_card
def test_chunks_and_versions_reuse_graphs_and_a_sleep_gives_them_back(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_sizes(monkeypatch)
    kernel = open_kernel(TorchGenerate(), base, n=3, max_tokens=30)
    rows = tokens_of(generated(kernel, MIXED))
    static = kernel._static
    assert static is not None
    captures = static.steps.captures
    assert captures > 0
    with torch.no_grad():
        for weight in kernel._module.parameters():
            weight.mul_(1.0)  # in place, as a version is loaded
    kernel._version = 1
    assert tokens_of(generated(kernel, MIXED)) == rows
    assert static.steps.captures == captures
    generated(kernel, PREFIXED)
    keys = sum(level.keys.nbytes + level.values.nbytes for level in static.keys.levels.values())
    awake = torch.cuda.memory_allocated()
    kernel.sleep()
    assert torch.cuda.memory_allocated() <= awake - keys
    kernel.wake()
    assert tokens_of(generated(kernel, MIXED)) == rows
    assert static.steps.captures > captures


@pytest.mark.gpu
@on_a_card
def test_a_step_that_no_graph_holds_is_computed_with_one_warning(
    base: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = load_model(Model("policy", base))
    task = make_task(random_prompts([3, 5], 0), n=4)
    expected = written_by(Decoder(module, task, static=StaticMemory(module)))
    draw = static_step.draw_uniform

    def draw_and_wait(seeds: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        assert int(indices.max()) >= 0
        return draw(seeds, indices)

    monkeypatch.setattr(static_step, "draw_uniform", draw_and_wait)
    memory = StaticMemory(module)
    require_same(written_by(Decoder(module, task, static=memory)), expected)
    assert len(caplog.records) == 1
    assert memory.steps.captures == 0
    torch.cuda.synchronize()
    assert np.isfinite(torch.randn(8, device="cuda").cpu().numpy()).all(), "the device goes on"
