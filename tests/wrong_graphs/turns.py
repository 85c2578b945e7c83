"""Second generations on the answers of a first one, and what is read as text, on directories that
the test makes under `./bases`.
"""

from __future__ import annotations

from typing import Any

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from operators.advantage import group_advantage
from operators.continued import continued
from operators.data import prompts
from operators.forward import scores
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.train import train
from tests.wrong_graphs.bases import GOOD
from tests.wrong_graphs.parts import DATA, compared, graph

policy = Model("policy", GOOD, trainable=True)


def two_turns(first: int, second: int, then: str | None = None, **asked: Any) -> Graph:
    """A second generation on the first one's answers. first, second: max_tokens of each."""
    rollout = generate(policy, prompts(DATA, batch=64), n=8, max_tokens=first, name="rollout")
    question = continued(rollout, then=then)
    rows: Port[Any] = generate(policy, question, n=2, max_tokens=second, name="second", **asked)
    return graph(train(policy, rows, loss=clipped_policy_loss(compared(rows)), lr=1e-6))


def answers_that_continue_answers_beyond_the_positions() -> Graph:
    return two_turns(100, 28)


def next_turn_without_a_template() -> Graph:
    return two_turns(64, 32, then="Check your answer.")


def messages_for_a_reward_model_without_a_template() -> Graph:
    writer = Model("policy", "some/hub-name", trainable=True)
    source = prompts("data/messages.parquet", batch=64)
    rollout = generate(writer, source, n=8, max_tokens=64, name="rollout")
    verdict = scores(Model("rm", "./bases/scored", head="scalar"), rollout, reads="text")
    loss = clipped_policy_loss(group_advantage(rollout, verdict))
    return graph(train(writer, rollout, loss=loss, lr=1e-6))
