"""Small data files, and the files of a tokenizer."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any


def save_jsonl(path: Path, *rows: Any) -> str:
    """Write a line for each row: JSON, or a text unchanged; returns the path as a string."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def save_character_tokenizer(folder: Path) -> str:
    """A tokenizer's files as `models.character_tokenizer` saves them, without a chat template and
    without importing torch: a token for each printable ASCII character, <pad> and <eos>.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = [*string.printable[:95], "\n"]
    shown = [letters.pre_tokenize_str(character)[0][0] for character in characters]
    vocabulary = {text: number for number, text in enumerate([*shown, "<pad>", "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = letters
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)
