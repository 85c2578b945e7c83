"""Returns, whitening and shaping against plain float64 loops, dialects against their peers.

The peers' formulas are written out from their sources: TRL `grpo_trainer`, `rloo_trainer` and
`ppo_trainer`, verl `core_algos` and `torch_functional`, OpenRLHF `experience_maker` and
`models/utils`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

Rows = list[list[float]]


class DrawnRows:
    """Float32 rows in groups of 1 to 4, one in five of them empty, with holes in their masks."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        sizes = draw.integers(1, 5, draw.integers(1, 5))
        self.groups = np.repeat(np.arange(len(sizes)), sizes).tolist()
        self.lengths = (
            draw.integers(1, 6, len(self.groups)) * (draw.random(len(self.groups)) < 0.8)
        ).tolist()
        self.keys = Keys.of(
            np.array(self.groups) * 3 + 7,
            [self.groups[:i].count(g) for i, g in enumerate(self.groups)],
        )
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self.mask = self.cut((draw.random(sum(self.lengths)) < 0.75).astype(np.float32))
        self.reward = (
            draw.choice([0.0, 1.0, 1e3], len(self.groups)) + draw.random(len(self.groups))
        ).astype(np.float32)
        self.tokens = {
            name: self.cut(draw.uniform(-2, 2, sum(self.lengths)).astype(np.float32))
            for name in ("value", "advantage", "sampler", "reference", "by_token")
        }

    def cut(self, flat: np.ndarray) -> Rows:
        return [flat[a:b].tolist() for a, b in zip(self.offsets, self.offsets[1:], strict=False)]

    def columns(self, schema: Any, **given: Any) -> Columns[Any]:
        """Rows of lists become token columns."""
        for name, data in given.items():
            if isinstance(data, list):
                kind = np.uint8 if name == "completion_mask" else np.float32
                given[name] = Ragged(np.array([x for row in data for x in row], kind), self.offsets)
        return Columns(Batch.make(self.keys, given, schema), schema)

    @property
    def rollout(self) -> Columns[Rollout]:
        sampler_logprobs = self.tokens["sampler"]
        return self.columns(Rollout, completion_mask=self.mask, sampler_logprobs=sampler_logprobs)

    @property
    def score(self) -> Columns[Reward]:
        return self.columns(Reward, reward=self.reward)

    def members(self, row: int) -> list[float]:
        """The rewards of a row's group."""
        rewards = zip(self.reward.tolist(), self.groups, strict=True)
        return [reward for reward, group in rewards if group == self.groups[row]]


def require_rows(found: Ragged, wanted: Rows, *, atol: float = 1e-6) -> None:
    flat = [x for row in wanted for x in row]
    np.testing.assert_allclose(found.values, flat, rtol=1e-5, atol=atol)


def on_tokens(numbers: Sequence[float], mask: Rows) -> Rows:
    return [[x * m for m in row] for x, row in zip(numbers, mask, strict=True)]


seeds = given(seed=st.integers(0, 2**20))
few = settings(max_examples=8, deadline=None)


@pytest.mark.parametrize("dialect", DIALECTS)
@few
@seeds
def test_generalised_advantages_and_returns(dialect: str, seed: int) -> None:
    rows, gamma, lam = DrawnRows(seed), 0.9, 0.8
    advantages, goals, sums = [], [], []
    for row, (mask, value) in enumerate(zip(rows.mask, rows.tokens["value"], strict=True)):
        # arXiv:1506.02438, equation 16: the sum of discounted residuals, over the written tokens
        # alone or with holes as steps of value and reward 0.
        last = max((t for t, m in enumerate(mask) if m), default=-1)
        steps = [t for t, m in enumerate(mask) if (m or dialect == "openrlhf") and t <= last]
        reward = [float(rows.reward[row]) * (t == last) for t in steps]
        v = [value[t] * mask[t] for t in steps] + [0.0]
        residual = [reward[k] + gamma * v[k + 1] - v[k] for k in range(len(steps))]
        advantage, goal, total = ([0.0] * len(mask) for _ in range(3))
        for k, t in ((k, t) for k, t in enumerate(steps) if mask[t]):
            later = range(k, len(steps))
            advantage[t] = sum((gamma * lam) ** (j - k) * residual[j] for j in later)
            goal[t] = advantage[t] + v[k]
            total[t] = sum(gamma ** (j - k) * reward[j] for j in later)
        advantages.append(advantage), goals.append(goal), sums.append(total)
    values = rows.columns(Values, values=rows.tokens["value"])
    found = formulas.gae(rows.rollout, rows.score, values, gamma=gamma, lam=lam, dialect=dialect)
    require_rows(found["advantage"], advantages, atol=1e-4)
    require_rows(found["returns"], goals, atol=1e-4)
    summed = formulas.returns(rows.rollout, rows.score, gamma=gamma, dialect=dialect)
    require_rows(summed["advantage"], sums, atol=1e-4)
    require_rows(summed["returns"], sums, atol=1e-4)


@pytest.mark.parametrize("dialect", DIALECTS)
@few
@seeds
def test_rewards_of_tokens_are_summed_and_those_of_holes_go_to_the_token_before(
    dialect: str, seed: int
) -> None:
    rows = DrawnRows(seed)
    score = rows.columns(TokenReward, reward=rows.reward, token_reward=rows.tokens["by_token"])
    wanted = [
        [sum(by_token[t:]) if m else 0.0 for t, m in enumerate(mask)]
        for mask, by_token in zip(rows.mask, rows.tokens["by_token"], strict=True)
    ]
    found = formulas.returns(rows.rollout, score, gamma=1.0, dialect=dialect)
    require_rows(found["returns"], wanted, atol=1e-5)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-5, 0.0])
@few
@seeds
def test_whiten(dialect: str, shift: bool, size: float, seed: int) -> None:
    rows = DrawnRows(seed)
    value = [
        [float(np.float32(x * size + 3.0 * (size == 0.0))) for x in row]
        for row in rows.tokens["advantage"]
    ]
    written = [
        x
        for row, mask in zip(value, rows.mask, strict=True)
        for x, m in zip(row, mask, strict=True)
        if m
    ]
    if len(written) < 2:  # both peers raise, or divide by 0
        return
    mean = math.fsum(written) / len(written)
    squares = math.fsum((x - mean) ** 2 for x in written)
    if dialect in ("openrlhf", "nemo_rl"):  # var.clamp(min=1e-8).rsqrt()
        scale = 1 / math.sqrt(max(squares / len(written), 1e-8))
    else:  # rsqrt(unbiased var + 1e-8)
        scale = 1 / math.sqrt(squares / (len(written) - 1) + 1e-8)
    wanted = [
        [((x - mean) * scale + mean * (not shift)) * m for x, m in zip(row, mask, strict=True)]
        for row, mask in zip(value, rows.mask, strict=True)
    ]
    columns = rows.columns(Advantage, advantage=value)
    found = formulas.whiten(columns, rows.rollout, shift=shift, dialect=dialect)
    require_rows(found["advantage"], wanted, atol=1e-5)


def test_whitening_what_does_not_vary_clamps_or_adds() -> None:
    """At a variance of 1e-8, adding 1e-8 halves what the clamp leaves as it is."""
    rows = DrawnRows(0)
    rows.mask = [[1.0] * n for n in rows.lengths]
    count = sum(rows.lengths)
    flat = [1e-4 * (-1) ** i for i in range(count)]
    columns = rows.columns(Advantage, advantage=rows.cut(np.array(flat, np.float32)))
    biased, unbiased = (float(np.var(np.float32(flat), ddof=d)) for d in (0, 1))
    found = {}
    for dialect in DIALECTS:
        whitened = formulas.whiten(columns, rows.rollout, shift=False, dialect=dialect)
        found[dialect] = np.abs(whitened["advantage"].values).max()
    value = 1e-4 / math.sqrt(max(biased, 1e-8))
    assert found["openrlhf"] == found["nemo_rl"] == pytest.approx(value, rel=0.1)
    value = 1e-4 / math.sqrt(unbiased + 1e-8)
    assert found["trl"] == found["verl"] == pytest.approx(value, rel=0.1)


def kl_formula(dialect: str, kind: str, d: float) -> float:
    """Of one token, with d = log policy - log reference, as its peer computes it."""
    if (kind == "k3" and dialect == "verl") or dialect == "nemo_rl":
        d = min(max(d, -20.0), 20.0)
    estimate = {"k1": d, "k2": d * d / 2, "k3": math.expm1(-d) + d}[kind]
    clamps = {"trl": (), "verl": ("k3",)}.get(dialect, ("k1", "k2", "k3"))
    return min(max(estimate, -10.0), 10.0) if kind in clamps else estimate


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@few
@seeds
def test_kl_in_reward(dialect: str, kind: str, seed: int) -> None:
    rows = DrawnRows(seed)
    distances = [0.0, 0.0, 3.0, -3.0, 15.0, -15.0, 40.0, -40.0]
    far = np.random.default_rng(seed).choice(distances, sum(rows.lengths))
    reference = [
        [float(np.float32(s - a)) for s, a in zip(row, away, strict=True)]
        for row, away in zip(rows.tokens["sampler"], rows.cut(far), strict=True)
    ]
    wanted = []
    for row, (mask, own, other) in enumerate(
        zip(rows.mask, rows.tokens["sampler"], reference, strict=True)
    ):
        last = max((t for t, m in enumerate(mask) if m), default=-1)
        penalties = [
            0.1 * kl_formula(dialect, kind, s - r) * bool(m)
            for m, s, r in zip(mask, own, other, strict=True)
        ]
        reward = float(rows.reward[row])
        wanted.append([reward * (t == last) - p for t, p in enumerate(penalties)])
    foreign = [
        [r if m else math.nan for r, m in zip(row, mask, strict=True)]
        for row, mask in zip(reference, rows.mask, strict=True)
    ]
    given, how = rows.columns(Logprobs, logprobs=foreign), {"kind": kind, "dialect": dialect}
    found = formulas.kl_in_reward(rows.rollout, rows.score, given, beta=0.1, **how)
    require_rows(found["token_reward"], wanted, atol=1e-4)
    sums = [math.fsum(row) for row in wanted]
    np.testing.assert_allclose(found["reward"], sums, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_overlong_answers_by_hand(dialect: str) -> None:
    """DAPO, equation 13, at lengths around max_tokens - buffer = 6 and max_tokens = 10."""
    lengths = [0, 5, 6, 7, 10, 14]
    ids = Ragged(np.zeros(sum(lengths), np.int32), np.concatenate([[0], np.cumsum(lengths)]))
    keys = Keys.of(range(len(lengths)))
    rollout = Columns(Batch.make(keys, {"completion_ids": ids}, Rollout), Rollout)
    score = Columns(Batch.make(keys, {"reward": np.ones(6, np.float32)}, Reward), Reward)
    how = {"max_tokens": 10, "buffer": 4, "factor": 0.5, "dialect": dialect}
    beyond = 0.0 if dialect in ("verl", "nemo_rl") else 0.5
    found = formulas.overlong_penalty(rollout, score, **how)["reward"].tolist()
    assert found == [1.0, 1.0, 1.0, 0.875, 0.5, beyond]
