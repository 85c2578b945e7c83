"""Models as modules: what loads, what is saved, and weights by pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    T5Config,
)

from dataflow.errors import KernelError
from dataflow.kernel import Piece
from dataflow.model import Model
from operators.kernels.torch.attention import forward, hidden
from operators.kernels.torch.attention_kind import AttentionKind, attend_packed
from operators.kernels.torch.models import load_model, load_pieces, pieces
from operators.kernels.torch.saving import save_model
from tests.kit.models import character_tokenizer, save_tiny


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


def reference_logits(directory: object, kind: Any = AutoModelForCausalLM) -> Tensor:
    with torch.no_grad():
        module = kind.from_pretrained(str(directory), attn_implementation="eager")
        return module(IDS[None]).logits[0]


def require_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


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
    require_close(reference_logits(tmp_path / "out"), logits)
    assert not torch.allclose(reference_logits(bases[kind]), logits, atol=1e-2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a b")["input_ids"] == character_tokenizer()("a b")["input_ids"]
    assert tokenizer.chat_template == character_tokenizer().chat_template
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == tokenizer.eos_token_id
    assert "dataflow" not in (tmp_path / "out" / "config.json").read_text()


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


def test_pieces_that_do_not_fit_are_refused_by_name(base: str) -> None:
    module = loaded(base)
    some = list(pieces(module))
    norm = "model.norm.weight"
    for given, told in (
        (
            [Piece("model.norm.wieght", torch.ones(32))],
            f"found 'model.norm.wieght'. Fix: did you mean {norm}",
        ),
        ([Piece(norm, torch.ones(31))], rf"'{norm}': expected shape \(32,\), found \(31,\)"),
        (some[1:], f"expected all weights, found {len(some) - 1}: {some[0].name} did not come"),
    ):
        with pytest.raises(KernelError, match=told):
            load_pieces(module, given)


def test_a_value_head_begins_at_zero_and_is_read_back(base: str, tmp_path: Path) -> None:
    module, policy = loaded(base, trainable=True, head="scalar"), loaded(base)
    with torch.no_grad():
        assert (says(module) == 0).all()
        states = [hidden(m, IDS, torch.arange(8), OneRow()) for m in (module, policy)]
        assert torch.equal(*states)
        for name, parameter in module.named_parameters():
            if name.startswith("score."):
                parameter.normal_()
        values = says(module)
    save_model(module, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(says(loaded(tmp_path, head="scalar")), values)
    require_close(reference_logits(tmp_path, AutoModelForTokenClassification), values)


def test_a_reward_model_keeps_its_trained_head(base: str, tmp_path: Path) -> None:
    rm = Qwen2ForSequenceClassification.from_pretrained(base, num_labels=1)
    rm.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    module = loaded(tmp_path, head="scalar")
    assert torch.equal(module.score.weight, rm.score.weight)
    assert module.score.bias is None


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
    def message(directory: Path | str) -> str:
        with pytest.raises(KernelError) as caught:
            loaded(directory)
        return str(caught.value)

    assert "found nothing at" in message(tmp_path / "missing")
    assert f"Fix: {Path(base)}" in message(base + "x")
    (tmp_path / "empty").mkdir()
    assert "expected config.json" in message(tmp_path / "empty")
    T5Config().save_pretrained(tmp_path / "t5")
    assert "expected tokenizer_config.json" in message(tmp_path / "t5")
    character_tokenizer().save_pretrained(tmp_path / "t5")
    assert "found 't5': it is an encoder with a decoder" in message(tmp_path / "t5")
    empty = tmp_path / "weightless"
    Qwen2Config(hidden_size=16, num_hidden_layers=1).save_pretrained(empty)
    character_tokenizer().save_pretrained(empty)
    assert "found OSError: Error no file named model.safetensors" in message(empty)
