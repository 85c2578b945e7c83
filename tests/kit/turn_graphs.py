"""Small importable graphs with two generations; mean_over takes rewards up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataflow.batch import Keys, Ragged
from dataflow.graph import Graph
from dataflow.loss import Loss
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.schema import Advantage, Completion, Keep, Logprobs, Prompt, Reward, Rollout
from dataflow.user import Columns, operator
from operators.advantage import baseline_advantage, group_advantage, returns
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, policy_gradient_loss
from operators.mean_over import mean_over
from operators.reward import reward
from operators.select import best_of, select
from operators.train import evaluate, train
from tests.kit.run_graphs import policy_and_prompts, rolled_out

SEEN: dict[str, list[tuple[Keys, np.ndarray]]] = {}
"""Node -> keys and rewards of each chunk."""


def told_apart(completions: Sequence[str], **columns: object) -> list[float]:
    """Another number for almost every answer."""
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def not_all(
    completions: Sequence[str], answer: Sequence[str], **columns: object
) -> list[float | None]:
    """Does not apply to three of four answers to the 3 prompts of 24 with the gold answer "a".

    By the prompt, as what is generated with lag depends on the clock; the error budget is 10.
    """
    given = zip([sum(map(ord, text)) for text in completions], answer, strict=True)
    return [None if gold == "a" and x % 4 else x % 97 / 97 for x, gold in given]


@operator()
def seen(score: Columns[Reward], *, by: str) -> Columns[Reward]:
    SEEN.setdefault(by, []).append((score.keys, np.array(score["reward"])))
    return score


@operator()
def asked_again(rollout: Columns[Rollout]) -> Columns[Prompt]:
    return Columns.make(Prompt, like=rollout, prompt=[f"{text}?" for text in rollout["completion"]])


@operator()
def wide(rollout: Columns[Completion]) -> Columns[Keep]:
    """Keeps about two of three answers, by their text."""
    keep = [int(sum(map(ord, text)) % 3 > 0) for text in rollout["completion"]]
    return Columns.make(Keep, like=rollout, keep=keep)


def answered_again(
    policy: Model, rollout: Port[Rollout], n: int = 1, name: str = "later", **how: Any
) -> Port[Rollout]:
    """Answers to what is asked about each answer. how: of `generate`."""
    return generate(policy, asked_again(rollout), n=n, max_tokens=6, name=name, **how)


def watched_mean(score: Port[Reward], rows: Port[Rollout] | Port[Prompt]) -> Port[Reward]:
    """The mean of the scores onto these rows; both are in SEEN, as `below` and `above`."""
    return seen.named("above")(mean_over(seen.named("below")(score, by="below"), rows), by="above")


@operator()
def begins_early(prompt: Columns[Prompt]) -> Columns[Keep]:
    """Keeps prompts that begin with a, b or c: 9 of 24."""
    return Columns.make(Keep, like=prompt, keep=[int(p[0] in "abc") for p in prompt["prompt"]])


def trained(name: str, policy: Model, rows: Port[Rollout], loss: Loss, *more: Node) -> Graph:
    return Graph(name, train(policy, rows, loss=loss, lr=1e-3), *more)


def prompts_chosen(folder: Path, *, refill: bool = True) -> Graph:
    """Only some prompts are answered, each by a group."""
    policy, asked = policy_and_prompts(folder)
    chosen = select(asked, where=begins_early(asked), refill=refill, max_attempts=20)
    rollout = generate(policy, chosen, n=3, max_tokens=6, name="rollout")
    advantage = group_advantage(rollout, reward(told_apart, rollout, name="score"))
    return trained("prompts_chosen", policy, rollout, clipped_policy_loss(advantage))


def remax(folder: Path, *, n: int = 2, greedy: int = 1) -> Graph:
    """Several answers compared with the mean of others (one greedy: ReMax) to the same prompt."""
    policy, asked = policy_and_prompts(folder)
    rollout = generate(policy, asked, n=n, max_tokens=6, name="rollout")
    heat = 0.0 if greedy == 1 else 1.0
    other = generate(policy, asked, n=greedy, max_tokens=6, temperature=heat, name="greedy")
    baseline = watched_mean(reward(told_apart, other, name="greedy_score"), asked)
    score = reward(told_apart, rollout, name="score")
    advantage = baseline_advantage(rollout, score, baseline, name="advantage")
    return trained("remax", policy, rollout, policy_gradient_loss(advantage))


def own_baseline(folder: Path) -> Graph:
    """A single answer is compared with the mean of its prompt's answers, itself: no gradient."""
    policy, asked = policy_and_prompts(folder)
    rollout = generate(policy, asked, max_tokens=6, name="rollout")
    score = reward(told_apart, rollout, name="score")
    advantage = baseline_advantage(rollout, score, mean_over(score, asked), name="advantage")
    return trained("own_baseline", policy, rollout, policy_gradient_loss(advantage))


def turns(
    folder: Path,
    *,
    n: int = 2,
    second: int = 2,
    max_lag: int = 0,
    selects: bool = False,
    drops: bool = False,
) -> Graph:
    """Turn 1 gets the mean reward of its turns 2 that a selection leaves."""
    policy, rollout = rolled_out(folder, n, max_lag=max_lag)
    later = answered_again(policy, rollout, second, max_lag=max_lag)
    fn = not_all if drops else told_apart
    score = reward(fn, later, on_error="drop_group", name="later_score")
    score = watched_mean(select(score, where=wide(later)) if selects else score, rollout)
    advantage = returns(rollout, score) if n == 1 else group_advantage(rollout, score)
    return trained("turns", policy, rollout, clipped_policy_loss(advantage))


@operator()
def sure(rows: Columns[Logprobs]) -> Columns[Reward]:
    given = rows["logprobs"]
    total = np.bincount(given.segments(), weights=given.values, minlength=len(given))
    return Columns.make(Reward, like=rows, reward=total)


def sure_turns(folder: Path) -> Graph:
    """Turn 1 gets the likelihood of turn 2 under the Step's policy: a mean below the cut."""
    policy, rollout = rolled_out(folder, 2)
    later = answered_again(policy, rollout, 3)
    score = watched_mean(sure(logprobs(policy, later, name="now")), rollout)
    loss = clipped_policy_loss(group_advantage(rollout, score))
    return trained("sure_turns", policy, rollout, loss)


def evaluated_turns(folder: Path) -> Graph:
    """An evaluation by the mean of several judgements per answer."""
    policy, rollout = rolled_out(folder, 2)
    advantage = group_advantage(rollout, reward(told_apart, rollout, name="score"))
    held = prompts(str(folder / "test.parquet"), shuffle=False, name="held_out")
    answer = generate(policy, held, n=2, max_tokens=6, name="answer")
    judge = Model("judge", str(folder / "model"))
    judged = answered_again(judge, answer, 3, "judged")
    score = watched_mean(reward(told_apart, judged, name="verdict"), answer)
    evaluation = evaluate(policy, score, every=2)
    return trained("evaluated_turns", policy, rollout, clipped_policy_loss(advantage), evaluation)


@operator(parent="first", reads={"later": ["prompt"]})
def linked(later: Columns[Rollout], first: Columns[Rollout]) -> Columns[Reward]:
    """The length of the answer that was asked about, which is the ancestor's by the question."""
    for question, text in zip(later["prompt"], first["completion"], strict=True):
        assert question == f"{text}?"
    lengths = [float(sum(map(ord, text)) % 97) for text in first["completion"]]
    return Columns.make(Reward, like=later, reward=lengths)


def linked_turns(folder: Path, *, n: int = 2, second: int = 2) -> Graph:
    """Turn 2 is trained on a reward that reads turn 1 by key."""
    policy, rollout = rolled_out(folder, n)
    later = answered_again(policy, rollout, second)
    kept = select(later, where=wide(later))
    loss = policy_gradient_loss(returns(kept, seen(linked(kept, rollout), by="linked")))
    return trained("linked_turns", policy, kept, loss)


@operator()
def one_token_less(rollout: Columns[Rollout]) -> Columns[Advantage]:
    """Of the third row."""
    lengths = rollout["completion_mask"].lengths
    lengths[2] -= 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ones = Ragged(np.ones(offsets[-1], np.float32), offsets)
    return Columns.make(Advantage, like=rollout, advantage=ones)


@operator()
def one_token_more(rollout: Columns[Rollout]) -> Columns[Completion]:
    """Each answer with its last token twice: a text of its own."""
    columns = {}
    for name in ("completion_ids", "completion_mask"):
        rows = [[*rollout[name][i], rollout[name][i][-1]] for i in range(len(rollout))]
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        values = np.array([x for row in rows for x in row], rollout[name].values.dtype)
        columns[name] = Ragged(values, offsets)
    return rollout.set(**columns)


def misaligned(folder: Path, *, at_once: bool) -> Graph:
    """Misaligned tokens: as created (at_once), or when log-probs of another text join."""
    policy, rollout = rolled_out(folder, 2)
    if at_once:
        return trained("misaligned", policy, rollout, clipped_policy_loss(one_token_less(rollout)))
    reference = logprobs(Model("reference", str(folder / "model")), one_token_more(rollout))
    advantage = group_advantage(rollout, reward(told_apart, rollout, name="score"))
    loss = clipped_policy_loss(advantage, reference=reference, beta=0.1)
    return trained("misaligned", policy, rollout, loss)


def best_turns(folder: Path) -> Graph:
    """Turn 1 is kept by the score that its turn 2 got."""
    policy, rollout = rolled_out(folder, 4)
    later = answered_again(policy, rollout)
    score = mean_over(reward(told_apart, later, name="later_score"), rollout, name="score")
    rollout, score = select(rollout, score, where=best_of(score, k=2))
    advantage = group_advantage(rollout, score, ragged=True, name="advantage")
    return trained("best_turns", policy, rollout, clipped_policy_loss(advantage))
