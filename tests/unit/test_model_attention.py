"""Attention of each kind of architecture: packed, shared and cached, it says what transformers says
of each row alone with its own eager attention. docs/models.md says it of all architectures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dataflow.batch import Ragged
from dataflow.model import Model
from operators.kernels.decoding import DecodeTask
from operators.kernels.torch import heads, static_step
from operators.kernels.torch.decode import Decoder
from operators.kernels.torch.decoder_layers import find_decoder_layers
from operators.kernels.torch.heads import predictions
from operators.kernels.torch.models import load_model
from operators.kernels.torch.packing import Packed, pack
from operators.kernels.torch.recompute import recompute_layers
from operators.kernels.torch.sampling import Sampling
from operators.kernels.torch.static_memory import StaticMemory
from tests.kit import architecture_ranks
from tests.kit.architectures import WINDOW, tiny
from tests.kit.rows import plain, ragged
from tests.kit.training import as_ranks

KINDS = [
    "gemma2", "gemma3", "gpt2", "gpt_neox", "gpt_oss", "llama3", "mistral-window", "olmo2", "opt",
    "phi", "phi3", "qwen2-window", "qwen3_moe",
]  # fmt: skip
"""One architecture of each kind."""

Modules = tuple[Any, nn.Module]
"""A tiny model as ours, and as transformers runs it."""


def loaded(folder: Path) -> Any:
    return load_model(Model("policy", str(folder)), "cpu")


@pytest.fixture(scope="module", params=KINDS)
def modules(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Modules:
    folder = tiny(request.param, tmp_path_factory.mktemp(request.param), tied=False)
    return loaded(folder), plain(str(folder))


def rows_of_groups() -> tuple[Ragged, Ragged]:
    """Two prompts of several lengths that begin alike and are longer than a window, one that is
    shorter, each with several answers, of which some begin alike.
    """
    draw = np.random.default_rng(0)
    alike = draw.integers(0, 95, 2 * WINDOW).tolist()
    prompts, answers = [], []
    for beginning, more in ((alike, 3), (alike, 7), ([], 3)):
        prompt = beginning + draw.integers(0, 95, more).tolist()
        base = draw.integers(0, 95, 3 * WINDOW).tolist()
        for length in (1, 4, 11, 15):
            prompts.append(prompt)
            answers.append(
                base[: length // 2] + draw.integers(0, 95, length - length // 2).tolist()
            )
    return ragged(prompts), ragged(answers)


def logprobs_alone(
    module: nn.Module, prompts: Ragged, answers: Ragged, temperature: float = 1.0
) -> Tensor:
    """Of all answers, one after another, each row by itself, with gradient."""
    found = []
    for row in range(len(prompts)):
        prompt, answer = (torch.from_numpy(of[row].astype(np.int64)) for of in (prompts, answers))
        logits = module(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        found.append((logits / temperature).log_softmax(-1).gather(1, answer[:, None])[:, 0])
    return torch.cat(found)


def packed_rows(prompts: Ragged, answers: Ragged) -> tuple[Packed, Tensor]:
    packed = pack(prompts, answers, np.arange(len(prompts)))
    return packed, torch.from_numpy(answers.values.astype(np.int64)[packed.tokens])


def require_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_packed_rows_have_the_logprobs_and_gradients_of_rows_alone(
    modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, reference = modules
    prompts, answers = rows_of_groups()
    packed, written = packed_rows(prompts, answers)
    found = predictions(module, packed, written).logprobs
    wanted = logprobs_alone(reference, prompts, answers)[torch.from_numpy(packed.tokens)]
    require_close(found, wanted)
    weights = torch.linspace(-1.0, 1.0, len(found)) / len(found)
    for said in (found, wanted):
        (said * weights).sum().backward()
    others = dict(reference.named_parameters())
    for weight, parameter in module.named_parameters():
        ours, theirs = (
            torch.zeros_like(p) if p.grad is None else p.grad for p in (parameter, others[weight])
        )
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4), weight
    monkeypatch.setattr(heads, "CHUNK", 98 * 7)
    with torch.no_grad():
        require_close(predictions(module, packed, written).logprobs, wanted)


@pytest.mark.long
@pytest.mark.parametrize("renewed", [False, True])
@pytest.mark.parametrize("first", [0, 4], ids=["all begin alike", "some begin alike"])
@pytest.mark.parametrize("static", [False, True], ids=["shared keys", "static keys"])
def test_generated_rows_have_the_logprobs_of_rows_alone(
    modules: Modules, first: int, renewed: bool, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """renewed: after each row that ends, all keys are computed again, as under new weights."""
    monkeypatch.setattr(static_step, "FEWEST_KEYS", 8)
    module, reference = modules
    rows, _ = rows_of_groups()
    prompts = ragged([rows[first].tolist(), rows[first + 4].tolist()])
    n, temperature = 4, 3.0
    task = DecodeTask(
        prompts=prompts,
        n=n,
        seeds=np.arange(len(prompts) * n, dtype=np.uint64),
        max_tokens=3 * WINDOW,
        how=Sampling(temperature=temperature),
        ends=np.zeros(0, np.int64),
        slots=5,
        budget=64,
        stopped=lambda rows: np.array([len(row) > 3 + 7 * row[0] % 12 for row in rows]),
        window=3 * WINDOW,
    )
    memory = StaticMemory(module) if static else None
    decoder = Decoder(module, task, static=memory)
    for _ in decoder.write_rows():
        if renewed:
            decoder.renew(1)
    written = decoder.written
    answers = ragged([written.tokens[r, :n].tolist() for r, n in enumerate(written.length)])
    each = ragged([prompts[r // n].tolist() for r in range(len(prompts) * n)])
    assert answers.lengths.max() > WINDOW
    assert len(set(answers.lengths)) > 2
    with torch.no_grad():
        wanted = logprobs_alone(reference, each, answers, temperature)
    found = np.concatenate([written.logprobs[r, : len(answers[r])] for r in range(len(answers))])
    require_close(torch.from_numpy(found), wanted)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_the_auxiliary_loss_of_a_router_is_no_part_of_the_loss(tmp_path: Path, name: str) -> None:
    prompts, answers = rows_of_groups()
    packed, written = packed_rows(prompts, answers)
    grads = []
    for asked in (False, True):
        coefficient = {"output_router_logits": asked, "router_aux_loss_coef": 100.0}
        module = loaded(tiny(name, tmp_path / str(asked), **coefficient))
        assert module.config.output_router_logits == asked
        predictions(module, packed, written).logprobs.mean().backward()
        grads.append([p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


REFUSED = {"gpt2", "gpt_oss", "olmo2", "opt", "phi3", "qwen3_moe"}
"""Architectures whose matrices cannot be split over tensor ranks."""


@pytest.mark.long
@pytest.mark.repeats
@pytest.mark.parametrize("name", KINDS)
def test_layers_that_are_computed_again_have_the_same_bits(tmp_path: Path, name: str) -> None:
    module = loaded(tiny(name, tmp_path))
    usual = architecture_ranks.numbers_of(module)
    for parameter in module.parameters():
        parameter.grad = None
    recompute_layers(module)
    again = architecture_ranks.numbers_of(module)
    assert len(find_decoder_layers(module)) == module.config.num_hidden_layers
    assert usual.keys() == again.keys()
    assert all(torch.equal(number, again[weight]) for weight, number in usual.items())


@pytest.mark.long
@pytest.mark.repeats
@pytest.mark.parametrize("way", ["tensor", "shard"])
def test_split_weights_give_the_numbers_of_whole_ones(tmp_path: Path, way: str) -> None:
    for name in KINDS:
        tiny(name, tmp_path / name, tied=False)
    as_ranks(2, architecture_ranks.main, tmp_path, KINDS, way, limit=300.0)
    for rank in range(2):
        differences = json.loads((tmp_path / f"{way} {rank}.json").read_text())
        refused = {name: said for name, said in differences.items() if isinstance(said, str)}
        assert refused.keys() == (REFUSED if way == "tensor" else set())
        for said in refused.values():
            assert "node: expected transformers" in said
            assert "tensor-parallel plan" in said
        assert max(differences[name] for name in KINDS if name not in refused) < 1e-5
