"""Models as modules: what loads, what is saved, and weights by pieces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    Qwen2Config,
    T5Config,
)

from dataflow.errors import KernelError
from dataflow.kernel import Piece
from dataflow.model import Model
from operators.kernels.torch.attention import forward
from operators.kernels.torch.attention_kind import AttentionKind, attend_packed
from operators.kernels.torch.models import load_model, load_pieces, pieces
from operators.kernels.torch.saving import save_model
from tests.kit.models import character_tokenizer, save_tiny
from tests.kit.rows import plain


class OneRow:
    """All tokens are one row."""

    longest = 8

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        return attend_packed(query[None], key[None], value[None], kind)[0]


IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def loaded(base: object, **fields: Any) -> Any:
    return load_model(Model("policy", str(base), **fields), "cpu")


def says(module: nn.Module) -> Tensor:
    """Of the tokens IDS."""
    return forward(module, IDS, torch.arange(8), OneRow())


def reference_logits(directory: Path | str) -> Tensor:
    with torch.no_grad():
        return plain(str(directory))(IDS[None]).logits[0]


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_saved_model_loads_in_transformers_and_says_the_same(
    bases: dict[str, str], kind: str, tmp_path: Path
) -> None:
    module = loaded(bases[kind])
    with torch.no_grad():
        for piece in pieces(module):
            piece.data.mul_(1.1)
        logits = says(module)
    save_model(module, tmp_path / "out")
    torch.testing.assert_close(reference_logits(tmp_path / "out"), logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(reference_logits(bases[kind]), logits, atol=1e-2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a b")["input_ids"] == character_tokenizer()("a b")["input_ids"]
    assert tokenizer.chat_template == character_tokenizer().chat_template
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == tokenizer.eos_token_id
    assert "dataflow" not in (tmp_path / "out/config.json").read_text()


def test_a_saved_model_can_be_the_base_of_the_next(base: str, tmp_path: Path) -> None:
    first = loaded(base)
    save_model(first, tmp_path / "a")
    save_model(loaded(tmp_path / "a"), tmp_path / "a")
    for one, other in zip(pieces(first), pieces(loaded(tmp_path / "a")), strict=True):
        assert torch.equal(one.data, other.data)


def random_pieces(module: nn.Module) -> list[Piece]:
    return [Piece(piece.name, torch.randn_like(piece.data)) for piece in pieces(module)]


def test_tied_weights_are_one_piece_and_stay_tied(bases: dict[str, str]) -> None:
    tied, untied = (loaded(bases[kind]) for kind in ("qwen2", "llama"))
    assert "lm_head.weight" not in [p.name for p in pieces(tied)]
    assert "lm_head.weight" in [p.name for p in pieces(untied)]
    given = random_pieces(tied)
    given[0] = Piece("lm_head.weight", given[0].data)
    assert load_pieces(tied, given) == len(given)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert torch.equal(tied.model.embed_tokens.weight, given[0].data)


def test_pieces_are_copied_in_place(base: str) -> None:
    module = loaded(base)
    before = {p.name: p.data.data_ptr() for p in pieces(module)}
    given = random_pieces(module)
    assert load_pieces(module, iter(given)) == len(before)
    assert {p.name: p.data.data_ptr() for p in pieces(module)} == before
    assert all(torch.equal(p.data, g.data) for p, g in zip(pieces(module), given, strict=True))
    assert load_pieces(module, []) == 0


NORM = "model.norm.weight"


@pytest.mark.parametrize(("change", "told"), [
    (
        lambda some: [Piece("model.norm.wieght", torch.ones(32))],
        f"found 'model.norm.wieght'. Fix: did you mean {NORM}",
    ),
    (
        lambda some: [Piece(NORM, torch.ones(31))],
        rf"'{NORM}': expected shape \(32,\), found \(31,\)",
    ),
    (
        lambda some: some[1:],
        r"expected all weights, found \d+: model.embed_tokens.weight did not come",
    ),
], ids=["another name", "another shape", "one is missing"])  # fmt: skip
def test_pieces_that_do_not_fit_are_refused_by_name(
    base: str, change: Callable[[list[Piece]], list[Piece]], told: str
) -> None:
    module = loaded(base)
    with pytest.raises(KernelError, match=told):
        load_pieces(module, change(list(pieces(module))))


def test_the_module_is_ready_to_compute_with(tmp_path: Path) -> None:
    module = loaded(save_tiny(tmp_path, attention_dropout=0.5), dtype="bfloat16")
    assert not module.training
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    module.train()
    assert torch.equal(says(module), says(module))


def test_a_forward_without_a_pass_is_refused(base: str) -> None:
    module = loaded(base)
    with pytest.raises(KernelError, match="expected attention_pass="):
        module(IDS[None])


def test_a_wrong_base_is_one_clear_error(base: str, tmp_path: Path) -> None:
    empty, t5, weightless = tmp_path / "empty", tmp_path / "t5", tmp_path / "weightless"
    empty.mkdir()
    T5Config().save_pretrained(t5)
    Qwen2Config(hidden_size=16, num_hidden_layers=1).save_pretrained(weightless)
    for folder in (t5, weightless):
        character_tokenizer().save_pretrained(folder)
    for folder, told in (
        (tmp_path / "missing", "found nothing at"),
        (base + "x", f"Fix: {Path(base)}"),
        (empty, "expected config.json"),
        (t5, "found 't5': it is an encoder with a decoder"),
        (weightless, "found OSError: Error no file named model.safetensors"),
    ):
        with pytest.raises(KernelError, match=told):
            loaded(folder)


def test_a_base_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(KernelError, match=r"expected tokenizer_config\.json"):
        loaded(tmp_path)
