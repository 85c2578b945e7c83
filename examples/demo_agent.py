"""The agents' demo: a model learns to ask before it answers, in a few minutes on two cores.

    python examples/demo_agent.py            (or: make demo-agent)

A Program of two phases for a small character model: a warm start with graphs/sft.py on a careless
teacher, who mostly guesses instead of asking; then GRPO over episodes, in which the
environment (agent_task.py) answers the model's question and rewards the right number.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import agent_task as task
import tyro
from rich.console import Console
from rich.table import Table

from dataflow.graph import Graph
from dataflow.model import Model, Number
from dataflow.program import Program
from engine.api import Result, plan, run
from engine.options import RunOptions
from engine.plan.explain import explain
from graphs.sft import sft
from operators.advantage import group_advantage
from operators.data import prompts
from operators.interact import interact
from operators.losses import clipped_policy_loss
from operators.train import evaluate, train
from operators.turns import turn_reward

GOOD = 0.85
"""Share of right numbers, sampled, that the demo must reach."""


@dataclass(frozen=True, kw_only=True)
class AgentRecipe:
    """The settings of the demo; docs/demo.md says how they were found."""

    demonstrations: int = 102_400
    lazy: float = 0.88
    """How often the teacher guesses instead of asking."""
    noise: float = 0.05
    """How often it says another number than the one it was told."""
    layers: int = 2
    hidden: int = 64
    warm_steps: int = 800
    warm_lr: float = 4e-3
    steps: int = 80
    batch: int = 8
    n: int = 16
    lr: float = 1e-3


def phone_book(
    base: str,
    data: str,
    test: str,
    *,
    environment: type = task.PhoneBook,
    n: int = 8,
    batch: int = 8,
    lr: Number = 1e-3,
    every: int = 40,
) -> Graph:
    """GRPO over episodes, with an evaluation on fresh numbers."""
    policy = Model("policy", base, trainable=True)
    call = partial(interact, policy, max_turns=2, max_turn_tokens=6, max_tokens=16, stop="\n")
    episode = call(prompts(data, batch=batch), environment, n=n, name="episode")
    score = turn_reward(episode, name="score")
    loss = clipped_policy_loss(group_advantage(episode, score), clip=0.2)
    fresh = prompts(test, shuffle=False, name="fresh")
    tried = call(fresh, task.PhoneBook, name="tried")
    return Graph(
        "phone_book",
        train(policy, episode, loss=loss, lr=lr),
        evaluate(policy, turn_reward(tried, name="tried_score"), every=every),
    )


def prepare(folder: Path, recipe: AgentRecipe, seed: int) -> None:
    """Data and an untrained model."""
    folder.mkdir(parents=True, exist_ok=True)
    task.write_prompts(folder / "train.parquet", 260)
    task.write_prompts(folder / "test.parquet", 208)
    task.write_demonstrations(
        folder / "demonstrations.parquet",
        recipe.demonstrations,
        lazy=recipe.lazy,
        noise=recipe.noise,
        seed=seed,
    )
    task.make_model(folder / "model", layers=recipe.layers, hidden=recipe.hidden, seed=seed)


def make_program(folder: Path, recipe: AgentRecipe, environment: type = task.PhoneBook) -> Program:
    """The warm start, and reinforcement of what it left."""
    base = str(folder / "model")
    warm = sft(base, str(folder / "demonstrations.parquet"), batch=128, lr=recipe.warm_lr)
    train_file, test_file = str(folder / "train.parquet"), str(folder / "test.parquet")
    learned = phone_book(
        base,
        train_file,
        test_file,
        environment=environment,
        n=recipe.n,
        batch=recipe.batch,
        lr=recipe.lr,
    )
    return Program((warm, recipe.warm_steps), (learned, recipe.steps))


def measure(result: Result) -> tuple[float, float]:
    """The share of right numbers as reinforcement began, and as it ended."""
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["phase"] == 2]
    return rows[0]["eval/initial/reward"], rows[-1]["eval/reward"]


def main(
    seed: int = 0,
    name: str = "demo-agent",
    runs: Path = Path("runs"),
    steps: int | None = None,
    warm_steps: int | None = None,
    random_rewards: bool = False,
) -> Result:
    """A model that learns to ask before it answers.

    Args:
        seed: of the data, the model and every draw.
        name: of the run folder.
        runs: folder that holds the run folders.
        steps: Steps of GRPO, instead of the recipe's.
        warm_steps: Steps of the warm start, instead of the recipe's.
        random_rewards: a control: rewards say nothing, so nothing should be learned.
    """
    console = Console()
    recipe = AgentRecipe()
    recipe = replace(
        recipe, steps=steps or recipe.steps, warm_steps=warm_steps or recipe.warm_steps
    )
    began = time.perf_counter()
    folder = runs / f"{name}-data"
    shutil.rmtree(folder, ignore_errors=True)
    prepare(folder, recipe, seed)
    environment = task.RandomlyRewarded if random_rewards else task.PhoneBook
    whole = make_program(folder, recipe, environment)
    options = RunOptions(
        seed=seed, name=name, runs=runs, overwrite=True, threads=1, samples_every=20
    )
    console.print(explain(plan(whole, options)), markup=False, highlight=False, soft_wrap=True)
    result = run(whole, options)
    before, after = measure(result)
    table = Table("before RL", "after RL", title="right numbers, sampled")
    table.add_row(f"{before:.2f}", f"{after:.2f}")
    console.print(table)
    if random_rewards:
        console.print("This was the control: rewards were drawn, so nothing could be learned.")
    elif after < GOOD:
        console.print(f"RL did not bring it to {GOOD}: with this seed the demo has failed.")
    console.print(f"the run folder is {result.folder}; {time.perf_counter() - began:.0f} s")
    return result


if __name__ == "__main__":
    tyro.cli(main)
