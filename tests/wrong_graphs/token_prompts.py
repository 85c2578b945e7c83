"""Prompts by token ids, and text that a reward Model is to read, where they do not fit."""

from __future__ import annotations

from pathlib import Path

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Reward, Rollout
from operators.advantage import group_advantage, returns
from operators.continued import continued
from operators.data import demonstrations, prompts
from operators.forward import scores
from operators.generate import generate
from operators.losses import clipped_policy_loss, policy_gradient_loss
from operators.train import train
from tests.wrong_graphs.parts import DATA, compared, graph

TOKENIZERS = Path(__file__).parent / "tokenizers"

writer = Model("policy", str(TOKENIZERS / "words"), trainable=True)
judge = Model("rm", str(TOKENIZERS / "others"), trainable=True, head="scalar")


def answers(data: str = DATA, by: Model = writer) -> Port[Rollout]:
    """Answers of the policy."""
    return generate(by, prompts(data, batch=64), n=8, max_tokens=64, name="rollout")


def trained_by(verdict: Port[Reward], rows: Port[Rollout]) -> Graph:
    """The policy's training by what a judge says."""
    loss = clipped_policy_loss(group_advantage(rows, verdict))
    return graph(train(writer, rows, loss=loss, lr=1e-6))


def ids_of_another_tokenizer() -> Graph:
    stranger = Model("stranger", str(TOKENIZERS / "others"), trainable=True)
    first = answers(by=Model("first", str(TOKENIZERS / "words")))
    second = generate(stranger, continued(first), max_tokens=64, name="second")
    return graph(train(stranger, second, loss=clipped_policy_loss(compared(second)), lr=1e-6))


def tokens_for_a_reward_model_of_another_tokenizer() -> Graph:
    rollout = answers()
    return trained_by(scores(judge, rollout), rollout)


def text_of_prompts_by_token_ids() -> Graph:
    second = generate(writer, continued(answers()), n=2, max_tokens=64, name="second")
    return trained_by(scores(judge, second, reads="text"), second)


def text_of_prompts_by_token_ids_in_the_data() -> Graph:
    rollout = answers("data/ids.parquet")
    return trained_by(scores(judge, rollout, reads="text"), rollout)


def text_of_demonstrations() -> Graph:
    rows = demonstrations("data/demos.jsonl", batch=64)
    loss = policy_gradient_loss(returns(rows, scores(judge, rows, reads="text")))
    return graph(train(writer, rows, loss=loss, lr=1e-6))


def room_for_tokens() -> Graph:
    rollout = answers()
    return trained_by(scores(judge, rollout, reads="tokens", overlong="drop"), rollout)


def turn_of_no_words() -> Graph:
    second = generate(writer, continued(answers(), then=""), n=2, max_tokens=8, name="second")
    return graph(train(writer, second, loss=clipped_policy_loss(compared(second)), lr=1e-6))
