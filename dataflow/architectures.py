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
    """Why a base cannot be used. found: a model type or setting, and what is wrong with it."""

    found: str
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

_ANOTHER = f"another base; {PAGE} lists those that work"

ALIBI = "its attention adds a bias for the distance of tokens (ALiBi)"
CHUNKED = "its attention is cut into chunks of fixed places"
STATEFUL = "some of its layers keep a state in place of keys (state-space or linear attention)"
ENCODER_DECODER = "it is an encoder with a decoder, and here a model is a decoder"
BOTH_WAYS = "it is an encoder, which reads text in both directions, and here a model is a decoder"
MEDIA = "it reads images or sound, and here a model reads text"
OWN_ATTENTION = "transformers computes its attention inside the model, where rows cannot be packed"
UNTESTED = "no test compares it with transformers"

REFUSED: Mapping[str, str] = {
    model_type: reason
    for reason, types in {
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
    }.items()
    for model_type in types.split()
}
"""Why, by model type."""

ROTARY = frozenset({"default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn"})
"""The kinds of rotary positions. Rows of `dynamic` and `longrope` end where the angles begin to
depend on the longest row of a batch (model_files.py, `positions_of`)."""

LAYERS = frozenset({"full_attention", "sliding_attention"})
"""The kinds of layers."""

_SET: Mapping[str, str] = {
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
    return next(_refusals(config), None)


def _refusals(config: Mapping[str, Any]) -> Iterator[Refusal]:
    """The type first: its settings may mean something else in another architecture."""
    model_type = str(config.get("model_type"))
    for reason in [REFUSED[model_type]] if model_type in REFUSED else ():
        yield Refusal(found=f"{model_type!r}: {reason}", fix=_ANOTHER)
    for key, reason in _SET.items():
        if config.get(key):
            yield Refusal(found=f"{key} in {model_type!r}: {reason}", fix=_ANOTHER)
    if model_type not in TESTED:
        test = f"{_ANOTHER}, and says how one is added"
        yield Refusal(found=f"{model_type!r}: {UNTESTED}", fix=test)
    yield from _quantised(config)
    yield from _layers(config)
    yield from _rotary(config)


def _quantised(config: Mapping[str, Any]) -> Iterator[Refusal]:
    given = config.get("quantization_config")
    if given:
        method = given.get("quant_method") if isinstance(given, Mapping) else None
        how = f" ({method})" if isinstance(method, str) else ""
        found = f"quantization_config{how}: quantised weights can neither be trained nor compared"
        yield Refusal(found=found, fix="the base that these weights were quantised from")


def _layers(config: Mapping[str, Any]) -> Iterator[Refusal]:
    kinds = config.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else ():
        if kind not in LAYERS:
            found = f"a layer of {kind!r}: only those of {' and '.join(sorted(LAYERS))} are known"
            yield Refusal(found=found, fix=_ANOTHER)


def _rotary(config: Mapping[str, Any]) -> Iterator[Refusal]:
    for kind, _ in rotary_of(config):
        if kind not in ROTARY:
            found = f"rotary positions of kind {kind!r}: only {', '.join(sorted(ROTARY))} are known"
            yield Refusal(found=found, fix=_ANOTHER)
