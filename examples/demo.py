"""The demo: a graph that learns, in a few minutes on two cores.

    python examples/demo.py            (or: make demo)

Makes a small character model, warm-starts it on a noisy teacher with graphs/sft.py and
stops early, then trains it with graphs/grpo.py to spell words backward, with
reasoning-gym's own scorer behind the reward. Words that are shown at the end were never
trained on.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import demo_task as task
import tyro
from rich.console import Console
from rich.table import Table

from dataflow.draw import draw
from dataflow.graph import Graph
from dataflow.model import Model, Number, linear
from dataflow.schema import Rollout
from engine.api import Result, peek, plan, run
from engine.options import RunOptions
from engine.plan.explain import explain
from graphs.grpo import grpo
from graphs.sft import sft
from operators.data import prompts
from operators.generate import generate
from operators.reward import reward
from operators.rewards import RewardFn
from operators.train import evaluate


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of the demo; how they were found is in docs/demo.md."""

    words: int = 40_000
    noise: float = 0.25
    layers: int = 2
    hidden: int = 128
    warm_steps: int = 900
    warm_lr: float = 1e-3
    stop_at: float = 0.4
    """The warm start ends when this share of the validation words is spelled right greedily."""
    steps: int = 400
    batch: int = 32
    n: int = 8
    lr: float = 5e-4
    minibatches: int = 2


def with_evaluation(graph: Graph, base: str, test: str, reward_fn: RewardFn, *, every: int) -> Graph:
    """The graph with two evaluations on held-out words: greedy, and sampled at temperature 1."""
    policy = Model("policy", base, trainable=True)
    held_out = prompts(test, shuffle=False, name="held_out")
    greedy = generate(policy, held_out, max_tokens=10, temperature=0.0, name="greedy_rollout")
    sampled = generate(policy, held_out, max_tokens=10, name="sampled_rollout")
    return graph.extend(
        evaluate(policy, reward(reward_fn, greedy, name="greedy_reward"), every=every),
        evaluate(policy, reward(reward_fn, sampled, name="sampled_reward"), every=every, name="sampled"),
    )


def warm_start(base: str, demonstrations: str, validation: str, *, lr: Number = 1e-3) -> Graph:
    """Supervised fine-tuning with an evaluation, so that it can be stopped early."""
    graph = sft(base, demonstrations, batch=128, lr=lr)
    return with_evaluation(graph, base, validation, task.exact_match, every=20)


def spell_backward(
    base: str,
    data: str,
    test: str,
    *,
    reward_fn: RewardFn = task.exact_match,
    n: int = 8,
    batch: int = 32,
    lr: Number = 5e-4,
    minibatches: int = 2,
) -> Graph:
    """GRPO on words, evaluated on held-out words."""
    graph = grpo(base, data, reward_fn, n=n, batch=batch, max_tokens=10, lr=lr, minibatches=minibatches)
    return with_evaluation(graph, base, test, task.exact_match, every=20)


def prepare(folder: Path, recipe: Recipe, seed: int) -> None:
    """Data and model: train, validation and test words are disjoint; the model knows nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    found = task.words(recipe.words, seed)
    train = [row for word, row in found.items() if not task.held_out(word)]
    rest = [row for word, row in found.items() if task.held_out(word)]
    task.write_prompts(folder / "train.parquet", train)
    task.write_prompts(folder / "validation.parquet", rest[:128])
    task.write_prompts(folder / "test.parquet", rest[128:640])
    copies = 1 + recipe.warm_steps * 128 // len(train)
    task.write_demonstrations(folder / "demonstrations.parquet", train, noise=recipe.noise, copies=copies, seed=seed)
    task.make_model(folder / "model", layers=recipe.layers, hidden=recipe.hidden, seed=seed)


def learn_from_teacher(folder: Path, recipe: Recipe, options: RunOptions) -> Result:
    """The warm start, stopped early."""
    graph = warm_start(str(folder / "model"), *(str(folder / f"{n}.parquet") for n in ("demonstrations", "validation")), lr=recipe.warm_lr)

    def good_enough(metrics: Mapping[str, float]) -> bool:
        return metrics.get("eval/exact_match", 0.0) >= recipe.stop_at

    return run(graph, options, until=good_enough)


def reinforce(folder: Path, warm: Result, recipe: Recipe, options: RunOptions, reward_fn: RewardFn) -> tuple[Graph, Result]:
    """The main job."""
    graph = spell_backward(
        str(warm.trained["policy"]),
        str(folder / "train.parquet"),
        str(folder / "test.parquet"),
        reward_fn=reward_fn,
        n=recipe.n,
        batch=recipe.batch,
        lr=linear(recipe.lr, recipe.lr / 10, recipe.steps),
        minibatches=recipe.minibatches,
    )
    return graph, run(graph, options)
