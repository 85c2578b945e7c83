"""The forward kernels against transformers' own padded forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from dataflow.batch import Batch
from dataflow.errors import DataError
from dataflow.kernel import Layout, Piece
from dataflow.model import Model
from operators.kernels.torch import heads
from operators.kernels.torch.forward import TorchLogprobs, TorchScores, TorchValues
from operators.kernels.torch.heads import predictions
from operators.kernels.torch.models import load_model
from operators.kernels.torch.packing import pack
from tests.kit.kernels import open_kernel, rows_chunk
from tests.kit.rows import padded_logprobs, plain, random_rows, rollout


def run(
    kernel: Any, base: str, rows: Batch, *, head: Any = "lm", tokens: int = 16384, **params: Any
) -> Batch:
    """All rows by this kernel; tokens: of one forward."""
    open_kernel(kernel, Model("m", base, head=head), layout=Layout(tokens=tokens), **params)
    (batch,) = kernel.run(rows_chunk(rows))
    return batch


HEATS = (1.0, 0.7, 2.0)


@pytest.mark.parametrize(
    ("temperature", "tokens", "chunk"),
    [(0.7, 16384, heads.CHUNK), (HEATS, 20, heads.CHUNK), (HEATS, 16384, 98 * 4)],
    ids=["one temperature", "one for each sample, in several forwards", "in chunks of logits"],
)
def test_logprobs_are_those_of_transformers(
    base: str, monkeypatch: pytest.MonkeyPatch, temperature: Any, tokens: int, chunk: int
) -> None:
    """Rows of one prompt share its last token, whose logits may be read at several temperatures."""
    monkeypatch.setattr(heads, "CHUNK", chunk)
    rows, each = random_rows(4, 3), np.broadcast_to(temperature, 3)
    scored = run(TorchLogprobs(), base, rows, tokens=tokens, temperature=temperature)
    with torch.no_grad():
        by_sample = [padded_logprobs(plain(base), rows, heat) for heat in each]
    expected = [by_sample[sample][row] for row, sample in enumerate(rows.keys.sample)]
    np.testing.assert_allclose(scored.ragged("logprobs").values, torch.cat(expected), atol=2e-5)


def test_greedy_rows_have_the_logprobs_of_no_temperature(base: str) -> None:
    rows = random_rows(2, 2)
    greedy = run(TorchLogprobs(), base, rows, temperature=0.0)
    assert greedy.records.equals(run(TorchLogprobs(), base, rows, temperature=None).records)


def test_rows_of_other_lengths_and_empty_ones_keep_their_place(base: str) -> None:
    rows = rollout([3, 3, 4], [[1, 2], [1, 2], [5]], [[7], [], [8, 9, 10]])
    found = run(TorchLogprobs(), base, rows)
    assert found.keys.rows() == rows.keys.rows()
    assert found.ragged("logprobs").lengths.tolist() == [1, 0, 3]


def test_logits_in_chunks_are_the_same_with_their_gradient(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(3, 3)
    answers = rows.ragged("completion_ids")
    packed = pack(rows.ragged("prompt_ids"), answers, np.arange(len(rows)))
    written = torch.from_numpy(answers.values.astype(np.int64))
    upstream = torch.randn(len(written), generator=torch.Generator().manual_seed(0))

    def computed() -> tuple[torch.Tensor, list[torch.Tensor]]:
        module = load_model(Model("m", base))
        found = predictions(module, packed, written, temperature=0.8, entropy=True)
        ((found.logprobs + found.entropy) * upstream).sum().backward()
        return found.logprobs, [p.grad for p in module.parameters() if p.grad is not None]

    whole, gradients = computed()
    monkeypatch.setattr(heads, "CHUNK", 98 * 4)
    parts, others = computed()
    assert torch.allclose(whole, parts, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(gradients, others, strict=True))


def test_values_and_scores_are_the_scalar_head_before_a_token_and_at_the_last(
    bases: dict[str, str],
) -> None:
    rows, critic = random_rows(3, 2), bases["critic"]
    values = run(TorchValues(), critic, rows, head="scalar").ragged("values")
    scores = run(TorchScores(), critic, rows, head="scalar", tokens=25).flat("reward")
    module = AutoModelForTokenClassification.from_pretrained(critic).eval()
    for i in range(len(rows)):
        prompt, answer = rows.ragged("prompt_ids")[i], rows.ragged("completion_ids")[i]
        ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64))
        with torch.no_grad():
            head = module(input_ids=ids[None]).logits[0, :, 0].numpy()
        np.testing.assert_allclose(values[i], head[len(prompt) - 1 : -1], atol=1e-4)
        np.testing.assert_allclose(scores[i], head[-1], atol=1e-4)


def pieces_of(module: torch.nn.Module) -> list[Piece]:
    return [Piece(name, p.detach()) for name, p in module.named_parameters()]


def test_load_takes_new_weights_and_nothing_is_no_change(base: str) -> None:
    rows, kernel = random_rows(2, 2), TorchLogprobs()
    before, chunk = run(kernel, base, rows), rows_chunk(rows)
    kernel.load([], 1)
    (same,) = kernel.run(chunk)
    assert same.records.equals(before.records)
    other = plain(base)
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(other.get_parameter("model.norm.weight"), generator=generator)
    kernel.load(pieces_of(other), 2)
    (changed,) = kernel.run(chunk)
    with torch.no_grad():
        wanted = torch.cat(padded_logprobs(other, rows)).numpy()
    np.testing.assert_allclose(changed.ragged("logprobs").values, wanted, atol=2e-5)
    assert kernel.version == 2


def test_a_diverged_model_is_named_with_the_row(base: str) -> None:
    rows, kernel, broken = random_rows(2, 2), TorchLogprobs(), plain(base)
    run(kernel, base, rows)
    torch.nn.init.constant_(broken.get_parameter("model.norm.weight"), float("nan"))
    kernel.load(pieces_of(broken), 1)
    with pytest.raises(DataError, match=r"logprobs: row \(10, 0, 0\) has nan"):
        list(kernel.run(rows_chunk(rows)))
