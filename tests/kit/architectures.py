"""Tiny configurations of model architectures by name, and models of them with random weights.

A name is that of a family and, after a hyphen, what differs from its usual form: `gemma2`,
`mistral-window`. Every model has 2 layers, 4 attention heads and the vocabulary of the
character tokenizer (models.py). Windows are WINDOW tokens, so that short rows exceed them, and
caps are so low that no score is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
)

from tests.kit.models import CHARACTERS, EOS, PAD, character_tokenizer

WINDOW = 5
"""Tokens that a sliding window shows, the query's own included."""

POSITIONS = 128
"""The most tokens per row."""

_SHAPE: dict[str, Any] = {
    "vocab_size": len(CHARACTERS) + 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.3,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}


def _of(kind: type[PretrainedConfig], **own: Any) -> Callable[..., PretrainedConfig]:
    """A function that makes configurations of this class; its arguments change the fields."""

    def made(*, tied: bool = True, **changes: Any) -> PretrainedConfig:
        return kind(**{**_SHAPE, "tie_word_embeddings": tied, **own, **changes})

    return made


def _rope(kind: str, base: float = 10000.0, **own: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **own}}


_LLAMA3 = _rope(
    "llama3", 500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
_GEMMA3_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}
_HALVES = [1.0 + 0.25 * i for i in range(4)]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LAYERS = ["sliding_attention", "full_attention"]
_WINDOWS = {"sliding_window": WINDOW, "layer_types": _LAYERS}
_GEMMA = {"head_dim": 8}
_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48}

_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
_TURNED = _rope(
    "yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1,
    mscale=1.0, mscale_all_dim=1.0,
)  # fmt: skip
_NAMED: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cwm": {**_WINDOWS, **_LLAMA3, "bos_token_id": 1},
    "deepseek_v2": {**_ROUTED, **_LATENT, "head_dim": 8},
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "dots1": {**_ROUTED, "n_shared_experts": 1},
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "exaone4": _WINDOWS,
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {**_ROUTED, "head_dim": 8},
    "gpt_bigcode": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 48,
        "n_positions": POSITIONS,
    },
    "granitemoe": _LOCAL,
    "granitemoeshared": {**_LOCAL, "shared_intermediate_size": 24},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "minimax_m2": {**_LOCAL, "head_dim": 8},
    "ministral": {**_WINDOWS, "head_dim": 8},
    "ministral3": {**_TURNED, "head_dim": 8},
    "nanochat": {},
    "olmo": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "persimmon": {},
    "phimoe": _LOCAL,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 24},
    "seed_oss": {"head_dim": 8},
    "starcoder2": {"sliding_window": None},
    "vaultgemma": {**_GEMMA, **_WINDOWS, "query_pre_attn_scalar": 4},
}
"""Fields of architectures whose tiny form is called as their `model_type`."""

ARCHITECTURES: dict[str, Callable[..., PretrainedConfig]] = {
    "bloom": _of(BloomConfig, n_layer=2, n_head=4, hidden_dropout=0.0),
    "cohere": _of(CohereConfig, logit_scale=0.25),
    "cohere2": _of(Cohere2Config, logit_scale=0.25, **_WINDOWS),
    "falcon": _of(FalconConfig, **_FALCON),
    "falcon-alibi": _of(FalconConfig, **_FALCON, alibi=True),
    "gemma": _of(GemmaConfig, **_GEMMA),
    "gemma2": _of(
        Gemma2Config, **_GEMMA, **_WINDOWS, query_pre_attn_scalar=4, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": _of(
        Gemma3TextConfig, **_GEMMA, **_WINDOWS, **_GEMMA3_ROPE, query_pre_attn_scalar=4
    ),
    "gpt2": _of(GPT2Config, n_embd=32, n_layer=2, n_head=4, n_inner=48, n_positions=POSITIONS),
    "gpt_neox": _of(GPTNeoXConfig),
    "gpt_oss": _of(
        GptOssConfig, **_WINDOWS, **_rope("default"), head_dim=8, num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "granite": _of(
        GraniteConfig, logits_scaling=2.0, attention_multiplier=0.3, residual_multiplier=0.5,
        embedding_multiplier=3.0,
    ),
    "llama": _of(LlamaConfig),
    "llama3": _of(LlamaConfig, **_LLAMA3),
    "llama-dynamic": _of(LlamaConfig, **_rope("dynamic", factor=2.0), max_position_embeddings=8),
    "llama-linear": _of(LlamaConfig, **_rope("linear", factor=4.0)),
    "llama-yarn": _of(
        LlamaConfig, **_rope("yarn", factor=4.0, original_max_position_embeddings=32)
    ),
    "mistral": _of(MistralConfig, sliding_window=None),
    "mistral-window": _of(MistralConfig, sliding_window=WINDOW),
    "mixtral": _of(MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    "olmo2": _of(Olmo2Config),
    "olmo3": _of(Olmo3Config, **_WINDOWS),
    "opt": _of(OPTConfig, ffn_dim=48, word_embed_proj_dim=32, init_std=0.3),
    "phi": _of(PhiConfig, partial_rotary_factor=0.5),
    "phi3": _of(Phi3Config, sliding_window=None),
    "phi3-longrope": _of(
        Phi3Config, **_rope(
            "longrope", short_factor=[1.0] * 4, long_factor=_HALVES, factor=4.0,
            original_max_position_embeddings=8,
        ),
        original_max_position_embeddings=8,
    ),
    "phi3-window": _of(Phi3Config, sliding_window=WINDOW),
    "qwen2": _of(Qwen2Config),
    "qwen2-window": _of(
        Qwen2Config, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": _of(Qwen3Config, head_dim=8),
    "qwen3_moe": _of(Qwen3MoeConfig, head_dim=8, **_EXPERTS),
    "smollm3": _of(SmolLM3Config, no_rope_layers=[1, 0]),
    "stablelm": _of(StableLmConfig, partial_rotary_factor=0.5),
    **{name: _of(CONFIG_MAPPING[name], **own) for name, own in _NAMED.items()},
}  # fmt: skip
"""Makes a configuration by the name of an architecture; tied: whether the vocabulary head is the
embedding."""


def tiny(name: str, folder: Path, *, tied: bool = True, **changes: Any) -> Path:
    """A random model of this architecture with the character tokenizer, saved in the folder.

    changes: fields of its configuration. The weights are the same at each call.
    """
    torch.manual_seed(0)
    config = ARCHITECTURES[name](tied=tied, **changes)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _differ(module)
    module.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def _differ(module: torch.nn.Module) -> None:
    """Random norms, biases and sinks: at their usual 1 and 0, a wrong one would not be seen."""
    for weight in module.parameters():
        if weight.dim() < 2:
            weight += 0.1 * torch.randn_like(weight)
