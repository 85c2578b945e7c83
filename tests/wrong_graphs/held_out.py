"""Evaluations on what is trained on, however the data is named."""

from __future__ import annotations

from pathlib import Path

from dataflow.graph import Graph
from operators.data import prompts
from operators.generate import generate
from operators.reward import reward
from operators.train import evaluate
from tests.wrong_graphs.parts import exact, graph, policy, updated

FOLDER = Path(__file__).parent / "data"
TASK = "reasoning_gym:spell_backward"


def trained_and_evaluated(
    train: str, test: str, split: str | None = None, test_split: str | None = None
) -> Graph:
    prompt = prompts(train, batch=64, split=split)
    rollout = generate(policy, prompt, n=8, max_tokens=64, name="rollout")
    held = generate(
        policy, prompts(test, split=test_split, name="held_out"), max_tokens=64, name="answers"
    )
    return graph(updated(rollout), evaluate(policy, reward(exact, held), every=10))


def evaluation_on_a_link_to_the_file() -> Graph:
    return trained_and_evaluated(str(FOLDER / "train.jsonl"), str(FOLDER / "link.jsonl"))


def evaluation_on_a_file_of_the_folder() -> Graph:
    return trained_and_evaluated(str(FOLDER), str(FOLDER / "train.jsonl"), split="train")


def evaluation_on_items_of_the_task() -> Graph:
    return trained_and_evaluated(
        f"{TASK}?seed=7&size=100", f"{TASK}?size=10&seed=50&min_word_len=3"
    )
