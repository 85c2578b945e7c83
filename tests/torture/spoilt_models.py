"""Ways to spoil a model directory, and the cases of bad models that they make.

Owns: what is done to the files, and what the refusal has to say. Does not own: running (models.py).
"""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Spoil = Callable[[Path, random.Random], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to spoil a good model; `says` is what the refusal has to contain, `node` the name that
    it gives.
    """

    name: str
    spoil: Spoil
    says: str
    graph: str = "plain"
    node: str = "rollout"
    at_open: bool = False
    """Whether only the opened kernel can find it; such a case costs seconds."""


# --- ways to spoil --------------------------------------------------------------------------------


def nothing(folder: Path, draw: random.Random) -> None:
    """Good as it is: what is asked of it is wrong."""


def gone(folder: Path, draw: random.Random) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def a_file(folder: Path, draw: random.Random) -> None:
    gone(folder, draw)
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
        found = json.loads((folder / name).read_text())
        found = {k: v for k, v in (found | changes).items() if v is not None}
        (folder / name).write_text(json.dumps(found))

    return spoil


def cut_short(folder: Path, draw: random.Random) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: draw.randrange(1, len(data))])


def noise(folder: Path, draw: random.Random) -> None:
    (folder / "model.safetensors").write_bytes(draw.randbytes(4096))


def flipped_header(folder: Path, draw: random.Random) -> None:
    """A bit of the header's length, which then points elsewhere."""
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[draw.randrange(3)] ^= 1 << draw.randrange(8)
    (folder / "model.safetensors").write_bytes(bytes(data))


def with_weights(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Spoil:
    def spoil(folder: Path, draw: random.Random) -> None:
        from safetensors.torch import load_file, save_file

        found = change(load_file(folder / "model.safetensors"))
        save_file(
            {k: v.contiguous() for k, v in found.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )

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

        found = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        places = {tensor: names[i % 2] for i, tensor in enumerate(found)}
        for name in names[: 1 if lose else 2]:
            save_file(
                {t: found[t] for t, p in places.items() if p == name},
                folder / name,
                {"format": "pt"},
            )
        text = index or json.dumps({"metadata": {}, "weight_map": places})
        (folder / "model.safetensors.index.json").write_text(text)

    return spoil


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hostile",)


def hostile_pickle(folder: Path, draw: random.Random) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": _Hostile()}))


def scored(spoil: Spoil) -> Spoil:
    """With a score head, then spoilt."""

    def both(folder: Path, draw: random.Random) -> None:
        head(1, 0.5)(folder, draw)
        spoil(folder, draw)

    return both


CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
THREE_LAYERS = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}


def cases() -> list[Case]:
    """All of them; those that only an open kernel finds are last."""
    few = with_json(CONFIG, max_position_embeddings=16)
    return [
        Case(name="no such directory", spoil=gone, says="found nothing at"),
        Case(name="a file for a directory", spoil=a_file, says="found a file"),
        Case(name="an empty directory", spoil=empty, says="found an empty directory"),
        Case(name="no config.json", spoil=without(CONFIG), says="expected config.json"),
        Case(name="broken config.json", spoil=with_text(CONFIG, '{"model_type": '), says="expected JSON"),
        Case(name="config.json that is a list", spoil=with_text(CONFIG, "[1]"), says="expected a JSON object"),
        Case(name="config.json without a type", spoil=with_json(CONFIG, model_type=None), says="a model_type"),
        Case(name="sizes that are no numbers", spoil=with_json(CONFIG, hidden_size="32"), says="hidden_size"),
        Case(name="a dtype that is none in the files", spoil=with_json(CONFIG, dtype="float15"), says="'float15'"),
        Case(name="a dtype that is none in the graph", spoil=nothing, says="'float15'", graph="of_a_type", node=""),
        Case(name="no weights", spoil=without("model.safetensors"), says="expected weights"),
        Case(name="weights cut short", spoil=cut_short, says="expected"),
        Case(name="weights that are noise", spoil=noise, says="found no header"),
        Case(name="a bit of the header flipped", spoil=flipped_header, says="model.safetensors: expected"),
        Case(
            name="a Git LFS pointer",
            spoil=with_text("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
            says="Git LFS pointer",
        ),
        Case(name="a shard is missing", spoil=in_shards(lose=True), says="-of-00002.safetensors, found none"),
        Case(name="a broken index", spoil=in_shards(lose=False, index="{"), says="expected JSON"),
        Case(name="an embedding of another size", spoil=with_json(CONFIG, vocab_size=120), says="embed_tokens"),
        Case(name="a layer is missing", spoil=with_json(CONFIG, **THREE_LAYERS), says="none of layer 2"),
        Case(name="no tokenizer", spoil=without("tokenizer.json"), says="expected a tokenizer"),
        Case(name="no tokenizer settings", spoil=without(TOKENIZER), says="expected tokenizer_config.json"),
        Case(name="a broken tokenizer", spoil=with_text("tokenizer.json", "{"), says="tokenizer.json: expected JSON"),
        Case(name="ids beyond the embedding", spoil=fewer_embeddings, says="beyond it"),
        Case(
            name="no end of sequence",
            spoil=endless,
            says="found no eos_token",
        ),
        Case(name="an end that is no id", spoil=with_json(GENERATION, eos_token_id="</s>"), says="to be token ids"),
        Case(name="an end beyond the vocabulary", spoil=with_json(GENERATION, eos_token_id=151645), says="151645"),
        Case(name="broken generation_config.json", spoil=with_text(GENERATION, "{"), says="expected JSON"),
        Case(
            name="messages without a template",
            spoil=without("chat_template.jinja"),
            says="no chat template",
            graph="chat",
        ),
        Case(name="answers beyond the positions", spoil=few, says="has 16 positions", graph="long_answers"),
        Case(name="a reward model without a head", spoil=nothing, says="score head", graph="judged", node="judge"),
        Case(name="a critic without a head", spoil=nothing, says="score head", graph="valued", node="critic"),
        Case(name="a head of two numbers", spoil=head(2, 0.5), says="of one number", graph="judged", node="judge"),
        Case(name="a teacher with fewer positions", spoil=with_json(CONFIG, max_position_embeddings=4), says="teacher",
             graph="taught"),
        # What only an open kernel finds.
        Case(name="an unknown architecture", spoil=with_json(CONFIG, model_type="quux"), says="quux", at_open=True),
        Case(name="an unknown activation", spoil=with_json(CONFIG, hidden_act="foo"), says="foo", at_open=True),
        Case(name="a tensor of another shape", spoil=with_weights(shorter), says="found (31,)", at_open=True),
        Case(name="a tensor is missing", spoil=with_weights(headless), says="model.norm.weight", at_open=True),
        Case(name="more layers than the config", spoil=with_json(CONFIG, **ONE_LAYER), says="layers.1", at_open=True),
        Case(name="NaN", spoil=filled("model.norm.weight", float("nan")), says="found nan", at_open=True),
        Case(name="infinity", spoil=filled("model.norm.weight", float("inf")), says="found inf", at_open=True),
        Case(name="a head of zeros", spoil=head(1, 0.0), says="all zeros", graph="judged", node="judge", at_open=True),
        Case(name="NaN in a head", spoil=scored(filled("score.weight", float("nan"))), says="nan", graph="valued",
             node="critic", at_open=True),
        Case(name="weights that run code", spoil=hostile_pickle, says="expected a model", at_open=True),
        Case(name="a tokenizer of nothing", spoil=with_text("tokenizer.json", "{}"), says="tokenizer", at_open=True),
        Case(name="a template that does not parse", spoil=with_text("chat_template.jinja", "{% for %}"),
             says="chat template", graph="chat", at_open=True),
        Case(name="prompts beyond the positions", spoil=few, says="expected at most 12 prompt tokens",
             graph="long_prompts", at_open=True),
        Case(name="no prompt fits", spoil=few, says="gave", graph="no_prompt_left", at_open=True),
        Case(name="demonstrations beyond the positions", spoil=few, says="expected at most 16 tokens", graph="shown",
             node="demonstrations", at_open=True),
    ]  # fmt: skip


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
    return weights | {"model.norm.weight": weights["model.norm.weight"][:31]}


def headless(weights: dict[str, Any]) -> Mapping[str, Any]:
    return {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
