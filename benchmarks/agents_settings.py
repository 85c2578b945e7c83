"""The settings of the benchmark of agents: model, data, and numbers of a run.

Owns: a Parquet file of prompts, and the folder of the model; both are made once, under
runs/benchmarks/. Does not own: the model (agents_model.py), running anything with them (agents.py),
the environment (agents_environment.py).

As each turn is a call, an episode has as many turns as it may: `max_turns` of ours, and one more
than TRL's `max_tool_calling_iterations`. Which number is guessed is random, and so are rewards.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.agents_environment import NUMBERS
from benchmarks.agents_model import make_model, question
from benchmarks.settings import ROOT

SOURCES = ("agents_model.py", "agents_environment.py", "settings.py")
"""What the model depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSetting:
    """Episodes of so many turns. max_tokens: of an episode's completion, and so of a turn."""

    turns: int
    max_tokens: int
    steps: int = 8
    warmup_steps: int = 2
    prompts_per_step: int = 8
    num_generations: int = 8
    lr: float = 1e-6
    """So small that turns stay as they were taught."""
    threads: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    """All that a side is told: one update per batch of prompts_per_step * num_generations
    episodes.
    """

    model_dir: str
    data: str
    turns: int
    max_new_tokens: int
    prompts_per_step: int
    num_generations: int
    steps: int
    """Measured Steps, after `warmup_steps` that are not."""
    warmup_steps: int
    lr: float
    threads: int
    seed: int


AGENT_SETTINGS = {
    "two_turns": AgentSetting(turns=2, max_tokens=160),
    "six_turns": AgentSetting(turns=6, max_tokens=512),
}


def prepare_agents(
    setting: AgentSetting, *, teacher_steps: int = 800, rows: int = 1024, root: Path = ROOT
) -> AgentRun:
    """Make the missing files; returns what a side is told."""
    digest = hashlib.sha256(f"{teacher_steps} {rows}".encode())
    for name in SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    folder = root / f"agents-{digest.hexdigest()[:10]}"
    data = folder / f"prompts-{rows}.parquet"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_model(folder / "model", teacher_steps)
        (folder / "done").touch()
    pq.write_table(make_rows(rows), data)
    return AgentRun(
        model_dir=str(folder / "model"),
        data=str(data),
        turns=setting.turns,
        max_new_tokens=setting.max_tokens,
        prompts_per_step=setting.prompts_per_step,
        num_generations=setting.num_generations,
        steps=setting.steps,
        warmup_steps=setting.warmup_steps,
        lr=setting.lr,
        threads=setting.threads,
        seed=0,
    )


def make_rows(rows: int) -> pa.Table:
    """Prompts that are messages, and what the environment is reset with."""
    rng = random.Random(2)
    numbers = [rng.choice(NUMBERS) for _ in range(rows)]
    prompts = [[question(row)] for row in range(rows)]
    return pa.table({"prompt": prompts, "number": numbers})
