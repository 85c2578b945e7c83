"""A task whose answers differ in length, and a small model that was taught to write them.

Owns: digits to be sorted pass by pass, the teacher's habits, the model and the ranker's base. Does
not own: what is measured with them (length_ranks.py).

`5291=` is answered `2519>2159>1259.`: the digits after each pass of bubble sort, so that the length
depends on how many digits there are and on their order. The teacher is no clockwork: one answer in
five names the sorted digits at once, and one in five does all of its work twice. What the model
makes of that is its own.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import Qwen2ForCausalLM

from benchmarks.settings import EOS, Pair, character_tokenizer, small_config

TOKENS = (*string.digits, "=", ">", ".", EOS)
POSITIONS = 192
LONGEST = 144
"""Most tokens of an answer; the teacher's have at most 129."""
DIGITS = (2, 8)
SHORT, TWICE = 0.2, 0.2
"""How often an answer leaves its work out, or does it twice."""


def digits_of(rng: random.Random) -> str:
    """Draw a prompt's digits."""
    count = rng.randint(*DIGITS)
    return "".join(rng.choices(string.digits, k=count))


def list_passes(digits: str) -> Iterator[str]:
    """The digits after each pass of bubble sort, the last of which are sorted."""
    current = list(digits)
    while True:
        for place in range(len(current) - 1):
            if current[place] > current[place + 1]:
                current[place : place + 2] = current[place + 1], current[place]
        yield "".join(current)
        if current == sorted(current):
            return


def answer(digits: str, rng: random.Random) -> str:
    """What the teacher writes: the passes, their end alone, or all of them twice."""
    passes = list(list_passes(digits))
    habit = rng.random()
    if habit < SHORT:
        passes = passes[-1:]
    elif habit < SHORT + TWICE:
        passes = passes * 2
    return ">".join(passes) + "."


def sorts_digits(completions: list[str], prompts: list[str]) -> list[float]:
    """1 for an answer that ends in the sorted digits."""
    rewards: list[float] = []
    for completion, prompt in zip(completions, prompts, strict=True):
        last = completion.rstrip(".").rpartition(">")[2]
        rewards.append(float(last == "".join(sorted(prompt.rstrip("=")))))
    return rewards


def make_model(path: Path, steps: int) -> None:
    """Teach a model of two layers on what the teacher writes, and save it."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer(TOKENS)
    model = Qwen2ForCausalLM(small_config(TOKENS, POSITIONS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    rng = random.Random(1)
    for _ in range(steps):
        pairs: list[Pair] = []
        for _ in range(64):
            digits = digits_of(rng)
            pairs.append((f"{digits}=", answer(digits, rng)))
        ids, labels = _encode(pairs)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        slower.step()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _encode(pairs: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and labels with -100 outside the answer, each [rows, longest], padded behind."""
    place = {token: number for number, token in enumerate(TOKENS)}
    end = place[EOS]
    longest = 1 + max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.full((len(pairs), longest), end)
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(pairs):
        written = torch.tensor([place[letter] for letter in prompt + answer] + [end])
        ids[row, : len(written)] = written
        labels[row, len(prompt) : len(written)] = written[len(prompt) :]
    return ids, labels


def make_ranker(path: Path) -> None:
    """Save a model of two layers of 64 random numbers, with the same tokenizer."""
    torch.manual_seed(1)
    config = small_config(TOKENS, POSITIONS)
    config.hidden_size, config.intermediate_size = 64, 192
    Qwen2ForCausalLM(config).save_pretrained(path)
    character_tokenizer(TOKENS).save_pretrained(path)


def draw_prompts(count: int, seed: int, without: frozenset[str] = frozenset()) -> list[str]:
    """Draw prompts that differ from each other and from those of `without`."""
    rng = random.Random(seed)
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        prompt = f"{digits_of(rng)}="
        if prompt not in without:
            drawn[prompt] = None
    return list(drawn)


def save_prompts(path: Path, prompts: list[str]) -> None:
    """Write the data of a run."""
    pq.write_table(pa.table({"prompt": prompts}), path)
