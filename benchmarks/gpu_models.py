"""The Models, prompts and graph of the benchmarks of one card.

Owns: the shapes, model directories with random weights, and GRPO on them. Does not own: what is
measured (gpu_train.py, gpu_generate.py, gpu_runs.py).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.predicted_cases import prompt_file
from benchmarks.rewards import share_of_digits
from benchmarks.settings import TEXT_TOKENS, character_tokenizer
from dataflow.adapters import Adapter
from dataflow.graph import Graph
from dataflow.model import Model
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train


@dataclass(frozen=True, slots=True, kw_only=True)
class CardModel:
    """A Qwen2 of random weights. head: numbers of each of its heads."""

    name: str
    layers: int
    hidden: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


QWEN_1_5B = CardModel(
    name="1.5B",
    layers=28,
    hidden=1536,
    heads=12,
    key_heads=2,
    intermediate=8960,
    vocabulary=151_936,
)
"""The shape of Qwen2.5-1.5B, whose embedding and head are one matrix."""
TINY = CardModel(
    name="tiny",
    layers=2,
    hidden=64,
    heads=4,
    key_heads=2,
    intermediate=128,
    vocabulary=len(TEXT_TOKENS),
)
"""For the short form, on a CPU."""
_CONTEXT = 131_072
_NEW = ".new"


def card_model(*, quick: bool) -> CardModel:
    """The Model that is measured."""
    return TINY if quick else QWEN_1_5B


def make_base(folder: Path, model: CardModel) -> str:
    """Make the Model's directory in this folder, unless it is there; returns it. The weights are
    drawn on the card, where there is one.
    """
    base = folder / model.name
    if not base.is_dir():
        unfinished = folder / f"{model.name}{_NEW}"
        # Of a process that was killed meanwhile.
        shutil.rmtree(unfinished, ignore_errors=True)
        _save_model(unfinished, model)
        os.replace(unfinished, base)
    return str(base)


def _save_model(base: Path, model: CardModel) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    named = (f"<{at}>" for at in range(model.vocabulary - len(TEXT_TOKENS)))
    tokens = (*TEXT_TOKENS[:-1], *named, TEXT_TOKENS[-1])
    config = Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_heads,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=len(tokens) - 1,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        module = Qwen2ForCausalLM(config)
    module.to(getattr(torch, model.dtype)).save_pretrained(base)
    character_tokenizer(tokens).save_pretrained(base)


def make_prompts(folder: Path, *, rows: int, least: int, most: int) -> str:
    """Make a file of prompts of so many tokens, a letter each; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    return prompt_file(folder / f"prompts_{least}_{most}.parquet", rows, least, most)


def card_graph(
    base: str,
    data: str,
    model: CardModel,
    *,
    batch: int,
    n: int,
    max_tokens: int,
    adapter: Adapter = None,
) -> Graph:
    """GRPO without a reference: generation and training of one Model. batch: prompts of a Step, n:
    answers to each, of max_tokens at most.
    """
    policy = Model("policy", base, trainable=True, dtype=model.dtype, adapter=adapter)
    prompt = prompts(data, batch=batch)
    rollout = generate(policy, prompt, n=n, max_tokens=max_tokens, name="rollout")
    score = reward(share_of_digits, rollout, name="score")
    advantage = group_advantage(rollout, score, name="advantage")
    loss = clipped_policy_loss(advantage)
    return Graph("card", train(policy, rollout, loss=loss, lr=1e-6))
