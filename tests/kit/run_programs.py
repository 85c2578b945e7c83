"""Small importable Programs on the tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dataflow.graph import Graph, Phase, Threshold
from dataflow.model import Model, linear
from dataflow.program import Program
from graphs.sft import sft
from operators.advantage import group_advantage
from operators.data import demonstrations, prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, supervised_loss
from operators.reward import reward
from operators.train import evaluate, train
from tests.kit.run_graphs import vowels

WARM_STEPS, STEPS = 3, 5


def warm(folder: Path) -> Graph:
    """Imitates demonstrations."""
    return sft(str(folder / "model"), str(folder / "demos.parquet"), batch=6, lr=1e-2)


def reinforced(folder: Path, base: str = "", *, copied: bool = True) -> Graph:
    """GRPO held near the policy as it begins (copied; else near its base), and evaluated."""
    base = base or str(folder / "model")
    policy = Model("policy", base, trainable=True)
    near_model = Model("near", base, follows=policy, every=0) if copied else Model("near", base)
    prompt = prompts(str(folder / "train.parquet"), batch=4)
    rollout = generate(policy, prompt, n=4, max_tokens=6, name="rollout")
    near = logprobs(near_model, rollout)
    advantage = group_advantage(rollout, reward(vowels, rollout, name="score"), name="advantage")
    loss = clipped_policy_loss(advantage, reference=near, beta=0.1)
    held = prompts(str(folder / "test.parquet"), shuffle=False, name="held_out")
    greedy = generate(policy, held, max_tokens=6, temperature=0.0, name="greedy")
    return Graph(
        "grpo",
        train(policy, rollout, loss=loss, lr=linear(1e-3, 1e-4, STEPS)),
        evaluate(policy, reward(vowels, greedy, name="held_reward"), every=2, keep_best=1),
    )


def code_points(completions: Sequence[str], **columns: object) -> list[float]:
    """Another number for other texts."""
    return [float(sum(map(ord, text))) for text in completions]


def two(folder: str, steps_after: int = STEPS) -> Program:
    """Warm start, then GRPO: for the command line."""
    return Program((warm(Path(folder)), WARM_STEPS), (reinforced(Path(folder)), steps_after))


def larger(folder: str) -> Program:
    """With a longer warm start."""
    return Program((warm(Path(folder)), WARM_STEPS + 1), (reinforced(Path(folder)), STEPS))


def two_phases(folder: Path) -> Program:
    """Supervised fine-tuning, then GRPO."""
    return Program((warm(folder), WARM_STEPS), (reinforced(folder), STEPS))


def early(folder: Path) -> Program:
    """The first phase ends after its first Step, by a threshold that is reached there."""
    ends = Phase(warm(folder), 30, until=Threshold("optim/lr", at_least=1e-2))
    return Program(ends, (warm(folder), 2))


def taught(folder: Path, name: str, *, start: int = 0) -> Graph:
    """A Model of its own learns from demonstrations, from that Step on."""
    model = Model(name, str(folder / "model"), trainable=True)
    rows = demonstrations(str(folder / "demos.parquet"), batch=6)
    return Graph(name, train(model, rows, loss=supervised_loss(), lr=1e-2, start=start))
