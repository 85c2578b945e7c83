"""Tiny random models and a character tokenizer, saved as Hugging Face directories."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CHARACTERS = string.printable[:95] + "\n"
PAD, EOS = len(CHARACTERS), len(CHARACTERS) + 1
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
KINDS: dict[str, Any] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: printable ASCII, newline, then <pad> and <eos>; 98 ids, and a chat
    template.

    It is byte-level BPE without merges because AutoTokenizer, next to a Qwen2 config, makes a
    Qwen2Tokenizer whatever tokenizer.json says: that one then does the same. A word-level one
    would silently lose its spaces there.
    """
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {letters.pre_tokenize_str(c)[0][0]: i for i, c in enumerate(CHARACTERS)}
    inner = Tokenizer(models.BPE(vocabulary | {"<pad>": PAD, "<eos>": EOS}, []))
    inner.pre_tokenizer = letters
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_tiny(
    directory: Path, kind: str = "qwen2", *, seed: int = 0, layers: int = 2, **changes: Any
) -> str:
    """A random model of one of KINDS (only qwen2 ties embeddings) with the character tokenizer."""
    config_class, model_class = KINDS[kind]
    shape = {
        "vocab_size": len(CHARACTERS) + 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": kind == "qwen2",
        "initializer_range": 0.3,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    module = model_class(config_class(**(shape | changes)))
    module.save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return str(directory)


def save_critic(directory: Path, base: str) -> str:
    """The base with a random score head instead of its vocabulary head."""
    module = AutoModelForTokenClassification.from_pretrained(base, num_labels=1)
    module.save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return str(directory)
