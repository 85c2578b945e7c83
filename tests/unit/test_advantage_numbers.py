"""Returns, whitening and shaping against plain float64 loops, dialects against their peers.

The peers' formulas are written out from their sources: TRL `grpo_trainer`, `rloo_trainer` and
`ppo_trainer`, verl `core_algos` and `torch_functional`, OpenRLHF `experience_maker` and
`models/utils`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys, Ragged
from dataflow.convention import DIALECTS
from dataflow.schema import Advantage, Logprobs, Reward, Rollout, TokenReward, Values
from dataflow.user import Columns
from operators import advantage_formulas as formulas

CLAMPS = ("openrlhf", "nemo_rl")
"""Dialects that whiten by a variance of at least 1e-8; the others add that to it."""


class DrawnRows:
    """Float32 rows in groups of 1 to 4, one in five of them empty, with holes in their masks.

    Columns of tokens are flat lists. spans: where each row begins and ends in them.
    """

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        sizes = draw.integers(1, 5, draw.integers(1, 5))
        count = sizes.sum()
        samples = np.concatenate([np.arange(size) for size in sizes])
        self.keys = Keys.of(np.repeat(np.arange(len(sizes)) * 3 + 7, sizes), samples)
        lengths = draw.integers(1, 6, count) * (draw.random(count) < 0.8)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.spans = list(pairwise(self.offsets.tolist()))
        total = lengths.sum()
        self.mask = (draw.random(total) < 0.75).astype(int).tolist()
        rewards = draw.choice([0.0, 1.0, 1e3], count) + draw.random(count)
        self.reward = rewards.astype(np.float32)
        self.tokens = {
            name: draw.uniform(-2, 2, total).astype(np.float32).tolist()
            for name in ("value", "advantage", "sampler", "by_token")
        }

    def columns(self, schema: Any, **columns: Any) -> Columns[Any]:
        for name, data in columns.items():
            if isinstance(data, list):
                columns[name] = Ragged(np.array(data), self.offsets)
        return Columns(Batch.make(self.keys, columns, schema), schema)

    @property
    def rollout(self) -> Columns[Rollout]:
        sampler_logprobs = self.tokens["sampler"]
        return self.columns(Rollout, completion_mask=self.mask, sampler_logprobs=sampler_logprobs)

    @property
    def score(self) -> Columns[Reward]:
        return self.columns(Reward, reward=self.reward)

    def rewarded(self) -> Iterator[tuple[float, int, list[int]]]:
        """Of each row its reward, its first token, and those that were written."""
        for reward, (begin, end) in zip(self.reward.tolist(), self.spans, strict=True):
            yield reward, begin, [t for t in range(begin, end) if self.mask[t]]


def require_tokens(column: Ragged, expected: list[float], *, atol: float) -> None:
    np.testing.assert_allclose(column.values, expected, rtol=1e-5, atol=atol)


seeds = given(seed=st.integers(0, 2**20))
few = settings(max_examples=8)


@pytest.mark.parametrize("dialect", DIALECTS)
@few
@seeds
def test_generalised_advantages_and_returns(dialect: str, seed: int) -> None:
    rows, gamma, lam = DrawnRows(seed), 0.9, 0.8
    mask, value = rows.mask, rows.tokens["value"]
    advantages, goals, sums = ([0.0] * len(mask) for _ in range(3))
    for reward, begin, written in rows.rewarded():
        # arXiv:1506.02438, equation 16: the sum of discounted residuals, over the written tokens
        # alone or with holes as steps of value and reward 0.
        steps = written
        if dialect == "openrlhf" and written:
            steps = list(range(begin, written[-1] + 1))
        rewards = [0.0] * (len(steps) - 1) + [reward]
        v = [value[t] * mask[t] for t in steps] + [0.0]
        residual = [rewards[k] + gamma * v[k + 1] - v[k] for k in range(len(steps))]
        for k, t in enumerate(steps):
            if mask[t]:
                later = range(k, len(steps))
                advantages[t] = sum((gamma * lam) ** (j - k) * residual[j] for j in later)
                goals[t] = advantages[t] + v[k]
                sums[t] = sum(gamma ** (j - k) * rewards[j] for j in later)
    values, how = rows.columns(Values, values=value), {"gamma": gamma, "dialect": dialect}
    estimated = formulas.gae(rows.rollout, rows.score, values, lam=lam, **how)
    require_tokens(estimated["advantage"], advantages, atol=1e-4)
    require_tokens(estimated["returns"], goals, atol=1e-4)
    summed = formulas.returns(rows.rollout, rows.score, **how)
    require_tokens(summed["advantage"], sums, atol=1e-4)
    require_tokens(summed["returns"], sums, atol=1e-4)


@pytest.mark.parametrize("dialect", DIALECTS)
@few
@seeds
def test_rewards_of_tokens_are_summed_and_those_of_holes_go_to_the_token_before(
    dialect: str, seed: int
) -> None:
    rows = DrawnRows(seed)
    by_token = rows.tokens["by_token"]
    score = rows.columns(TokenReward, reward=rows.reward, token_reward=by_token)
    sums = [
        sum(by_token[t:end]) * rows.mask[t] for begin, end in rows.spans for t in range(begin, end)
    ]
    summed = formulas.returns(rows.rollout, score, gamma=1.0, dialect=dialect)
    require_tokens(summed["returns"], sums, atol=1e-5)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-5, 0.0])
@few
@seeds
def test_whiten(dialect: str, shift: bool, size: float, seed: int) -> None:
    rows = DrawnRows(seed)
    least = 3.0 if size == 0.0 else 0.0
    value = [float(np.float32(x * size + least)) for x in rows.tokens["advantage"]]
    written = [x for x, m in zip(value, rows.mask, strict=True) if m]
    if len(written) < 2:  # both peers raise, or divide by 0
        return
    mean = math.fsum(written) / len(written)
    squares = math.fsum((x - mean) ** 2 for x in written)
    if dialect in CLAMPS:  # var.clamp(min=1e-8).rsqrt()
        scale = 1 / math.sqrt(max(squares / len(written), 1e-8))
    else:  # rsqrt(unbiased var + 1e-8)
        scale = 1 / math.sqrt(squares / (len(written) - 1) + 1e-8)
    back = 0.0 if shift else mean
    expected = [((x - mean) * scale + back) * m for x, m in zip(value, rows.mask, strict=True)]
    columns = rows.columns(Advantage, advantage=value)
    whitened = formulas.whiten(columns, rows.rollout, shift=shift, dialect=dialect)
    require_tokens(whitened["advantage"], expected, atol=1e-5)


def kl_formula(kind: str, d: float) -> float:
    """Of one token, with d = log policy - log reference."""
    return {"k1": d, "k2": d * d / 2, "k3": math.expm1(-d) + d}[kind]


def kl_of_nemo(kind: str, d: float) -> float:
    clamped = kl_formula(kind, min(max(d, -20.0), 20.0))
    return min(max(clamped, -10.0), 10.0)


# Those of verl and OpenRLHF are recorded: test_peers.py.
KL = {"trl": kl_formula, "nemo_rl": kl_of_nemo}


@pytest.mark.parametrize("dialect", KL)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@few
@seeds
def test_kl_in_reward(dialect: str, kind: str, seed: int) -> None:
    rows = DrawnRows(seed)
    sampler = rows.tokens["sampler"]
    distances = [0.0, 0.0, 3.0, -3.0, 15.0, -15.0, 40.0, -40.0]
    far = np.random.default_rng(seed).choice(distances, len(sampler))
    reference = (np.array(sampler) - far).astype(np.float32).tolist()
    expected, foreign = [0.0] * len(sampler), [math.nan] * len(sampler)
    for reward, _, written in rows.rewarded():
        for t in written:
            foreign[t] = reference[t]
            expected[t] = -0.1 * KL[dialect](kind, sampler[t] - reference[t])
        if written:
            expected[written[-1]] += reward
    logprobs = rows.columns(Logprobs, logprobs=foreign)
    how = {"beta": 0.1, "kind": kind, "dialect": dialect}
    penalised = formulas.kl_in_reward(rows.rollout, rows.score, logprobs, **how)
    require_tokens(penalised["token_reward"], expected, atol=1e-4)
    sums = [math.fsum(expected[begin:end]) for begin, end in rows.spans]
    np.testing.assert_allclose(penalised["reward"], sums, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dialect", ["verl", "nemo_rl"])
def test_overlong_answers_by_hand(dialect: str) -> None:
    """DAPO, equation 13, at lengths around max_tokens - buffer = 6 and max_tokens = 10. What TRL
    and OpenRLHF make of it is recorded: test_peers.py.
    """
    lengths = [0, 5, 6, 7, 10, 14]
    answers = {"completion_ids": [[0] * length for length in lengths], "reward": [1.0] * 6}
    rows = Columns(Batch.make(Keys.of(range(6)), answers, Rollout), Rollout)
    how = {"max_tokens": 10, "buffer": 4, "factor": 0.5, "dialect": dialect}
    rewards = formulas.overlong_penalty(rows, rows, **how)["reward"].tolist()
    assert rewards == [1.0, 1.0, 1.0, 0.875, 0.5, 0.0]
