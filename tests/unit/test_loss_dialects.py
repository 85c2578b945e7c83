"""Dialects of losses: where peers clamp ratios and divergences; values and gradients, near and far.

The references are the peers' formulas in float64 autograd, written out from their sources.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dataflow.convention import DIALECTS
from dataflow.loss import Now, Tensors, Terms
from operators import loss_formulas, policy_formulas

FAR = (-80.0, -25.0, -21.0, -9.0, -2.0, 0.0, 1e-3, 2.0, 9.9, 21.0, 25.0, 80.0)
"""Log ratios around every clamp."""

LENGTHS = (3, 2, 4)
ROW = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
MASK = torch.tensor([1, 0, 1, 1, 1, 1, 1, 0, 1.0])


def now(said: Tensor) -> Now:
    groups = torch.arange(3)
    return Now(
        mask=MASK, step=1, rows=3, groups=3, logprobs=said, row=ROW, group=ROW, row_group=groups
    )


def port(**columns: Tensor) -> Tensors[Any]:
    return Tensors({name: column.float() for name, column in columns.items()})


def near(ahead: Tensor, peer: str) -> Tensor:
    return ahead.clamp(-20.0, 20.0) if peer in ("verl", "openrlhf") else ahead


def of_row(ahead: Tensor, peer: str) -> Tensor:
    """The mean over the trained tokens of each row, by token."""
    sums = torch.zeros(3, dtype=ahead.dtype).index_add(0, ROW, ahead * MASK)
    counts = torch.zeros(3, dtype=ahead.dtype).index_add(0, ROW, MASK.to(ahead.dtype))
    row = (sums / counts)[ROW]
    return row.clamp(max=10.0) if peer == "verl" else row


def surrogate(ahead: Tensor, gain: Tensor) -> Tensor:
    ratio = ahead.exp()
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)


def gate(ahead: Tensor, gain: Tensor) -> Tensor:
    return -gain * torch.sigmoid(ahead.exp() - 1.0) * 4.0


def estimate(d: Tensor, kind: str, peer: str) -> Tensor:
    if peer == "nemo_rl" or (peer == "verl" and kind == "k3"):
        d = d.clamp(-20.0, 20.0)
    if peer == "openrlhf" and kind == "k3":
        d = d.clamp(min=-10.0)
    found = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[kind]
    clamped = {"trl": (), "verl": ("k3",)}.get(peer, ("k1", "k2", "k3"))
    return found.clamp(-10.0, 10.0) if kind in clamped else found


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs now, log ratios, advantages; float64."""
    draw = np.random.default_rng(seed)
    size = len(MASK)
    gains = draw.choice([-2.0, -0.5, 0.0, 1.0], size)
    arrays = (draw.uniform(-4, 0, size), draw.choice(FAR, size), gains)
    said, away, gain = (torch.from_numpy(a.astype(np.float32)).double() for a in arrays)
    return said, away, gain


def same(ours: Any, theirs: Any, said: Tensor) -> None:
    """Values and gradients of the trained tokens, a weight on each. ours: float32."""
    weight = torch.linspace(0.5, 1.5, len(MASK))
    single, double = said.float().requires_grad_(), said.clone().requires_grad_()
    terms: Terms = ours(single)
    wanted = theirs(double)
    kept = MASK > 0
    close = {"rtol": 2e-5, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(terms.loss[kept], wanted[kept], **close)
    (found,) = torch.autograd.grad((terms.loss * weight * MASK).sum(), single)
    (right,) = torch.autograd.grad((wanted * weight * MASK).sum(), double)
    torch.testing.assert_close(found, right, **close)


few = settings(max_examples=15, deadline=None)
seeds = given(seed=st.integers(0, 2**20))


@pytest.mark.parametrize("dialect", ["verl", "openrlhf"])
@few
@seeds
def test_the_ratio_of_a_token_is_clamped(dialect: str, seed: int) -> None:
    said, away, gain = drawn(seed)
    old = said - away
    how = {"clip": 0.2, "dialect": dialect}
    ports = port(advantage=gain), port(logprobs=old)
    before = old.float().double()
    same(
        lambda x: policy_formulas.clipped_policy(now(x), *ports, **how),
        lambda x: surrogate(near(x - before, dialect), gain),
        said,
    )
    same(
        lambda x: policy_formulas.soft_clipped_policy(now(x), *ports, tau_neg=1.0, dialect=dialect),
        lambda x: gate(near(x - before, dialect), gain),
        said,
    )


@pytest.mark.parametrize("dialect", ["verl", "openrlhf"])
def test_where_the_ratio_is_clamped_a_token_has_its_number_and_no_gradient(dialect: str) -> None:
    said = torch.full((9,), -1.0, requires_grad=True)
    ports = port(advantage=torch.full((9,), -1.0)), port(logprobs=torch.full((9,), -200.0))
    loss = policy_formulas.clipped_policy(now(said), *ports, dialect=dialect).loss
    torch.testing.assert_close(loss[0], torch.tensor(20.0).exp())
    (found,) = torch.autograd.grad(loss.sum(), said)
    assert not found.any()
    assert policy_formulas.clipped_policy(now(said), *ports, dialect="trl").loss[0] == torch.inf


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
@few
@seeds
def test_the_ratio_of_a_row_is_clamped_from_above_by_verl(
    dialect: str, level: str, seed: int
) -> None:
    said, away, gain = drawn(seed)
    gain, away = gain[ROW * 2], away.clamp(-25.0, 25.0)  # one advantage for a row
    before = (said - away).float().double()
    ports = port(advantage=gain), port(logprobs=before)

    def theirs(x: Tensor) -> Tensor:
        if level == "sequence":
            return surrogate(of_row(x - before, dialect), gain)
        row = of_row(x.detach() - before, "trl") + x - x.detach()
        return surrogate(row.clamp(max=10.0) if dialect == "verl" else row, gain)

    same(
        lambda x: policy_formulas.clipped_policy(now(x), *ports, level=level, dialect=dialect),
        theirs,
        said,
    )


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@few
@seeds
def test_divergences_are_clamped(dialect: str, kind: str, seed: int) -> None:
    said, away, gain = drawn(seed)
    before = (said - away).float().double()
    ports = port(advantage=gain), port(logprobs=said), port(logprobs=before)
    same(
        lambda x: loss_formulas.kl(now(x), ports[2], kind=kind, dialect=dialect),
        lambda x: estimate(x - before, kind, dialect),
        said,
    )
    how = {"beta": 0.1, "kl": kind, "dialect": dialect}
    same(
        lambda x: policy_formulas.clipped_policy(now(x), *ports, **how),
        lambda x: surrogate(x - said, gain) + 0.1 * estimate(x - before, kind, dialect),
        said,
    )


@pytest.mark.parametrize("dialect", ["verl", "openrlhf", "nemo_rl"])
def test_a_clamped_divergence_is_finite_where_a_reference_says_never(dialect: str) -> None:
    said = torch.full((9,), -1.0, requires_grad=True)
    for reference in (-torch.inf, 500.0):
        terms = loss_formulas.kl(
            now(said), port(logprobs=torch.full((9,), reference)), dialect=dialect
        )
        (found,) = torch.autograd.grad(terms.loss.sum(), said)
        assert terms.loss[0] == 10.0
        assert not found.any()
