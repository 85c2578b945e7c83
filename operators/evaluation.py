"""The evaluation that every reward graph offers: greedy answers to held-out prompts.

Owns: its nodes. Does not own: what an evaluation is (train.py, `evaluate`).
"""

from __future__ import annotations

from dataflow.calls import require
from dataflow.model import Model
from dataflow.node import Node
from operators.data import prompts
from operators.generate import generate
from operators.reward import reward
from operators.rewards import RewardFn
from operators.train import evaluate

USUAL = 50
"""Steps between evaluations where a graph's author says nothing else."""


def held_out(
    policy: Model, data: str | None, reward_fn: RewardFn, *, every: int, max_tokens: int
) -> tuple[Node, ...]:
    """A sink for `Graph(name, ..., *held_out(...))` that measures the reward of the policy's greedy
    answers to all prompts of `data`: at the start, after each `every` Steps, and at the end; `()`
    if data is None.

    The nodes are `eval_prompts`, `eval_rollout`, `eval_score` and `evaluate`; the metrics
    `eval/reward` and `eval/<function>`. The check refuses prompts that are also trained on. Raises
    GraphError for an `every` of the caller's own where no data are.
    """
    if data is None:
        fix = "eval_data='held_out.jsonl' beside it"
        expected = f"left at {USUAL}, as there is no eval_data"
        require("graph", "eval_every", every, fits=every == USUAL, expected=expected, fix=fix)
        return ()
    prompt = prompts(data, shuffle=False, name="eval_prompts")
    answer = generate(policy, prompt, max_tokens=max_tokens, temperature=0.0, name="eval_rollout")
    return (evaluate(policy, reward(reward_fn, answer, name="eval_score"), every=every),)
