"""Attention of each architecture: packed, shared and cached, it says what transformers says of each
row alone with its own eager attention.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dataflow.batch import Ragged
from dataflow.model import Model
from operators.kernels.decoding import DecodeTask
from operators.kernels.torch import heads
from operators.kernels.torch.attention import hidden
from operators.kernels.torch.decode import Decoder
from operators.kernels.torch.heads import predictions
from operators.kernels.torch.models import load_model
from operators.kernels.torch.packing import Packed, pack
from operators.kernels.torch.sampling import Sampling
from operators.kernels.torch.shared_attention import TreePass
from tests.kit import architecture_ranks
from tests.kit.architectures import ARCHITECTURES, WINDOW, tiny
from tests.kit.rows import ragged
from tests.kit.training import as_ranks
from tests.kit.turns import REPEATS

REFUSED = ("bloom", "falcon", "falcon-alibi", "stablelm")
"""Architectures that do not use transformers' attention interface."""

SHORT = {"llama-dynamic": {"max_position_embeddings": 64}} | {
    "phi3-longrope": {"original_max_position_embeddings": 64}
}
SUPPORTED = [name for name in ARCHITECTURES if name not in REFUSED]
USUAL = [
    "gemma2", "gemma3", "gpt2", "gpt_neox", "gpt_oss", "llama3", "mistral-window", "olmo2", "opt",
    "phi", "phi3", "qwen2-window", "qwen3_moe",
]  # fmt: skip
"""One of each kind; the long tests have all, those of tied embeddings in turn."""

EVERY = [
    pytest.param(name, tied, id=f"{name}-{'tied' if tied else 'untied'}", marks=marks)
    for name in SUPPORTED
    for tied in (True, False)
    for marks in [REPEATS if tied else () if name in USUAL else pytest.mark.long]
]

Made = Callable[[str, bool], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The folder of an architecture's tiny model, made once."""

    @cache
    def folder(name: str, tied: bool) -> Path:
        changes = SHORT.get(name, {})
        return tiny(name, tmp_path_factory.mktemp(name), tied=tied, **changes)

    return folder


def loaded(folder: Path) -> Any:
    return load_model(Model("policy", str(folder)), "cpu")


def eager(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def rows_of_groups(seed: int = 0) -> tuple[Ragged, Ragged]:
    """Two prompts of several lengths that begin alike and are longer than a window, one that is
    shorter, each with several answers, of which some begin alike.
    """
    draw = np.random.default_rng(seed)
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


def alone(module: nn.Module, prompts: Ragged, answers: Ragged) -> list[Tensor]:
    """For each row the logits [tokens, vocabulary] that predict its answer, each row by itself."""
    found = []
    for row in range(len(prompts)):
        ids = torch.from_numpy(np.concatenate([prompts[row], answers[row]]).astype(np.int64))
        found.append(module(ids[None]).logits[0, len(prompts[row]) - 1 : -1])
    return found


def logprobs_alone(
    module: nn.Module, prompts: Ragged, answers: Ragged, temperature: float = 1.0
) -> Tensor:
    """Of all answers, one after another, with gradient."""
    return torch.cat(
        [
            (logits / temperature)
            .log_softmax(-1)
            .gather(1, torch.from_numpy(answers[row].astype(np.int64))[:, None])
            for row, logits in enumerate(alone(module, prompts, answers))
        ]
    )[:, 0]


def packed_rows(prompts: Ragged, answers: Ragged) -> tuple[Packed, Tensor]:
    packed = pack(prompts, answers, np.arange(len(prompts)))
    return packed, torch.from_numpy(answers.values.astype(np.int64)[packed.tokens])


def require_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "tied"), EVERY)
def test_packed_rows_have_the_logprobs_and_gradients_of_rows_alone(
    made: Made, name: str, tied: bool
) -> None:
    module, reference = loaded(made(name, tied)), eager(made(name, tied))
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


@pytest.mark.parametrize(("name", "tied"), EVERY)
def test_generated_rows_have_the_logprobs_of_rows_alone(made: Made, name: str, tied: bool) -> None:
    folder = made(name, tied)
    module, reference = loaded(folder), eager(folder)
    for begin, end in ((0, 8), (4, 12)):  # with and without a beginning that all prompts share
        prompts = ragged([rows_of_groups()[0][row].tolist() for row in range(begin, end, 4)])
        for renewed in (False, True):
            require_generated(module, reference, prompts, renewed=renewed)


def require_generated(module: Any, reference: nn.Module, prompts: Ragged, *, renewed: bool) -> None:
    """renewed: after each row that ends, all keys are computed again, as under new weights."""
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
    decoder = Decoder(module, task)
    for _ in decoder.finished():
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


@pytest.mark.parametrize(("name", "tied"), EVERY)
def test_chunks_of_logits_and_hidden_states_are_those_of_rows_alone(
    made: Made, name: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, reference = loaded(made(name, tied)), eager(made(name, tied))
    prompts, answers = rows_of_groups(1)
    packed, written = packed_rows(prompts, answers)
    monkeypatch.setattr(heads, "CHUNK", 98 * 7)
    with torch.no_grad():
        found = predictions(module, packed, written).logprobs
        wanted = logprobs_alone(reference, prompts, answers)[torch.from_numpy(packed.tokens)]
        require_close(found, wanted)
        ids, positions = (torch.from_numpy(x) for x in (packed.ids, packed.positions))
        states = hidden(module, ids, positions, TreePass(packed))
        row = np.concatenate([prompts[6], answers[6][:-1]]).astype(np.int64)
        own = reference.base_model(torch.from_numpy(row)[None]).last_hidden_state[0]
        require_close(states[torch.from_numpy(packed.path[6, : len(row)])], own)


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


SPLIT = {
    "cohere", "cohere2", "gemma", "gemma2", "gemma3", "gpt_neox", "granite", "llama", "llama3",
    "mistral-window", "phi", "qwen2-window", "qwen3", "smollm3",
}  # fmt: skip
"""Architectures whose matrices can be split over tensor ranks."""


@pytest.mark.long
@pytest.mark.parametrize("way", ["tensor", "shard"])
def test_split_weights_give_the_numbers_of_whole_ones(tmp_path: Path, way: str) -> None:
    for name in SUPPORTED:
        tiny(name, tmp_path / name, tied=False, **SHORT.get(name, {}))
    as_ranks(2, architecture_ranks.main, tmp_path, SUPPORTED, way, limit=300.0)
    for rank in range(2):
        found = json.loads((tmp_path / f"{way} {rank}.json").read_text(encoding="ascii"))
        assert found.keys() == set(SUPPORTED)
        for name, said in found.items():
            if isinstance(said, str):
                assert name not in SPLIT
                assert "node: expected transformers" in said
                assert "tensor-parallel plan" in said
            else:
                assert said < 1e-5, name
        refused = {name for name, said in found.items() if isinstance(said, str)}
        assert not refused & SPLIT
        assert way == "tensor" or not refused
