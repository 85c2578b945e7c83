"""Ways to spoil a model directory, and for each case what the refusal has to say."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
WEIGHTS, NORM = "model.safetensors", "model.norm.weight"
Spoil = Callable[[Path, random.Random], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """A spoilt model. says, node: named in the refusal. at_open: only the opened kernel sees it."""

    name: str
    spoil: Spoil
    says: str
    graph: str = "plain"
    node: str = "rollout"
    at_open: bool = False


def nothing(folder: Path, draw: random.Random) -> None:
    """Good as it is: what is asked of it is wrong."""


def no_directory(folder: Path, draw: random.Random) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def a_file(folder: Path, draw: random.Random) -> None:
    no_directory(folder, draw)
    folder.write_text("GGUF")


def empty(folder: Path, draw: random.Random) -> None:
    for path in folder.iterdir():
        path.unlink()


def without(name: str) -> Spoil:
    return lambda folder, draw: (folder / name).unlink()


def with_text(name: str, text: str) -> Spoil:
    def spoil(folder: Path, draw: random.Random) -> None:
        (folder / name).write_text(text)

    return spoil


def with_json(name: str, **changes: Any) -> Spoil:
    """Change fields of a JSON file; None takes one out."""

    def spoil(folder: Path, draw: random.Random) -> None:
        fields = json.loads((folder / name).read_text()) | changes
        kept = {key: value for key, value in fields.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return spoil


def cut_short(folder: Path, draw: random.Random) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: draw.randrange(1, len(data))])


def noise(folder: Path, draw: random.Random) -> None:
    (folder / WEIGHTS).write_bytes(draw.randbytes(4096))


def flipped_header(folder: Path, draw: random.Random) -> None:
    """A bit of the header's length, which then points elsewhere."""
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[draw.randrange(3)] ^= 1 << draw.randrange(8)
    (folder / WEIGHTS).write_bytes(bytes(data))


def with_weights(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Spoil:
    def spoil(folder: Path, draw: random.Random) -> None:
        from safetensors.torch import load_file, save_file

        weights = change(load_file(folder / WEIGHTS))
        whole = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(whole, folder / WEIGHTS, {"format": "pt"})

    return spoil


def filled(name: str, value: float) -> Spoil:
    """One number of a tensor becomes another."""

    def change(weights: dict[str, Any]) -> Mapping[str, Any]:
        weights[name].view(-1)[3] = value
        return weights

    return with_weights(change)


def head(rows: int, value: float) -> Spoil:
    import torch

    return with_weights(lambda w: w | {"score.weight": torch.full((rows, 32), value)})


def in_shards(*, lose: bool, index: str = "") -> Spoil:
    def spoil(folder: Path, draw: random.Random) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        places = {tensor: names[i % 2] for i, tensor in enumerate(weights)}
        for name in names[: 1 if lose else 2]:
            shard = {tensor: weights[tensor] for tensor in weights if places[tensor] == name}
            save_file(shard, folder / name, {"format": "pt"})
        text = index or json.dumps({"metadata": {}, "weight_map": places})
        (folder / f"{WEIGHTS}.index.json").write_text(text)

    return spoil


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hostile",)


def hostile_pickle(folder: Path, draw: random.Random) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": RunsCode()}))


def scored(spoil: Spoil) -> Spoil:
    """With a score head, then spoilt."""

    def both(folder: Path, draw: random.Random) -> None:
        head(1, 0.5)(folder, draw)
        spoil(folder, draw)

    return both


def endless(folder: Path, draw: random.Random) -> None:
    """No file says what ends an answer."""
    settings = json.loads((folder / TOKENIZER).read_text()) | {"eos_token": None}
    (folder / TOKENIZER).write_text(json.dumps(settings))
    with_json(GENERATION, eos_token_id=None)(folder, draw)


def fewer_embeddings(folder: Path, draw: random.Random) -> None:
    """The weights and the config agree; the tokenizer knows more."""
    with_json(CONFIG, vocab_size=64)(folder, draw)
    with_json(GENERATION, eos_token_id=5)(folder, draw)
    with_weights(lambda w: w | {"model.embed_tokens.weight": w["model.embed_tokens.weight"][:64]})(
        folder, draw
    )


def shorter(weights: dict[str, Any]) -> Mapping[str, Any]:
    return weights | {NORM: weights[NORM][:31]}


def headless(weights: dict[str, Any]) -> Mapping[str, Any]:
    return {name: tensor for name, tensor in weights.items() if name != NORM}


def cases() -> list[ModelCase]:
    """All of them; those that only an open kernel finds are last."""
    return [
        *(_case(name, says, spoil, how) for name, says, spoil, *how in _early()),
        *(_case(name, says, spoil, how, at_open=True) for name, says, spoil, *how in _late()),
    ]


def _case(name: str, says: str, spoil: Spoil, how: list[str], at_open: bool = False) -> ModelCase:
    graph, node = (*how, *("plain", "rollout")[len(how) :])
    return ModelCase(name=name, spoil=spoil, says=says, graph=graph, node=node, at_open=at_open)


FEW = with_json(CONFIG, max_position_embeddings=16)
THREE_LAYERS = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
Rows = list[tuple[Any, ...]]
"""(name, what is refused, how it is spoilt[, graph[, node]]); else `plain` and `rollout`."""


def _early() -> Rows:
    """What the check finds."""
    return [
        ("no such directory", "found nothing at", no_directory),
        ("a file for a directory", "found a file", a_file),
        ("an empty directory", "found an empty directory", empty),
        ("no config.json", "expected config.json", without(CONFIG)),
        ("broken config.json", "expected JSON", with_text(CONFIG, '{"model_type": ')),
        ("config.json that is a list", "expected a JSON object", with_text(CONFIG, "[1]")),
        ("config.json without a type", "a model_type", with_json(CONFIG, model_type=None)),
        ("an unknown architecture", "quux", with_json(CONFIG, model_type="quux")),
        ("sizes that are no numbers", "hidden_size", with_json(CONFIG, hidden_size="32")),
        ("a dtype that is none in the files", "'float15'", with_json(CONFIG, dtype="float15")),
        ("a dtype that is none in the graph", "'float15'", nothing, "of_a_type", ""),
        ("no weights", "expected weights", without(WEIGHTS)),
        ("weights cut short", "expected", cut_short),
        ("weights that are noise", "found no header", noise),
        ("a bit of the header flipped", f"{WEIGHTS}: expected", flipped_header),
        ("a Git LFS pointer", "Git LFS pointer", with_text(WEIGHTS, LFS)),
        ("a shard is missing", "-of-00002.safetensors, found none", in_shards(lose=True)),
        ("a broken index", "expected JSON", in_shards(lose=False, index="{")),
        ("an embedding of another size", "embed_tokens", with_json(CONFIG, vocab_size=120)),
        ("a layer is missing", "none of layer 2", with_json(CONFIG, **THREE_LAYERS)),
        ("no tokenizer", "expected a tokenizer", without("tokenizer.json")),
        ("no tokenizer settings", "expected tokenizer_config.json", without(TOKENIZER)),
        ("a broken tokenizer", "tokenizer.json: expected JSON", with_text("tokenizer.json", "{")),
        ("ids beyond the embedding", "beyond it", fewer_embeddings),
        ("no end of sequence", "found no eos_token", endless),
        ("an end that is no id", "to be token ids", with_json(GENERATION, eos_token_id="</s>")),
        ("an end beyond the vocabulary", "151645", with_json(GENERATION, eos_token_id=151645)),
        ("broken generation_config.json", "expected JSON", with_text(GENERATION, "{")),
        ("messages without a template", "no chat template", without("chat_template.jinja"), "chat"),
        ("answers beyond the positions", "has 16 positions", FEW, "long_answers"),
        ("a reward model without a head", "score head", nothing, "judged", "judge"),
        ("a critic without a head", "score head", nothing, "valued", "critic"),
        ("a head of two numbers", "of one number", head(2, 0.5), "judged", "judge"),
        (
            "a teacher with fewer positions", "teacher",
            with_json(CONFIG, max_position_embeddings=4), "taught",
        ),
    ]  # fmt: skip


def _late() -> Rows:
    """What only an open kernel finds."""
    nan, template = float("nan"), with_text("chat_template.jinja", "{% for %}")
    nan_in_a_head = scored(filled("score.weight", nan))
    return [
        ("an unknown activation", "foo", with_json(CONFIG, hidden_act="foo")),
        ("a tensor of another shape", "found (31,)", with_weights(shorter)),
        ("a tensor is missing", NORM, with_weights(headless)),
        ("more layers than the config", "layers.1", with_json(CONFIG, **ONE_LAYER)),
        ("NaN", "found nan", filled(NORM, nan)),
        ("infinity", "found inf", filled(NORM, float("inf"))),
        ("a head of zeros", "all zeros", head(1, 0.0), "judged", "judge"),
        ("NaN in a head", "nan", nan_in_a_head, "valued", "critic"),
        ("weights that run code", "expected a model", hostile_pickle),
        ("a tokenizer of nothing", "tokenizer", with_text("tokenizer.json", "{}")),
        ("a template that does not parse", "chat template", template, "chat"),
        ("prompts beyond the positions", "expected at most 12 prompt tokens", FEW, "long_prompts"),
        ("no prompt fits", "gave", FEW, "no_prompt_left"),
        (
            "demonstrations beyond the positions", "expected at most 16 tokens",
            FEW, "shown", "demonstrations",
        ),
    ]  # fmt: skip
