"""Right graphs whose groups have rows of several generations, or of the data."""

from __future__ import annotations

from dataflow.graph import Graph
from dataflow.model import Model
from operators.advantage import group_advantage
from operators.answers import answers
from operators.concat import concat
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, supervised_loss
from operators.reward import reward
from operators.select import best_of, select
from operators.train import train
from tests.kit.rewards import brief, exact

BASE, DATA = "models/tiny", "data/train.parquet"

policy = Model("policy", BASE, trainable=True)


def two_temperatures() -> Graph:
    """Two generations of the same prompts in one group, each row at its own temperature."""
    prompt = prompts(DATA, batch=64)
    warm = generate(policy, prompt, n=4, max_tokens=64, name="warm")
    cool = generate(policy, prompt, n=4, max_tokens=32, temperature=0.7, top_k=20, name="cool")
    rows = concat(warm, cool)
    old = logprobs(policy, rows, name="old")
    advantage = group_advantage(rows, reward(exact, rows))
    loss = clipped_policy_loss(advantage, old=old)
    return Graph("two_temperatures", train(policy, rows, loss=loss, lr=1e-6, epochs=2))


def gold_answers() -> Graph:
    """The data's own answers in each group of samples."""
    prompt = prompts(DATA, batch=64)
    rollout = generate(policy, prompt, n=7, max_tokens=64, temperature=0.7, name="rollout")
    rows = concat(rollout, answers(prompt, column="answer"))
    score, old = reward(exact, rows), logprobs(policy, rows, name="old")
    loss = clipped_policy_loss(group_advantage(rows, score), old=old)
    return Graph("gold_answers", train(policy, rows, loss=loss, lr=1e-6, minibatches=2))


def parts_apart() -> Graph:
    """What was computed of two generations apart goes with the rows of both."""
    prompt = prompts(DATA, batch=64)
    warm = generate(policy, prompt, n=4, max_tokens=64, name="warm")
    cool = generate(policy, prompt, n=4, max_tokens=64, temperature=0.7, name="cool")
    first, second = reward(exact, warm, name="first"), reward(brief, cool, name="second")
    best = select(cool, where=best_of(second, k=2))
    rows = concat(concat(warm, best, name="some"), cool, name="rows")
    twice = concat(warm, cool, name="both")
    score = concat(first, second, name="score")
    old = concat(
        logprobs(policy, warm, name="old_warm"), logprobs(policy, cool, name="old_cool"), name="old"
    )
    learnt = train(
        policy, twice, loss=clipped_policy_loss(group_advantage(twice, score), old=old), lr=1e-6
    )
    imitator = Model("imitator", BASE, trainable=True)
    return Graph("parts_apart", learnt, train(imitator, rows, loss=supervised_loss(), lr=1e-6))
