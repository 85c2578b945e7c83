"""The agents' demo with another package's game: TextArena's GuessTheNumber, unchanged.

    python examples/demo_game.py --python .venv-environments/bin/python    (or: make demo-agent)

A Program of two phases: a warm start on random guesses, then GRPO over episodes by the game's own
reward. The game runs in an interpreter of its own, that has the package. What shortens its texts
is the model's tokenizer: each of the game's sentences is one token, and each guess.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path

import character_model
import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from character_model import EOS, PAD
from rich.console import Console

from dataflow.graph import Graph
from dataflow.model import Model, Number
from dataflow.program import Program
from engine.api import Result, run
from engine.options import RunOptions
from graphs.sft import sft
from operators.advantage import group_advantage
from operators.data import prompts
from operators.environment_kinds import textarena_environment
from operators.environments import isolated
from operators.interact import interact
from operators.losses import clipped_policy_loss
from operators.train import evaluate, train
from operators.turns import turn_reward

GAME = "GuessTheNumber-v0-hardcore"
MOST, TURNS = 50, 10

RULES = (
    "You are Player 0. You are playing Guess The Number.\n"
    "You have to guess the number between 1 and 50 within 10 turns.\n"
    "As you enter your guess, the game will provide you with hints such as 'higher' or 'lower'.\n"
    "You may provide your response in any manner. Only the number that is wrapped in square"
    " brackets will be considered as your guess. For example, [5].\n"
    "As you play, the history of your guesses will be appended below. Use the information to"
    " complete the game before you run out of guesses.\n"
    "Enter your guess."
)
HIGHER, LOWER = "The target number is higher.", "The target number is lower."
_INVALID = "You attempted an invalid move. Reason: "
_AGAIN = " Please resubmit a valid move and remember to follow the game rules to avoid penalties."
REPEATED = f"{_INVALID}Invalid move. Player 0 has already guessed the number.{_AGAIN}"
NO_GUESS = f"{_INVALID}Invalid move format. Player 0 did not respond with valid '[number]'.{_AGAIN}"
GUESSES = tuple(f"[{number}]" for number in range(1, MOST + 1))
TOKENS = ("\n", PAD, EOS)


def write_demonstrations(path: Path, count: int, seed: int) -> None:
    """Games of random guesses, none of them twice, to their end."""
    rng = random.Random(seed)
    games: list[str] = []
    for _ in range(count):
        number = rng.randint(1, MOST)
        game: list[str] = []
        for guess in rng.sample(range(1, MOST + 1), TURNS):
            game.append(f"[{guess}]")
            if guess == number:
                break
            game.append(LOWER if guess > number else HIGHER)
        games.append("".join(game))
    table = pa.table({"prompt": [f"\n{RULES}"] * count, "completion": games})
    pq.write_table(table, path)


def prepare(folder: Path, seed: int) -> None:
    """Data and an untrained model. A prompt is a line's end: the game itself begins."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 4096), ("test", 256)):
        pq.write_table(pa.table({"prompt": ["\n"] * count}), folder / f"{name}.parquet")
    write_demonstrations(folder / "demonstrations.parquet", 12_800, seed)
    character_model.make_model(
        folder / "model",
        TOKENS,
        hidden=64,
        mlp=192,
        layers=2,
        seed=seed,
        phrases=(RULES, HIGHER, LOWER, REPEATED, NO_GUESS, *GUESSES),
    )


def guess_the_number(folder: Path, python: str, *, steps: int, batch: int, lr: Number) -> Graph:
    """GRPO over games, evaluated on games of fresh numbers."""
    policy = Model("policy", str(folder / "model"), trainable=True)
    game = isolated(textarena_environment(GAME), python=python)
    play = partial(interact, policy, max_turns=TURNS + 1, max_turn_tokens=1, max_tokens=32)
    train_rows = prompts(str(folder / "train.parquet"), batch=batch)
    episode = play(train_rows, game, n=8, name="episode")
    score = turn_reward(episode, name="score")
    loss = clipped_policy_loss(group_advantage(episode, score), clip=0.2)
    fresh = prompts(str(folder / "test.parquet"), shuffle=False, name="fresh")
    tried = play(fresh, game, name="tried")
    return Graph(
        "guess_the_number",
        train(policy, episode, loss=loss, lr=lr),
        evaluate(policy, turn_reward(tried, name="tried_score"), every=50),
    )


def measure(result: Result) -> tuple[float, float]:
    """The game's mean reward as reinforcement began, by random play, and as it ended."""
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["phase"] == 2]
    return rows[0]["eval/initial/reward"], rows[-1]["eval/reward"]


def has_game(python: str) -> bool:
    """Whether that interpreter is there, and has the package."""
    words = [python, "-c", "import textarena"]
    try:
        return subprocess.run(words, capture_output=True, timeout=120).returncode == 0
    except OSError:
        return False


def main(
    python: str = ".venv-environments/bin/python",
    seed: int = 0,
    name: str = "demo-game",
    runs: Path = Path("runs"),
    steps: int = 200,
    warm_steps: int = 100,
) -> None:
    """A model that learns to guess a number from the game's hints.

    Args:
        python: an interpreter that has TextArena.
        seed: of the data, the model and every draw.
        name: of the run folder.
        runs: folder that holds the run folders.
        steps: Steps of GRPO.
        warm_steps: Steps of the warm start.
    """
    console = Console()
    if not has_game(python):
        console.print(f"{python} has no TextArena: this part is left out.")
        return
    began = time.perf_counter()
    folder = runs / f"{name}-data"
    shutil.rmtree(folder, ignore_errors=True)
    prepare(folder, seed)
    base, demonstrations = str(folder / "model"), str(folder / "demonstrations.parquet")
    learned = guess_the_number(folder, python, steps=steps, batch=8, lr=2e-3)
    whole = Program((sft(base, demonstrations, batch=128, lr=2e-3), warm_steps), (learned, steps))
    options = RunOptions(seed=seed, name=name, runs=runs, overwrite=True, threads=1)
    result = run(whole, options)
    before, after = measure(result)
    console.print(f"mean reward: random play {before:.3f}, after RL {after:.3f}")
    console.print(f"the run folder is {result.folder}; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    tyro.cli(main)
