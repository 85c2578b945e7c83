"""The demo's task: words to spell backward, a character model, and an honest reward.

Owns: the data (reasoning-gym's spell_backward, split by word), the model directory, the
reward. Does not own: the algorithm (graphs/) or the demo's course (demo.py).

A model of random weights cannot learn this from rewards alone, so it is warm-started on a
noisy teacher and stopped early: it must not be good before reinforcement begins.
"""

from __future__ import annotations

import hashlib
import random
import string
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import reasoning_gym
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

EOS, PAD = "<eos>", "<pad>"
TOKENS = (*(chr(c) for c in range(32, 127)), "\n", PAD, EOS)
HELD_OUT_SHARE = 10
"""One word in this many is never trained on."""


def held_out(word: str) -> bool:
    """Whether a word belongs to the held-out tenth, by a hash of its case-folded letters."""
    return hashlib.sha256(word.casefold().encode()).digest()[0] % HELD_OUT_SHARE == 0


def words(count: int, seed: int) -> dict[str, tuple[str, str]]:
    """Distinct words of 3 to 6 letters as word -> (question, answer), in the order in which the task gives them.

    Different seeds of the task overlap (item i uses Random(seed + i)), so a split by seed would not be one.
    """
    task = reasoning_gym.create_dataset("spell_backward", seed=seed, size=count, min_word_len=3, max_word_len=6)
    found: dict[str, tuple[str, str]] = {}
    for item in task:
        found.setdefault(item["metadata"]["word"], (item["question"], item["answer"]))
    return found


def write_prompts(path: Path, rows: list[tuple[str, str]]) -> None:
    """Questions with a closing newline, and their answers, as TRL-shaped Parquet."""
    questions, answers = zip(*rows, strict=True)
    pq.write_table(pa.table({"prompt": [q + "\n" for q in questions], "answer": list(answers)}), path)


def write_demonstrations(path: Path, rows: list[tuple[str, str]], *, noise: float, copies: int, seed: int) -> None:
    """Answers of a noisy teacher: each letter is replaced by a random one with probability `noise`."""
    rng = random.Random(seed)
    prompts, answers = [], []
    for _ in range(copies):
        for question, answer in rows:
            letters = (rng.choice(string.ascii_lowercase) if rng.random() < noise else c for c in answer)
            prompts.append(question + "\n")
            answers.append("".join(letters))
    pq.write_table(pa.table({"prompt": prompts, "completion": answers}), path)


def make_model(path: Path, *, layers: int, hidden: int, seed: int) -> None:
    """A Qwen2 directory of random weights with a character tokenizer."""
    import torch

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=3 * hidden,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=TOKENS.index(PAD),
        eos_token_id=TOKENS.index(EOS),
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer().save_pretrained(path)


def tokenizer() -> Qwen2Tokenizer:
    """One token a character: byte-level BPE without merges, which is what transformers reads a Qwen2 directory as."""
    spelled = {" ": "\u0120", "\n": "\u010a"}
    vocabulary = {spelled.get(token, token): i for i, token in enumerate(TOKENS)}
    return Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token=EOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def exact_match(completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    """1.0 where reasoning-gym's own scorer gives a full point, else 0.0.

    Compared in double, before any float32: for some words partial credit sums to 0.9999999999999999.
    """
    return [float(SCORER.score_answer(c, {"answer": a}) == 1.0) for c, a in zip(completions, answer, strict=True)]


def permuted_exact_match(completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    """The control: the rewards of exact_match, handed to other rows of the same call."""
    rewards = exact_match(completions, answer)
    random.Random(f"{len(completions)}{completions[0]}").shuffle(rewards)
    return rewards


SCORER = reasoning_gym.create_dataset("spell_backward", seed=0, size=1)
