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
from tests.wrong_graphs.bases import rolled_out, trained


def two_turns(first: int, second: int, then: str | None = None, **asked: Any) -> Graph:
    """A second generation on the first one's answers. first, second: max_tokens of each."""
    policy, rollout = rolled_out(max_tokens=first)
    question = continued(rollout, then=then)
    rows: Port[Any] = generate(policy, question, n=2, max_tokens=second, name="second", **asked)
    return trained(policy, rows)


def answers_that_continue_answers_beyond_the_positions() -> Graph:
    return two_turns(100, 28)


def next_turn_without_a_template() -> Graph:
    return two_turns(64, 32, then="Check your answer.")


def messages_for_a_reward_model_without_a_template() -> Graph:
    source = prompts("data/messages.parquet", batch=64)
    writer, rollout = rolled_out("some/hub-name", source)
    verdict = scores(Model("rm", "./bases/scored", head="scalar"), rollout, reads="text")
    return trained(writer, rollout, clipped_policy_loss(group_advantage(rollout, verdict)))
