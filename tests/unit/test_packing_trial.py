"""What packed attention refuses: keywords, rotary kinds, and modules in which rows would meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    DogeConfig,
    Gemma3TextConfig,
    Lfm2Config,
    Llama4TextConfig,
    MiniMaxConfig,
    NemotronConfig,
    PhimoeConfig,
)

from dataflow.errors import KernelError
from dataflow.model import Model
from operators.kernels.torch import models
from operators.kernels.torch.attention import attention, compute_hidden
from operators.kernels.torch.attention_kind import AttentionKind, attend_packed
from operators.kernels.torch.models import load_model
from operators.kernels.torch.packing_trial import require_packable
from tests.kit.architectures import WINDOW, tiny
from tests.kit.models import character_tokenizer

_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
_TINY = {
    "vocab_size": 98, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 96, "eos_token_id": 97,
}  # fmt: skip

MIXED = {
    r"a mask with a window of 5 and an attention call with no window in layer 0 \(phimoe\)": (
        PhimoeConfig, {**_EXPERTS, "sliding_window": WINDOW},
    ),
    r"one attention per layer, found 2 of them in layer 0 \(diffllama\)": (DiffLlamaConfig, {}),
    r"a mask that is neither causal nor a sliding window in layer 0 \(doge\)": (DogeConfig, {}),
    r"numbers of one row in those of the next .* in layer 1 \(lfm2\)": (
        Lfm2Config, {"layer_types": ["conv", "full_attention"]},
    ),
    r"numbers of one row in those of the next .*\(minimax\)": (MiniMaxConfig, _EXPERTS),
    "NemotronAttention: expected a decoder that passes keywords on": (NemotronConfig, {}),
    "expected a backbone that returns hidden states": (Llama4TextConfig, _EXPERTS),
    "Gemma3Attention: .* found is_causal=False as well": (
        Gemma3TextConfig, {"use_bidirectional_attention": True, "head_dim": 8},
    ),
}  # fmt: skip
"""Architectures by what is said of them."""


class Rows:
    """A pass of rows of these lengths."""

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.longest = list(lengths), max(lengths)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        parts = zip(*(x.split(self.lengths) for x in (query, key, value)), strict=True)
        return torch.cat([attend_packed(q[None], k[None], v[None], kind)[0] for q, k, v in parts])


def loaded(folder: Path) -> Any:
    return load_model(Model("policy", str(folder)), "cpu")


@pytest.mark.parametrize("message", MIXED)
def test_a_module_in_which_rows_would_meet_is_refused(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "refusal", lambda config: None)  # the table knows it already
    kind, changes = MIXED[message]
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(kind(**_TINY | changes), dtype=torch.float32)
    module.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(KernelError, match=f"Model 'policy': .*{message}"):
        loaded(tmp_path)


class CountedFromZero(nn.Module):
    """Rotary tables of the places in the pack."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor, position_ids: Tensor, **given: Any) -> Any:
        return self.inner(states, torch.arange(position_ids.shape[1])[None], **given)


def test_a_module_that_numbers_positions_itself_is_refused(tmp_path: Path) -> None:
    module = loaded(tiny("qwen3", tmp_path))
    require_packable("here", module)
    module.model.rotary_emb = CountedFromZero(module.model.rotary_emb)
    with pytest.raises(KernelError, match=r"here: expected positions to be taken .* other queries"):
        require_packable("here", module)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"never_heard_of": 3}, "never_heard_of="),
        ({"position_bias": torch.zeros(1)}, "position_bias="),
        ({"is_causal": False}, "is_causal=False"),
        ({"dropout": 0.5}, "dropout=0.5"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "attention_mask="),
    ],
)
def test_a_keyword_that_is_not_implemented_is_refused(given: dict[str, Any], named: str) -> None:
    module = nn.Identity()
    module.layer_idx = 0  # type: ignore[assignment]
    query = torch.zeros(1, 2, 4, 8)
    known = {"position_ids": None, "output_attentions": False, "is_causal": None, "softcap": 2.0}
    how = {"attention_mask": None, "scaling": 1.0, "attention_pass": Rows(4)}
    attention(module, query, query, query, **how | known)
    with pytest.raises(KernelError, match=f"found {named} as well"):
        attention(module, query, query, query, **how | known | given)


@pytest.mark.parametrize(("name", "message"), [
    ("llama-dynamic", "'dynamic' changes its base by the length of a whole batch"),
    ("phi3-longrope", "'longrope' picks its factors by the length of a whole batch"),
])  # fmt: skip
def test_rows_whose_angles_would_depend_on_the_longest_are_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    module, limit = loaded(tiny(name, tmp_path)), 8
    ids, positions = torch.arange(limit + 3), torch.tensor([*range(limit), 0, 1, 2])
    with torch.no_grad():
        first = compute_hidden(module, ids, positions, Rows(limit, 3))[limit:]
        alone = compute_hidden(module, ids[limit:], positions[limit:], Rows(3))
        assert torch.allclose(first, alone, rtol=0, atol=1e-5)
        with pytest.raises(KernelError, match=f"{message}.* of 8 changes") as caught:
            compute_hidden(module, ids, torch.tensor([*range(limit + 1), 0, 1]), Rows(limit + 1, 2))
    assert "found a row of 9 tokens" in str(caught.value)


def test_an_unknown_rotary_kind_is_refused(tmp_path: Path) -> None:
    module = loaded(tiny("llama", tmp_path))
    module.config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(KernelError, match=r"here: expected rope_scaling of a kind .* 'spiral'"):
        require_packable("here", module)
