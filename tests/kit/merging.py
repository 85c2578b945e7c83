"""A tokenizer that splits text otherwise than a model wrote it."""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.kit.models import CHARACTERS, TEMPLATE, save_tiny

PAIRS = [first + second for first in string.ascii_lowercase for second in string.ascii_lowercase]
"""Each is a token; a model may write it as one, or as its two letters."""


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character, then for each pair of small letters, then <pad> and <eos>."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = [letters.pre_tokenize_str(character)[0][0] for character in CHARACTERS]
    vocabulary = {name: index for index, name in enumerate([*names, *PAIRS, "<pad>", "<eos>"])}
    inner = Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in PAIRS]))
    inner.pre_tokenizer = letters
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_merging(directory: Path) -> str:
    """A random model with this tokenizer."""
    tokenizer = merging_tokenizer()
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    save_tiny(directory, vocab_size=len(tokenizer), **ends)
    tokenizer.save_pretrained(directory)
    return str(directory)
