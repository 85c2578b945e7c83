"""The agents' demo: a number that has to be asked for, a character model, and a careless teacher.

Owns: the environment, the data and the model directory. Does not own: the algorithm (graphs/), the
demo's steps (demo_agent.py).

A prompt names a key, `f:`. The model may ask, `?f`, and is answered with the key's number, `=7`;
then it has to say the number. Numbers are drawn for each prompt, so nothing can be known without
asking: guessing is right once in ten times.
"""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import character_model
import pyarrow as pa
import pyarrow.parquet as pq
from character_model import EOS, PAD

TOKENS = (*string.ascii_lowercase, *string.digits, ":", "?", "=", "\n", PAD, EOS)


class PhoneBook:
    """Knows the number of one key; each turn is a line."""

    def reset(self, seed: int, key: str) -> None:
        """Draw the number."""
        self._key = key
        self._number = str(random.Random(seed).randint(0, 9))
        self.asked = False

    def step(self, message: dict[str, Any]) -> tuple[str, float | None, bool]:
        """Answer a question; anything else is taken as the number."""
        line = message["content"].strip()
        if line == f"?{self._key}" and not self.asked:
            self.asked = True
            return f"={self._number}\n", None, False
        return "", float(self.asked and line == self._number), True


class RandomlyRewarded(PhoneBook):
    """A control: rewards that are drawn, whatever was said. Each run draws others."""

    def step(self, message: dict[str, Any]) -> tuple[str, float | None, bool]:
        """As the phone book answers, but for the reward."""
        answer, _, done = super().step(message)
        reward = float(random.SystemRandom().random() < 0.5) if done else None
        return answer, reward, done


def write_prompts(path: Path, count: int) -> None:
    """Prompts, each with its key."""
    keys = [string.ascii_lowercase[index % 26] for index in range(count)]
    prompts = [f"{key}:\n" for key in keys]
    pq.write_table(pa.table({"prompt": prompts, "key": keys}), path)


def write_demonstrations(path: Path, count: int, *, lazy: float, noise: float, seed: int) -> None:
    """Answers of a careless teacher, a third each from one of three places on. At the prompt it
    guesses with probability `lazy`, else it asks. Behind a question mark it names the key. Where it
    was told the number it says that, but for a random one with probability `noise`.
    """
    rng = random.Random(seed)
    prompts: list[str] = []
    answers: list[str] = []
    for index in range(count):
        key = rng.choice(string.ascii_lowercase)
        number = rng.choice(string.digits)
        repeated = rng.choice(string.digits) if rng.random() < noise else number
        conversation = f"{key}:\n?{key}\n={number}\n{repeated}\n"
        begin = (len("f:\n"), len("f:\n?"), len("f:\n?f\n=7\n"))[index % 3]
        prompts.append(conversation[:begin])
        if index % 3 == 0 and rng.random() < lazy:
            answers.append(f"{rng.choice(string.digits)}\n")
        else:
            answers.append(conversation[begin:])
    pq.write_table(pa.table({"prompt": prompts, "completion": answers}), path)


def make_model(path: Path, *, layers: int, hidden: int, seed: int) -> None:
    """An untrained model."""
    character_model.make_model(
        path, TOKENS, hidden=hidden, mlp=3 * hidden, layers=layers, seed=seed
    )
