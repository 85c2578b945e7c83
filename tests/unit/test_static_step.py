"""The decode step at fixed places: the tokens of the step with shared keys, in powers of two of
rows and keys, with one copy a step and nothing that a CUDA graph could not hold.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dataflow.errors import KernelError
from dataflow.model import Model
from dataflow.randomness import uniform
from operators.kernels.decoding import Counts, Written
from operators.kernels.torch import device_sampling, static_step
from operators.kernels.torch.attention import ATTENTION
from operators.kernels.torch.decode import Decoder
from operators.kernels.torch.device_sampling import NUMBERS, draw_packed, draw_uniform, unpack_rows
from operators.kernels.torch.models import load_model
from operators.kernels.torch.sampling import Sampling, sample
from operators.kernels.torch.static_memory import (
    StaticMemory,
    find_static_memory,
    round_up,
    round_up_keys,
)
from operators.kernels.torch.static_rule import decodes_statically, find_capture_obstacle
from operators.kernels.torch.static_step import StaticStep
from tests.kit.architectures import tiny
from tests.kit.decode_tasks import CUT, PLAIN, make_task, random_prompts, require_same, written_by
from tests.kit.turns import example_count

KINDS = [
    "gemma2", "gemma3", "gpt2", "gpt_oss", "llama3", "mistral-window", "mixtral", "opt", "phi3",
    "qwen3_moe",
]  # fmt: skip
"""Architectures with each way of attention, positions and experts."""


@pytest.fixture(scope="module")
def module(base: str) -> PreTrainedModel:
    return load_model(Model("policy", base), "cpu")


@settings(max_examples=example_count(12), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    shared=st.sampled_from([0, 9]),
    n=st.integers(1, 5),
    slots=st.integers(1, 24),
    how=st.sampled_from([PLAIN, CUT, Sampling(temperature=0.0)]),
    renewals=st.integers(0, 2),
)
def test_the_tokens_are_those_of_the_step_with_shared_keys(
    module: PreTrainedModel,
    lengths: list[int],
    shared: int,
    n: int,
    slots: int,
    how: Sampling,
    renewals: int,
) -> None:
    prompts = random_prompts(lengths, shared)
    task = make_task(prompts, n=n, slots=slots, how=how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static_step, "FEWEST_ROWS", 1)
        patch.setattr(static_step, "FEWEST_KEYS", 4)
        static = Decoder(module, task, static=StaticMemory(module))
        require_same(written_by(static, renewals), written_by(Decoder(module, task), renewals))


def test_chunks_of_one_memory_are_those_of_fresh_ones(module: PreTrainedModel) -> None:
    memory = StaticMemory(module)
    tasks = [
        make_task(random_prompts([3, 30, 4], 0), n=3, max_tokens=40),
        make_task(random_prompts([60, 2], 0), n=2),
        make_task(random_prompts([5] * 9, 0), n=4),
    ]
    for task in tasks:
        fresh = Decoder(module, task, static=StaticMemory(module))
        require_same(written_by(Decoder(module, task, static=memory)), written_by(fresh))
    assert (memory.keys.slots, memory.keys.length) == (64, 96)
    given_up: Any = Decoder(module, tasks[0], static=memory).write_rows()
    next(given_up)
    given_up.close()
    require_same(
        written_by(Decoder(module, tasks[1], static=memory)),
        written_by(Decoder(module, tasks[1], static=StaticMemory(module))),
    )


def test_rows_move_together_with_the_keys_of_their_prompts(
    module: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most rows end with their first token, before any step."""
    monkeypatch.setattr(static_step, "FEWEST_ROWS", 1)
    monkeypatch.setattr(static_step, "FEWEST_KEYS", 4)
    task = replace(make_task(random_prompts([40, 33], 0), n=16), ends=np.arange(80))
    written = written_by(Decoder(module, task, static=StaticMemory(module)))
    require_same(written, written_by(Decoder(module, task)))
    assert (written.length == 1).sum() > 16
    assert written.length.max() > 1


class NotedSteps:
    """In place of CapturedSteps: notes what is run."""

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self.cleared = 0

    def run(self, key: Any, compute: Any, state: Tensor) -> None:
        self.keys.append(key)
        compute()

    def clear(self) -> None:
        self.cleared += 1


def test_rows_and_keys_go_through_few_sizes_with_one_copy_a_step(
    module: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_step, "FEWEST_ROWS", 2)
    monkeypatch.setattr(static_step, "FEWEST_KEYS", 8)
    memory = StaticMemory(module)
    memory.steps = steps = NotedSteps()  # type: ignore[assignment]
    task = make_task(random_prompts([3] * 20, 0), max_tokens=60)
    decoder = Decoder(module, task, static=memory)
    written = written_by(decoder)
    require_same(written, written_by(Decoder(module, task)))
    sizes = [key[:2] for key in steps.keys]
    assert {rows for rows, _ in sizes} == {32, 16, 8, 4, 2}
    longest = 3 + int(written.length.max()) - 1
    assert {keys for _, keys in sizes} == {8, 12, 16, 24, 32, 48} | {round_up_keys(longest, 8)}
    assert sizes == sorted(sizes, key=lambda size: (-size[0], size[1]))
    assert memory.copies.started == len(steps.keys) + 1, "first tokens, then each step"
    counts = decoder.counts
    assert counts.rows == written.length.sum() - 20
    # A step that was started for rows of which none was left is not read.
    assert 0 <= sum(rows for rows, _ in sizes) - (counts.rows + counts.padded) <= 2
    # Keys grew from 8: graphs that knew the former ones went first.
    assert steps.cleared >= 5


def test_graphs_go_when_weights_have_moved(module: PreTrainedModel, base: str) -> None:
    other = load_model(Model("policy", base), "cpu")
    memory = StaticMemory(other)
    memory.open(8, 64)
    memory.steps = steps = NotedSteps()  # type: ignore[assignment]
    memory.open(8, 64)
    assert steps.cleared == 0
    weight: Any = other.get_input_embeddings().weight
    weight.data = weight.data.clone()
    memory.open(8, 64)
    assert steps.cleared == 1
    memory.release()
    assert (steps.cleared, memory.keys.slots, memory.state.shape[1]) == (2, 0, 0)


def test_rows_without_numbers_are_an_error_and_leave_no_keys(base: str) -> None:
    module = load_model(Model("policy", base), "cpu")
    memory = StaticMemory(module)
    task = make_task(random_prompts([4, 4], 0))
    rows = Decoder(module, task, static=memory).write_rows()
    next(rows)
    weight: Any = module.get_input_embeddings().weight
    with torch.no_grad():
        weight.fill_(torch.nan)
    with pytest.raises(KernelError, match="expected finite logits"):
        list(rows)
    assert memory.keys.levels == {}


@settings(max_examples=example_count(100))
@given(st.integers(1, 5000), st.sampled_from([1, 8, 64]))
def test_sizes_hold_what_they_must_and_not_much_more(count: int, fewest: int) -> None:
    rows, keys = round_up(count, fewest), round_up_keys(count, fewest)
    assert rows >= keys >= max(count, fewest)
    assert rows < 2 * max(count, fewest)
    assert keys <= 1.5 * max(count, fewest)


def test_draws_on_the_device_are_those_of_the_host_to_the_bit() -> None:
    seeds = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    indices = np.arange(1000)
    on_device = draw_uniform(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(indices))
    assert (on_device.numpy() == uniform(seeds, indices)).all()


@pytest.mark.parametrize("how", [PLAIN, CUT, Sampling(), Sampling(temperature=0.0)], ids=str)
@pytest.mark.parametrize("vocabulary", [98, 1024, 3000])
def test_tokens_from_parts_of_the_vocabulary_are_those_from_the_whole(
    how: Sampling, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_sampling, "BLOCK", vocabulary * 100)
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(250, vocabulary, generator=generator)
    draws = torch.rand(250, dtype=torch.float64, generator=generator)
    draws[:2] = torch.tensor([0.0, 1.0 - 2.0**-53])
    packed = torch.zeros(NUMBERS, 250, dtype=torch.int32)
    tokens = draw_packed(logits, draws, how, packed)
    drawn = unpack_rows(packed.numpy(), np.arange(250), truncates=how.truncates)
    expected = sample(logits, draws, how)
    assert tokens.tolist() == drawn.tokens.tolist() == expected.tokens.tolist()
    assert (drawn.logprobs == expected.logprobs.numpy()).all()
    if drawn.mass is not None and expected.mass is not None:
        np.testing.assert_allclose(drawn.mass, expected.mass, atol=1e-6)


@pytest.mark.parametrize("how", [PLAIN, CUT, Sampling(temperature=0.0)], ids=str)
def test_rows_that_are_no_numbers_get_a_flag_and_a_token_that_exists(how: Sampling) -> None:
    logits = torch.zeros(3, 2000)
    logits[1, 7], logits[2, 3] = torch.nan, torch.inf
    packed = torch.zeros(NUMBERS, 3, dtype=torch.int32)
    tokens = draw_packed(logits, torch.full((3,), 0.999).double(), how, packed)
    assert packed[3].tolist() == [0, 1, 1]
    assert int(tokens.max()) < 2000


class HostWork(TorchFunctionMode):
    """Refuses calls that copy numbers of the host to a device. The meta device, on which this is
    used, has no numbers, so that whatever reads one fails there by itself.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name == "where":
            assert all(isinstance(x, Tensor) for x in args), "where copies a number"
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(x, list | np.ndarray) for x in index), "a list is copied"
        out = function(*args, **(kwargs or {}))
        if name in ("to", "cuda", "copy_", "tensor", "as_tensor", "from_numpy"):
            sources = [x for x in args if isinstance(x, Tensor)] or [torch.zeros(())]
            assert {x.device.type for x in sources} == {out.device.type}, f"{name} copies"
        return out


@pytest.mark.parametrize("name", KINDS)
def test_a_step_neither_waits_for_the_device_nor_copies_to_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device; what only a card can refuse is left to the tests marked gpu."""
    folder = tiny(name, tmp_path, tied=False)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder),
            attn_implementation=ATTENTION,
            dtype=torch.bfloat16,
        ).eval()
    # transformers leaves this out while a graph is captured; here it would read a token.
    monkeypatch.setattr(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None)
    for how in (PLAIN, CUT, Sampling(temperature=0.0)):
        task = make_task(random_prompts([4, 9], 0), how=how)
        step = StaticStep(
            module, task, Written.empty(2, limit=task.max_tokens), Counts(), StaticMemory(module)
        )
        with torch.inference_mode():
            step._prefill(np.arange(2), np.arange(2), np.arange(2))
            with HostWork():
                step._compute(8, 64)
    assert find_capture_obstacle(module) is None


def test_what_no_graph_holds_is_named(tmp_path: Path, module: PreTrainedModel) -> None:
    assert find_capture_obstacle(module) is None
    assert not decodes_statically(module), "on a CPU nothing is captured"
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    moved = load_model(
        Model("policy", str(tiny("llama3", tmp_path / "a", rope_parameters=dynamic))), "cpu"
    )
    assert "'dynamic'" in (find_capture_obstacle(moved) or "")
    experts = load_model(Model("policy", str(tiny("mixtral", tmp_path / "b"))), "cpu")
    experts.set_experts_implementation("eager")
    assert "'eager'" in (find_capture_obstacle(experts) or "")


def test_kernels_of_a_module_share_its_memory_which_goes_with_it(base: str) -> None:
    module = load_model(Model("policy", base), "cpu")
    memory = find_static_memory(module)
    assert find_static_memory(module) is memory
    remaining = weakref.ref(memory)
    del memory, module
    assert remaining() is None
