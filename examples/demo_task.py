"""The demo's task: words to spell backward, a character model, and an honest reward.

Owns: the data (reasoning-gym's spell_backward, split by word), the model directory, the
reward. Does not own: the algorithm (graphs/), the demo's steps (demo.py).

A randomly initialised model cannot learn this from rewards alone, so it is warm-started on a
careless teacher and stopped early: it must not be good before reinforcement begins.
"""

from __future__ import annotations

import hashlib
import random
import string
from pathlib import Path

import character_model
import pyarrow as pa
import pyarrow.parquet as pq
from character_model import EOS, PAD

from operators.tasks import exact_match, task_table

TOKENS = (*(chr(c) for c in range(32, 127)), "\n", PAD, EOS)
Row = dict[str, str]

HELD_OUT_SHARE = 10
"""One word in this many is never trained on."""


def held_out(word: str) -> bool:
    """Whether a word belongs to the held-out tenth, by a hash of its case-folded letters."""
    return hashlib.sha256(word.casefold().encode()).digest()[0] % HELD_OUT_SHARE == 0


def words(count: int, seed: int) -> dict[str, Row]:
    """Distinct words of 3 to 6 letters, each with its row of prompt, answer, entry and task.

    Different seeds of the task overlap (item i uses Random(seed + i)), so a split by seed would
    not separate them.
    """
    words = "min_word_len=3&max_word_len=6&suffix=%0A"
    data = f"reasoning_gym:spell_backward?size={count}&seed={seed}&{words}"
    found: dict[str, Row] = {}
    for row in task_table(data).to_pylist():
        found.setdefault(row["answer"][::-1], row)
    return found


def write_prompts(path: Path, rows: list[Row]) -> None:
    """TRL-shaped Parquet: the prompt, and what the scorer needs."""
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_demonstrations(
    path: Path, rows: list[Row], *, lazy: float, noise: float, copies: int, seed: int
) -> None:
    """Answers of a careless teacher, who repeats the word with probability `lazy` instead of
    spelling it backward. Each letter is then replaced by a random one with probability `noise`.
    """
    rng = random.Random(seed)
    prompts, answers = [], []
    for _ in range(copies):
        for row in rows:
            right = row["answer"]
            said = right[::-1] if rng.random() < lazy else right
            prompts.append(row["prompt"])
            answers.append(
                "".join(
                    rng.choice(string.ascii_lowercase) if rng.random() < noise else c for c in said
                )
            )
    pq.write_table(pa.table({"prompt": prompts, "completion": answers}), path)


def make_model(path: Path, *, layers: int, hidden: int, seed: int) -> None:
    """An untrained model."""
    character_model.make_model(
        path, TOKENS, hidden=hidden, mlp=3 * hidden, layers=layers, seed=seed
    )


def permuted_exact_match(completions: list[str], entry: list[str], task: list[str]) -> list[float]:
    """The control: the rewards of exact_match, given to other rows of the same call."""
    rewards = exact_match(completions, entry, task)
    random.Random(f"{len(completions)}{completions[0]}").shuffle(rewards)
    return rewards
