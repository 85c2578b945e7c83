"""The forward kernels against transformers' own padded forward."""

from __future__ import annotations

from pathlib import Path
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
from tests.kit.models import save_tiny
from tests.kit.rows import padded_logits, padded_logprobs, plain, random_rows, rollout


def run(
    kernel: Any, base: str, rows: Batch, *, head: Any = "lm", tokens: int = 16384, **params: Any
) -> Batch:
    open_kernel(kernel, Model("m", base, head=head), layout=Layout(tokens=tokens), **params)
    (batch,) = kernel.run(rows_chunk(rows))
    return batch


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("tokens", [16384, 20])
def test_logprobs_are_those_of_transformers(bases: dict[str, str], kind: str, tokens: int) -> None:
    rows = random_rows(4, 3)
    found = run(TorchLogprobs(), bases[kind], rows, tokens=tokens).ragged("logprobs")
    with torch.no_grad():
        wanted = padded_logprobs(plain(bases[kind]), rows)
    for i, row in enumerate(wanted):
        np.testing.assert_allclose(found[i], row.numpy(), atol=2e-5)


def test_logprobs_divide_by_the_temperature(base: str) -> None:
    rows = random_rows(2, 2)
    found = run(TorchLogprobs(), base, rows, temperature=0.7).ragged("logprobs")
    with torch.no_grad():
        wanted = padded_logprobs(plain(base), rows, 0.7)
    np.testing.assert_allclose(found.values, torch.cat(wanted).numpy(), atol=2e-5)
    greedy = run(TorchLogprobs(), base, rows, temperature=0.0).ragged("logprobs")
    usual = run(TorchLogprobs(), base, rows, temperature=None).ragged("logprobs")
    assert np.array_equal(greedy.values, usual.values)


def test_rows_of_other_lengths_and_empty_ones_keep_their_place(base: str) -> None:
    rows = rollout([3, 3, 4], [[1, 2], [1, 2], [5]], [[7], [], [8, 9, 10]])
    found = run(TorchLogprobs(), base, rows)
    assert found.keys.rows() == rows.keys.rows()
    assert found.ragged("logprobs").lengths.tolist() == [1, 0, 3]


def test_entropy_is_that_of_the_next_token(base: str) -> None:
    rows = random_rows(2, 2)
    packed = pack(rows.ragged("prompt_ids"), rows.ragged("completion_ids"), np.arange(len(rows)))
    written = torch.from_numpy(rows.ragged("completion_ids").values.astype(np.int64))
    with torch.no_grad():
        found = predictions(load_model(Model("m", base)), packed, written, entropy=True).entropy
        logits = torch.cat(padded_logits(plain(base), rows))
    wanted = torch.distributions.Categorical(logits=logits).entropy()
    assert found is not None
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=1e-4)


def test_logits_in_chunks_are_the_same_with_their_gradient(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(3, 3)
    packed = pack(rows.ragged("prompt_ids"), rows.ragged("completion_ids"), np.arange(len(rows)))
    written = torch.from_numpy(rows.ragged("completion_ids").values.astype(np.int64))
    upstream = torch.randn(len(written), generator=torch.Generator().manual_seed(0))

    def computed() -> tuple[torch.Tensor, list[torch.Tensor]]:
        module = load_model(Model("m", base))
        found = predictions(module, packed, written, temperature=0.8, entropy=True)
        assert found.entropy is not None
        ((found.logprobs + found.entropy) * upstream).sum().backward()
        return found.logprobs, [p.grad for p in module.parameters() if p.grad is not None]

    whole, gradients = computed()
    monkeypatch.setattr(heads, "CHUNK", 98 * 4)
    parts, others = computed()
    assert torch.allclose(whole, parts, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(gradients, others, strict=True))


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory, base: str) -> str:
    folder = tmp_path_factory.mktemp("critic") / "critic"
    save_tiny(folder)
    torch.manual_seed(3)
    module = AutoModelForTokenClassification.from_pretrained(base, num_labels=1)
    torch.nn.init.normal_(module.score.weight)
    module.save_pretrained(folder)
    return str(folder)


def test_values_and_scores_are_the_scalar_head_before_a_token_and_at_the_last(critic: str) -> None:
    rows = random_rows(3, 2)
    values = run(TorchValues(), critic, rows, head="scalar").ragged("values")
    scores = run(TorchScores(), critic, rows, head="scalar", tokens=25).flat("reward")
    load = AutoModelForTokenClassification.from_pretrained
    module = load(critic, attn_implementation="eager").eval()
    for i in range(len(rows)):
        prompt, answer = rows.ragged("prompt_ids")[i], rows.ragged("completion_ids")[i]
        ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64))
        with torch.no_grad():
            head = module(input_ids=ids[None]).logits[0, :, 0].numpy()
        np.testing.assert_allclose(values[i], head[len(prompt) - 1 : -1], atol=1e-4)
        np.testing.assert_allclose(scores[i], head[-1], atol=1e-4)


def test_load_takes_new_weights_and_nothing_is_no_change(base: str) -> None:
    rows = random_rows(2, 2)
    kernel = TorchLogprobs()
    before = run(kernel, base, rows).ragged("logprobs").values.copy()
    chunk = rows_chunk(rows)
    kernel.load([], 1)
    assert np.array_equal(next(iter(kernel.run(chunk))).ragged("logprobs").values, before)
    other = plain(base)
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(other.get_parameter("model.norm.weight"), generator=generator)
    kernel.load([Piece(name, p.detach()) for name, p in other.named_parameters()], 2)
    changed = next(iter(kernel.run(chunk))).ragged("logprobs").values
    with torch.no_grad():
        wanted = torch.cat(padded_logprobs(other, rows)).numpy()
    np.testing.assert_allclose(changed, wanted, atol=2e-5)
    assert kernel.version == 2


def test_a_diverged_model_is_named_with_the_row(base: str, tmp_path: Path) -> None:
    rows = random_rows(2, 2)
    kernel = TorchLogprobs()
    run(kernel, base, rows)
    broken = plain(base)
    torch.nn.init.constant_(broken.get_parameter("model.norm.weight"), float("nan"))
    kernel.load([Piece(name, p.detach()) for name, p in broken.named_parameters()], 1)
    with pytest.raises(DataError, match=r"logprobs: row \(10, 0, 0\) has nan"):
        list(kernel.run(rows_chunk(rows)))
