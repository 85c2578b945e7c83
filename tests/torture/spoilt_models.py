"""Ways to spoil a model directory, and for each case what the refusal has to say.

More of what the check finds in a directory: tests/unit/test_check_bases.py.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
WEIGHTS, NORM = "model.safetensors", "model.norm.weight"
Spoil = Callable[[Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """A spoilt model. says, node: named in the refusal. at_open: only the opened kernel sees it."""

    name: str
    spoil: Spoil
    says: str
    graph: str = "plain"
    node: str = "rollout"
    at_open: bool = False


def nothing(folder: Path) -> None:
    """Good as it is: what is asked of it is wrong."""


def without(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def with_text(name: str, text: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).write_text(text)

    return spoil


def with_json(name: str, **changes: Any) -> Spoil:
    """Change fields of a JSON file; None takes one out."""

    def spoil(folder: Path) -> None:
        fields = json.loads((folder / name).read_text()) | changes
        kept = {key: value for key, value in fields.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return spoil


def with_weights(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Spoil:
    def spoil(folder: Path) -> None:
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


def head(value: float) -> Spoil:
    import torch

    return with_weights(lambda w: w | {"score.weight": torch.full((1, 32), value)})


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hostile",)


def hostile_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": RunsCode()}))


def broken_index(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text("{")


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
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
Rows = list[tuple[Any, ...]]
"""(name, what is refused, how it is spoilt[, graph[, node]]); else `plain` and `rollout`."""


def _early() -> Rows:
    """What the check finds."""
    return [
        ("config.json that is a list", "expected a JSON object", with_text(CONFIG, "[1]")),
        ("an unknown architecture", "quux", with_json(CONFIG, model_type="quux")),
        ("sizes that are no numbers", "hidden_size", with_json(CONFIG, hidden_size="32")),
        ("a dtype that is none in the files", "'float15'", with_json(CONFIG, dtype="float15")),
        ("a dtype that is none in the graph", "'float15'", nothing, "of_a_type", ""),
        ("a broken index", "expected JSON", broken_index),
        ("no tokenizer settings", "expected tokenizer_config.json", without(TOKENIZER)),
        ("a broken tokenizer", "tokenizer.json: expected JSON", with_text("tokenizer.json", "{")),
        ("an end beyond the vocabulary", "151645", with_json(GENERATION, eos_token_id=151645)),
        ("broken generation_config.json", "expected JSON", with_text(GENERATION, "{")),
    ]  # fmt: skip


def _late() -> Rows:
    """What only an open kernel finds."""
    nan, template = float("nan"), with_text("chat_template.jinja", "{% for %}")
    return [
        ("an unknown activation", "foo", with_json(CONFIG, hidden_act="foo")),
        ("a tensor of another shape", "found (31,)", with_weights(shorter)),
        ("a tensor is missing", NORM, with_weights(headless)),
        ("more layers than the config", "layers.1", with_json(CONFIG, **ONE_LAYER)),
        ("NaN", "found nan", filled(NORM, nan)),
        ("infinity", "found inf", filled(NORM, float("inf"))),
        ("a head of zeros", "all zeros", head(0.0), "judged", "judge"),
        ("NaN in a head", "nan", head(nan), "valued", "critic"),
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
