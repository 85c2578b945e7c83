"""Mistakes in models: what a directory lacks, and what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.mistakes import Mistake, changed


def config(**changes: Any) -> Callable[[Path], None]:
    """Change the model's config.json; None takes a key out."""

    def change(folder: Path) -> None:
        path = folder / "model" / "config.json"
        found = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))

    return change


def adapter(folder: Path) -> None:
    """What PEFT saves: no config.json, no weights of the model."""
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def pointer(folder: Path) -> None:
    """What git leaves where it did not fetch large files."""
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1000\n"
    (folder / "model" / "model.safetensors").write_text(text)


def without(name: str) -> Callable[[Path], None]:
    """Take a file out of the model's directory."""

    def change(folder: Path) -> None:
        (folder / "model" / name).unlink()

    return change


def cut_short(folder: Path) -> None:
    """A download that was broken off."""
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


MISTAKES = (
    Mistake(
        what="A model directory that is not there",
        command=changed("--base model", "--base ./modle"),
        why="A name without `./` that is no folder here is looked for on the hub.",
    ),
    Mistake(
        what="A file in place of a model directory",
        command=changed("--base model", "--base model/model.safetensors"),
        why="A model is the whole directory: config.json, weights, tokenizer.",
    ),
    Mistake(
        what="A LoRA adapter in place of a model",
        command=changed("--base model", "--base adapter"),
        change=adapter,
        why="An adapter has no weights of its own model. Name its base, and begin with the adapter"
        " (`start`), or merge it first.",
    ),
    Mistake(
        what="A model without a tokenizer",
        change=without("tokenizer.json"),
        why="Copy the tokenizer's files of the model that it was made from.",
    ),
    Mistake(
        what="Weights that git did not fetch",
        change=pointer,
        why="`git lfs pull` in the model's directory fetches them.",
    ),
    Mistake(
        what="A download that was broken off",
        change=cut_short,
        why="Download the file again.",
    ),
    Mistake(
        what="Answers longer than the positions of the model",
        command=changed("--max-tokens 8", "--max-tokens 100000"),
        why="The model was trained on so many positions; beyond them its answers mean nothing.",
    ),
    Mistake(
        what="A model that reads and does not write",
        change=config(model_type="bert", architectures=["BertModel"]),
        why="Only causal language models generate; [models.md](models.md) lists what is tested.",
    ),
    Mistake(
        what="A quantised model",
        change=config(quantization_config={"quant_method": "gptq", "bits": 4}),
        why="Training needs whole weights: take the model that it was quantised from.",
    ),
    Mistake(
        what="A tokenizer with more words than the model",
        change=config(vocab_size=50),
        why="The tokenizer is another model's, or words were added and the model was not resized"
        " (`resize_token_embeddings` of transformers).",
    ),
)
