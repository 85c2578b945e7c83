"""What the examples run on: a small character model and a few prompts, made in a second, without
downloads.

Owns: the model directory, the data, and run options small enough for a laptop. Does not own: any
example. A randomly initialised model learns no arithmetic in a few Steps; the examples' rewards
are things that it can learn.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from character_model import EOS, PAD, make_model

from engine.options import RunOptions

TOKENS = (*string.ascii_lowercase, *string.digits, " ", "+", "=", ":", "\n", PAD, EOS)
CHAT_TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %} {{ tool['function']['name'] }}{% endfor %}\n"
    "{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """Paths, as arguments of a graph function."""

    model: str
    teacher: str
    train: str
    test: str
    chats: str
    """The training prompts as messages."""


def make(folder: Path | str = "runs/tiny") -> Tiny:
    """Two model directories, 64 training and 16 test prompts; also: `python examples/tiny.py`."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(("model", "teacher")):
        if not (root / name / "config.json").is_file():
            size: dict[str, Any] = {"hidden": 64, "mlp": 128, "layers": 2}
            make_model(root / name, TOKENS, **size, seed=seed, chat_template=CHAT_TEMPLATE)
    sums = [f"{a}+{b}" for a in range(10) for b in range(8)]
    random.Random(0).shuffle(sums)
    rows = [{"prompt": f"{s}=", "answer": str(eval_sum(s))} for s in sums]
    _write_rows(root / "train.jsonl", rows[:64])
    _write_rows(root / "test.jsonl", rows[64:])
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows[:64]]
    _write_rows(root / "chats.jsonl", chats)
    return Tiny(
        model=str(root / "model"),
        teacher=str(root / "teacher"),
        train=str(root / "train.jsonl"),
        test=str(root / "test.jsonl"),
        chats=str(root / "chats.jsonl"),
    )


def _write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def eval_sum(text: str) -> int:
    """`3+4` -> 7."""
    return sum(map(int, text.split("+")))


def options(name: str, *, steps: int = 12) -> RunOptions:
    """Options of a run that lasts seconds; it replaces the run folder of an earlier call."""
    return RunOptions(name=name, steps=steps, overwrite=True, threads=1, progress=False)


def show(metrics: Mapping[str, float]) -> None:
    """One line for each Step: its rewards, the greatest lag and the seconds."""
    rewards = [
        k for k in metrics if k.startswith("reward/") and k.endswith("/mean") and k != "reward/mean"
    ]
    parts = ", ".join(f"{k.split('/')[1]} {metrics[k]:.3f}" for k in rewards)
    lag = metrics["policy/lag/max"]
    print(f"step {metrics['step']:.0f}  {parts}  (lag {lag:.0f}, {metrics['time/step']:.2f} s)")


if __name__ == "__main__":
    made = make()
    print(f"model {made.model}, training prompts {made.train}, test prompts {made.test}")
