"""Models as modules: what loads, what is saved, and weights by pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
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
from operators.kernels.torch.attention import attend_packed, forward, hidden
from operators.kernels.torch.models import load_model, load_pieces, pieces, save_model
from tests.kit.models import character_tokenizer, save_tiny


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bases")
    return {kind: save_tiny(folder / kind, kind) for kind in ("qwen2", "llama")}


class OneRow:
    """All tokens are one row."""

    longest = 8

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        return attend_packed(query[None], key[None], value[None], scaling)[0]


IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def reference_logits(directory: str) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")(
            IDS[None]
        ).logits[0]


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_saved_model_loads_in_transformers_and_says_the_same(
    bases: dict[str, str], kind: str, tmp_path: Path
) -> None:
    module = load_model(Model("policy", bases[kind]), "cpu")
    with torch.no_grad():
        for piece in pieces(module):
            piece.data.mul_(1.1)
        logits = forward(module, IDS, torch.arange(8), OneRow())
    save_model(module, tmp_path / "out")
    torch.testing.assert_close(
        reference_logits(str(tmp_path / "out")), logits, atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(reference_logits(bases[kind]), logits, atol=1e-2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a b")["input_ids"] == character_tokenizer()("a b")["input_ids"]
    assert tokenizer.chat_template == character_tokenizer().chat_template
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == tokenizer.eos_token_id
    assert "dataflow" not in (tmp_path / "out" / "config.json").read_text()


def test_a_saved_model_can_be_the_base_of_the_next(bases: dict[str, str], tmp_path: Path) -> None:
    first = load_model(Model("policy", bases["qwen2"]), "cpu")
    save_model(first, tmp_path / "a")
    second = load_model(Model("policy", str(tmp_path / "a")), "cpu")
    save_model(second, tmp_path / "a")
    for one, other in zip(
        pieces(first), pieces(load_model(Model("p", str(tmp_path / "a")), "cpu")), strict=True
    ):
        assert torch.equal(one.data, other.data)


def test_tied_weights_are_one_piece_and_stay_tied(bases: dict[str, str]) -> None:
    tied, untied = (load_model(Model("policy", bases[kind]), "cpu") for kind in ("qwen2", "llama"))
    assert "lm_head.weight" not in [p.name for p in pieces(tied)]
    assert "lm_head.weight" in [p.name for p in pieces(untied)]
    given = [Piece(p.name, torch.randn_like(p.data)) for p in pieces(tied)]
    given[0] = Piece("lm_head.weight", given[0].data)
    assert load_pieces(tied, given) == len(given)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert torch.equal(tied.model.embed_tokens.weight, given[0].data)


def test_pieces_are_copied_in_place(bases: dict[str, str]) -> None:
    module = load_model(Model("policy", bases["qwen2"]), "cpu")
    before = {p.name: p.data.data_ptr() for p in pieces(module)}
    given = [Piece(p.name, torch.randn_like(p.data)) for p in pieces(module)]
    assert load_pieces(module, iter(given)) == len(before)
    assert {p.name: p.data.data_ptr() for p in pieces(module)} == before
    assert all(torch.equal(p.data, g.data) for p, g in zip(pieces(module), given, strict=True))
    assert load_pieces(module, []) == 0


def test_pieces_that_do_not_fit_are_refused_by_name(bases: dict[str, str]) -> None:
    module = load_model(Model("policy", bases["qwen2"]), "cpu")
    some = list(pieces(module))
    with pytest.raises(
        KernelError, match=r"found 'model.norm.wieght'. Fix: did you mean model.norm.weight"
    ):
        load_pieces(module, [Piece("model.norm.wieght", torch.ones(32))])
    with pytest.raises(
        KernelError, match=r"'model.norm.weight': expected shape \(32,\), found \(31,\)"
    ):
        load_pieces(module, [Piece("model.norm.weight", torch.ones(31))])
    with pytest.raises(
        KernelError,
        match=rf"expected all weights, found {len(some) - 1}: {some[0].name} did not come",
    ):
        load_pieces(module, some[1:])


def test_a_value_head_begins_at_zero_and_is_read_back(
    bases: dict[str, str], tmp_path: Path
) -> None:
    critic = Model("critic", bases["qwen2"], trainable=True, head="scalar")
    module = load_model(critic, "cpu")
    policy = load_model(Model("policy", bases["qwen2"]), "cpu")
    with torch.no_grad():
        assert (forward(module, IDS, torch.arange(8), OneRow()) == 0).all()
        states = [hidden(m, IDS, torch.arange(8), OneRow()) for m in (module, policy)]
        assert torch.equal(*states)
        for name, parameter in module.named_parameters():
            if name.startswith("score."):
                parameter.normal_()
        values = forward(module, IDS, torch.arange(8), OneRow())
    save_model(module, tmp_path)
    again = load_model(Model("critic", str(tmp_path), head="scalar"), "cpu")
    reference = AutoModelForTokenClassification.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    with torch.no_grad():
        torch.testing.assert_close(forward(again, IDS, torch.arange(8), OneRow()), values)
        torch.testing.assert_close(reference(IDS[None]).logits[0], values, atol=1e-5, rtol=1e-5)


def test_a_reward_model_keeps_its_trained_head(bases: dict[str, str], tmp_path: Path) -> None:
    rm = Qwen2ForSequenceClassification.from_pretrained(bases["qwen2"], num_labels=1)
    rm.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    module = load_model(Model("rm", str(tmp_path), head="scalar"), "cpu")
    assert torch.equal(module.score.weight, rm.score.weight)
    assert (module.score.bias == 0).all()


def test_the_module_is_ready_to_compute_with(bases: dict[str, str], tmp_path: Path) -> None:
    base = save_tiny(tmp_path, "qwen2", attention_dropout=0.5)
    module = load_model(Model("policy", base, dtype="bfloat16"), "cpu")
    assert not module.training
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    module.train()
    first, second = (forward(module, IDS, torch.arange(8), OneRow()) for _ in range(2))
    assert torch.equal(first, second)


def test_a_forward_without_a_pass_is_refused(bases: dict[str, str]) -> None:
    module = load_model(Model("policy", bases["qwen2"]), "cpu")
    with pytest.raises(KernelError, match="expected attention_pass="):
        module(IDS[None])


def test_a_sliding_window_that_would_cut_is_refused(tmp_path: Path) -> None:
    base = save_tiny(
        tmp_path, "qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=0
    )
    module = load_model(Model("policy", base), "cpu")
    with pytest.raises(KernelError, match="a sliding window of 7 under 8 keys"):
        forward(module, IDS, torch.arange(8), OneRow())


def test_a_wrong_base_is_one_clear_error(bases: dict[str, str], tmp_path: Path) -> None:
    def message(base: Path | str) -> str:
        with pytest.raises(KernelError) as caught:
            load_model(Model("policy", str(base)), "cpu")
        return str(caught.value)

    assert "found nothing at" in message(tmp_path / "missing")
    assert f"did you mean {Path(bases['qwen2'])}" in message(bases["qwen2"] + "x")
    (tmp_path / "empty").mkdir()
    assert "expected config.json" in message(tmp_path / "empty")
    T5Config().save_pretrained(tmp_path / "t5")
    assert "expected tokenizer_config.json" in message(tmp_path / "t5")
    character_tokenizer().save_pretrained(tmp_path / "t5")
    assert "'lm' head on transformers' attention interface, found 't5'" in message(tmp_path / "t5")
    Qwen2Config(hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path / "weightless")
    character_tokenizer().save_pretrained(tmp_path / "weightless")
    assert "found OSError: Error no file named model.safetensors" in message(
        tmp_path / "weightless"
    )
