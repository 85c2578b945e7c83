"""Small importable graphs whose groups have rows of several generations, or gold answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Completion, Keep, Logprobs, Prompt, Reward, Rollout
from dataflow.user import Columns, operator
from operators.advantage import group_advantage, returns
from operators.answers import answers
from operators.concat import concat
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, policy_gradient_loss
from operators.reward import reward
from operators.select import best_of, select
from operators.train import train
from tests.kit.run_graphs import policy_and_prompts
from tests.kit.turn_graphs import told_apart

SEEN: dict[str, list[Any]] = {}
"""Node -> what came to it."""


@operator()
def equal_rewards(one: Columns[Reward], other: Columns[Reward]) -> Columns[Reward]:
    SEEN.setdefault("rewards", []).append((np.array(one["reward"]), np.array(other["reward"])))
    return one


@operator()
def equal_logprobs(one: Columns[Logprobs], other: Columns[Logprobs]) -> Columns[Logprobs]:
    SEEN.setdefault("logprobs", []).append((one["logprobs"].values, other["logprobs"].values))
    return one


@operator()
def seen_rows(rows: Columns[Completion]) -> Columns[Keep]:
    """Keeps every row."""
    texts = list(zip(rows.keys.rows(), rows["completion"], strict=True))
    SEEN.setdefault("rows", []).extend(texts)
    return Columns.make(Keep, like=rows, keep=np.ones(len(rows), dtype=np.uint8))


def two(policy: Model, asked: Port[Prompt], **how: Any) -> tuple[Port[Rollout], Port[Rollout]]:
    """Answers of two generations, at two temperatures and lengths."""
    warm = generate(policy, asked, n=2, max_tokens=6, name="warm", **how)
    cool = generate(policy, asked, n=3, max_tokens=4, temperature=0.5, name="cool", **how)
    return warm, cool


def compared_apart(folder: Path) -> Graph:
    """What is computed of the parts equals what is computed of the whole."""
    policy, asked = policy_and_prompts(folder)
    warm, cool = two(policy, asked)
    rows = concat(warm, cool)
    parts = [reward(told_apart, part, name=f"{part.label}_score") for part in (warm, cool)]
    score = equal_rewards(reward(told_apart, rows), concat(*parts, name="scores"))
    apart = [logprobs(policy, part, name=f"{part.label}_old") for part in (warm, cool)]
    old = equal_logprobs(logprobs(policy, rows, name="old"), concat(*apart, name="olds"))
    loss = clipped_policy_loss(group_advantage(rows, score), old=old)
    return Graph("apart", train(policy, rows, loss=loss, lr=1e-3, epochs=2))


def joint(folder: Path, *, selects: bool = False, **more: Any) -> Graph:
    """Two generations and the data's answers in one group. selects: of one generation the best."""
    policy, asked = policy_and_prompts(folder)
    warm, cool = two(policy, asked)
    if selects:
        score = reward(told_apart, cool, name="cool_score")
        cool = select(cool, where=best_of(score), name="best")
    rows = concat(concat(warm, cool, name="sampled"), answers(asked, column="answer"))
    score = reward(told_apart, rows)
    old = logprobs(policy, rows, name="old")
    loss = clipped_policy_loss(group_advantage(rows, score, ragged=True), old=old)
    return Graph("joint", train(policy, rows, loss=loss, lr=1e-3, epochs=2, **more))


def greedy_twice(folder: Path, *, parts: bool) -> Graph:
    """Two greedy answers to each prompt: of one generation, or of two."""
    policy, asked = policy_and_prompts(folder)
    how = {"max_tokens": 6, "temperature": 0.0}
    if parts:
        first, second = (generate(policy, asked, name=name, **how) for name in ("a", "b"))
        rows: Port[Rollout] = concat(first, second, name="rollout")
    else:
        rows = generate(policy, asked, n=2, name="rollout", **how)
    loss = policy_gradient_loss(returns(rows, reward(told_apart, rows)))
    return Graph("greedy", train(policy, rows, loss=loss, lr=1e-2))


def shown_gold(folder: Path) -> Graph:
    """Gold answers of the data, seen by an operator."""
    policy, asked = policy_and_prompts(folder)
    rollout = generate(policy, asked, n=2, max_tokens=6, name="rollout")
    rows = concat(rollout, answers(asked, column="answer"))
    rows = select(rows, where=seen_rows(rows))
    score, old = reward(told_apart, rows), logprobs(policy, rows, name="old")
    loss = clipped_policy_loss(group_advantage(rows, score, ragged=True), old=old)
    return Graph("gold", train(policy, rows, loss=loss, lr=1e-3))
