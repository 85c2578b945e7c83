"""Dialects of losses: where peers clamp ratios and divergences; values and gradients, near and far.

What TRL, verl and OpenRLHF returned is recorded (test_peers.py). Here are NeMo-RL, written out from
its source in float64 autograd, and numbers that only float32 does not hold.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from operators import loss_formulas, policy_formulas
from tests.unit.test_loss_numbers import (
    Formula,
    drawn,
    estimate,
    gradient_at,
    loss_at,
    ours,
    require_alike,
    row_of,
    surrogate,
    tokens,
)

FAR = (-80.0, -25.0, -21.0, -9.0, -2.0, 0.0, 1e-3, 2.0, 9.9, 21.0, 25.0, 80.0)
"""Log ratios around every clamp."""
PORTS = ("advantage", "old")
REJECTED = row_of([-1.0], advantage=[-1.0], old=[-200.0])
"""A token that is far likelier than it was, and should not be."""


def clipped(peer: str, level: str = "token") -> Formula:
    return ours(policy_formulas.clipped_policy, *PORTS, level=level, dialect=peer)


def kl(peer: str, kind: str = "k3") -> Formula:
    return ours(loss_formulas.kl, "reference", kind=kind, dialect=peer)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**20))
def test_divergences_are_clamped_alone_and_in_a_policy_loss(kind: str, seed: int) -> None:
    def clamped(now: Tensor, reference: Tensor) -> Tensor:
        return estimate((now - reference).clamp(-20.0, 20.0), kind).clamp(-10.0, 10.0)

    def with_clip(now: Tensor, gain: Tensor, old: Tensor, reference: Tensor) -> Tensor:
        return surrogate(now - old, gain, 0.2, 0.2) + 0.1 * clamped(now, reference)

    rows, ports = drawn(seed, FAR), (*PORTS, "reference")
    require_alike(kl("nemo_rl", kind), tokens(clamped, "reference"), rows, atol=1e-5)
    how = {"beta": 0.1, "kl": kind, "dialect": "nemo_rl"}
    formula = ours(policy_formulas.clipped_policy, *ports, **how)
    require_alike(formula, tokens(with_clip, *ports), rows, atol=1e-5)


@pytest.mark.parametrize("peer", ["verl", "openrlhf"])
def test_where_the_ratio_is_clamped_a_token_has_its_number_and_no_gradient(peer: str) -> None:
    formula = clipped(peer)
    assert loss_at(formula, REJECTED) == pytest.approx([torch.tensor(20.0).exp().item()])
    assert gradient_at(formula, REJECTED) == [0.0]


@pytest.mark.parametrize("peer", ["trl", "nemo_rl"])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_a_ratio_that_is_not_clamped_may_be_infinite(peer: str, level: str) -> None:
    assert loss_at(clipped(peer, level), REJECTED) == [torch.inf]


@pytest.mark.parametrize("peer", ["verl", "openrlhf", "nemo_rl"])
@pytest.mark.parametrize("reference", [-torch.inf, 500.0])
def test_a_clamped_divergence_is_finite_where_a_reference_says_never(
    peer: str, reference: float
) -> None:
    rows, formula = row_of([-1.0], reference=[reference]), kl(peer)
    assert (loss_at(formula, rows), gradient_at(formula, rows)) == ([10.0], [0.0])
