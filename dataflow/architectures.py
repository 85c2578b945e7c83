"""Architectures: which models a graph can compute with, by their config.json alone.

Owns: the table of model types, the settings that none of them may have, and the words of a
refusal. Does not own: reading the file (model_files.py), the fault (rules/bases.py), the attention
itself and what it refuses when it runs (operators/kernels).

A model type that is in no table is refused too: most decoders would run, and one that computes
something else than transformers does would train on wrong numbers without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dataflow.model_files import rotary_of

PAGE = "docs/models.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a base cannot be used. reason: a model type or setting, and what is wrong with it."""

    reason: str
    fix: str


TESTED = frozenset({
    "apertus", "arcee", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3", "dots1",
    "ernie4_5", "ernie4_5_moe", "exaone4", "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm",
    "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granitemoe",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "minimax_m2",
    "ministral", "ministral3", "mistral", "mixtral", "nanochat", "olmo", "olmo2", "olmo3",
    "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "starcoder2", "vaultgemma",
})  # fmt: skip
"""Model types whose log-probs, values, scores and gradients equal those of transformers; the tests
compare them (scripts/models.py)."""

EXPERTS_BY_NAME = frozenset({
    "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "hunyuan_v1_moe",
})  # fmt: skip
"""Model types that have linear layers beside their experts which peft takes for experts, by their
names, and leaves without an adapter."""

_ANOTHER = f"another base; {PAGE} lists those that work"

ALIBI = "its attention adds a bias for the distance of tokens (ALiBi)"
CHUNKED = "its attention is cut into chunks of fixed places"
STATEFUL = "some of its layers keep a state in place of keys (state-space or linear attention)"
ENCODER_DECODER = "it is an encoder with a decoder, and here a model is a decoder"
BOTH_WAYS = "it is an encoder, which reads text in both directions, and here a model is a decoder"
MEDIA = "it reads images or sound, and here a model reads text"
OWN_ATTENTION = "transformers computes its attention inside the model, where rows cannot be packed"
UNTESTED = "no test compares it with transformers"

_REFUSED_TYPES: Mapping[str, str] = {
    ALIBI: "bloom mpt",
    CHUNKED: "llama4 llama4_text",
    STATEFUL: (
        "bailing_hybrid bamba deepseek_v4 falcon_h1 falcon_mamba granitemoehybrid jamba"
        " kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5"
        " qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text"
        " recurrent_gemma rwkv xlstm zamba zamba2 zaya"
    ),
    ENCODER_DECODER: (
        "bart bigbird_pegasus blenderbot blenderbot-small led longt5 m2m_100 marian mbart mt5"
        " mvp pegasus pegasus_x plbart prophetnet switch_transformers t5 t5gemma trocr umt5"
    ),
    BOTH_WAYS: (
        "albert bert bert-generation big_bird camembert data2vec-text deberta deberta-v2"
        " distilbert electra ernie megatron-bert modernbert mpnet reformer rembert roberta"
        " roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod"
    ),
    MEDIA: (
        "emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 mllama moshi"
        " moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal whisper"
    ),
    OWN_ATTENTION: (
        "biogpt blt codegen cpmant falcon gpt_neo gpt_neox_japanese gptj inkling2_text"
        " inkling_text openai-gpt stablelm xglm"
    ),
}
"""The model types that cannot be used, by the reason."""


def _reasons_by_type() -> dict[str, str]:
    reasons: dict[str, str] = {}
    for reason, model_types in _REFUSED_TYPES.items():
        reasons |= dict.fromkeys(model_types.split(), reason)
    return reasons


REFUSED: Mapping[str, str] = _reasons_by_type()
"""Model type -> why it cannot be used."""

ROTARY = frozenset({"default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn"})
"""The kinds of rotary positions. Rows of `dynamic` and `longrope` end where the angles begin to
depend on the longest row of a batch (model_files.py, `positions_of`)."""

LAYERS = frozenset({"full_attention", "sliding_attention"})
"""The kinds of layers."""

_REFUSED_SETTINGS: Mapping[str, str] = {
    "is_encoder_decoder": ENCODER_DECODER,
    "add_cross_attention": ENCODER_DECODER,
    "vision_config": MEDIA,
    "audio_config": MEDIA,
    "alibi": ALIBI,
    "use_bidirectional_attention": BOTH_WAYS,
}
"""Settings that no base may have set, whatever its type."""


def refusal(config: Mapping[str, Any]) -> Refusal | None:
    """Why a base of this config.json cannot be used; None if it can."""
    return next(_find_refusals(config), None)


def _find_refusals(config: Mapping[str, Any]) -> Iterator[Refusal]:
    # The type comes first: its settings may mean something else in another architecture.
    model_type = str(config.get("model_type"))
    if model_type in REFUSED:
        yield Refusal(reason=f"{model_type!r}: {REFUSED[model_type]}", fix=_ANOTHER)
    for key, reason in _REFUSED_SETTINGS.items():
        if config.get(key):
            yield Refusal(reason=f"{key} in {model_type!r}: {reason}", fix=_ANOTHER)
    if model_type not in TESTED:
        fix = f"{_ANOTHER}, and says how one is added"
        yield Refusal(reason=f"{model_type!r}: {UNTESTED}", fix=fix)
    yield from _refuse_quantisation(config)
    yield from _refuse_layers(config)
    yield from _refuse_rotary(config)


def _refuse_quantisation(config: Mapping[str, Any]) -> Iterator[Refusal]:
    settings = config.get("quantization_config")
    if not settings:
        return
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    note = f" ({method})" if isinstance(method, str) else ""
    reason = f"quantization_config{note}: quantised weights can neither be trained nor compared"
    yield Refusal(reason=reason, fix="the base that these weights were quantised from")


def _refuse_layers(config: Mapping[str, Any]) -> Iterator[Refusal]:
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return
    known = " and ".join(sorted(LAYERS))
    for kind in kinds:
        if kind not in LAYERS:
            reason = f"a layer of {kind!r}: only those of {known} are known"
            yield Refusal(reason=reason, fix=_ANOTHER)


def _refuse_rotary(config: Mapping[str, Any]) -> Iterator[Refusal]:
    known = ", ".join(sorted(ROTARY))
    for kind, _ in rotary_of(config):
        if kind not in ROTARY:
            reason = f"rotary positions of kind {kind!r}: only {known} are known"
            yield Refusal(reason=reason, fix=_ANOTHER)
