"""Dialects of losses: where peers clamp ratios and divergences; values and gradients, near and far.

The references are the peers' formulas in float64 autograd, written out from their sources.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dataflow.convention import DIALECTS
from operators import loss_formulas, policy_formulas
from tests.unit.test_loss_numbers import (
    FlatRows,
    Formula,
    Textbook,
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


def near(ahead: Tensor, peer: str) -> Tensor:
    return ahead.clamp(-20.0, 20.0) if peer in ("verl", "openrlhf") else ahead


def clipped(peer: str) -> tuple[Formula, Textbook]:
    def textbook(now: Tensor, gain: Tensor, old: Tensor) -> Tensor:
        return surrogate(near(now - old, peer), gain, 0.2, 0.2)

    formula = ours(policy_formulas.clipped_policy, *PORTS, dialect=peer)
    return formula, tokens(textbook, *PORTS)


def softly_clipped(peer: str) -> tuple[Formula, Textbook]:
    def textbook(now: Tensor, gain: Tensor, old: Tensor) -> Tensor:
        return -gain * torch.sigmoid(near(now - old, peer).exp() - 1.0) * 4.0

    formula = ours(policy_formulas.soft_clipped_policy, *PORTS, tau_neg=1.0, dialect=peer)
    return formula, tokens(textbook, *PORTS)


def clipped_by_row(peer: str, level: str) -> tuple[Formula, Textbook]:
    """The ratio of a row is the mean over its trained tokens; verl clamps it from above."""

    def textbook(rows: FlatRows, said: Tensor) -> Tensor:
        ahead = torch.where(rows.mask > 0, said - rows.columns["old"].nan_to_num(), 0.0)
        parts = zip(ahead.split(rows.lengths), rows.mask.split(rows.lengths), strict=True)
        means = torch.stack([row.sum() / mask.sum().clamp(min=1.0) for row, mask in parts])
        ratio = means[rows.row]
        if level == "sequence_token":
            ratio = ratio.detach() + said - said.detach()
        if peer == "verl":
            ratio = ratio.clamp(max=10.0)
        return surrogate(ratio, rows.columns["advantage"].nan_to_num(), 0.2, 0.2)

    return ours(policy_formulas.clipped_policy, *PORTS, level=level, dialect=peer), textbook


def clamped(d: Tensor, kind: str, peer: str) -> Tensor:
    """An estimate of a divergence."""
    if peer == "nemo_rl" or (peer == "verl" and kind == "k3"):
        d = d.clamp(-20.0, 20.0)
    if peer == "openrlhf" and kind == "k3":
        d = d.clamp(min=-10.0)
    found = estimate(d, kind)
    bounded = {"trl": (), "verl": ("k3",)}.get(peer, ("k1", "k2", "k3"))
    return found.clamp(-10.0, 10.0) if kind in bounded else found


def kl(peer: str, kind: str) -> tuple[Formula, Textbook]:
    def textbook(now: Tensor, reference: Tensor) -> Tensor:
        return clamped(now - reference, kind, peer)

    formula = ours(loss_formulas.kl, "reference", kind=kind, dialect=peer)
    return formula, tokens(textbook, "reference")


def clipped_with_kl(peer: str, kind: str) -> tuple[Formula, Textbook]:
    def textbook(now: Tensor, gain: Tensor, old: Tensor, reference: Tensor) -> Tensor:
        loss = surrogate(near(now - old, peer), gain, 0.2, 0.2)
        return loss + 0.1 * clamped(now - reference, kind, peer)

    ports, how = (*PORTS, "reference"), {"beta": 0.1, "kl": kind, "dialect": peer}
    return ours(policy_formulas.clipped_policy, *ports, **how), tokens(textbook, *ports)


CASES = {
    **{f"clipped, {peer}": clipped(peer) for peer in ("verl", "openrlhf")},
    **{f"softly clipped, {peer}": softly_clipped(peer) for peer in ("verl", "openrlhf")},
}
for _peer in DIALECTS:
    for _level in ("sequence", "sequence_token"):
        CASES[f"{_level}, {_peer}"] = clipped_by_row(_peer, _level)
    for _kind in ("k1", "k2", "k3"):
        CASES[f"{_kind}, {_peer}"] = kl(_peer, _kind)
        CASES[f"clipped with {_kind}, {_peer}"] = clipped_with_kl(_peer, _kind)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_ratios_and_divergences_are_clamped(case: str, seed: int) -> None:
    # Whole rows beyond a clamp would make ratios that float32 does not hold.
    far = tuple(ahead for ahead in FAR if abs(ahead) <= 25.0) if "sequence" in case else FAR
    require_alike(*CASES[case], drawn(seed, far=far), atol=1e-5)


@pytest.mark.parametrize("peer", ["verl", "openrlhf"])
def test_where_the_ratio_is_clamped_a_token_has_its_number_and_no_gradient(peer: str) -> None:
    rows = row_of([-1.0], advantage=[-1.0], old=[-200.0])
    formula = clipped(peer)[0]
    assert loss_at(formula, rows) == pytest.approx([torch.tensor(20.0).exp().item()])
    assert gradient_at(formula, rows) == [0.0]
    assert loss_at(clipped("trl")[0], rows) == [torch.inf]


@pytest.mark.parametrize("peer", ["verl", "openrlhf", "nemo_rl"])
@pytest.mark.parametrize("reference", [-torch.inf, 500.0])
def test_a_clamped_divergence_is_finite_where_a_reference_says_never(
    peer: str, reference: float
) -> None:
    rows, formula = row_of([-1.0], reference=[reference]), kl(peer, "k3")[0]
    assert (loss_at(formula, rows), gradient_at(formula, rows)) == ([10.0], [0.0])
