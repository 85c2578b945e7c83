"""Sampling: the distribution drawn from, and the recorded log-probability."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.errors import KernelError
from operators.kernels.torch import sampling
from operators.kernels.torch.sampling import Sampling, sample
from tests.kit.turns import example_count

LOGITS = torch.tensor([[2.0, 1.0, 0.5, -1.0, 0.0], [0.0, 0.0, 0.0, 3.0, -2.0]])


def drawn(how: Sampling, count: int = 4000) -> np.ndarray:
    """How often each token of LOGITS comes out, over draws that lie evenly in [0, 1)."""
    draws = torch.from_numpy((np.arange(count) + 0.5) / count)
    shares = []
    for row in LOGITS:
        tokens = sample(row.expand(count, -1), draws, how).tokens
        shares.append(np.bincount(tokens.numpy(), minlength=5) / count)
    return np.array(shares)


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_a_temperature_divides_the_logits(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, -1)
    np.testing.assert_allclose(drawn(Sampling(temperature=temperature)), expected, atol=3e-4)


@pytest.mark.parametrize(("cut", "kept"), [
    ({}, [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
    ({"top_k": 2}, [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]),  # ties with the last stay
    # the first row has 0.56 0.21 0.13 0.03 0.08, of which tokens 0, 1 and 2 reach 0.85
    ({"top_p": 0.85}, [[1, 1, 1, 0, 0], [0, 0, 0, 1, 0]]),
    ({"top_p": 0.5}, [[1, 0, 0, 0, 0], [0, 0, 0, 1, 0]]),
    # of tokens 0 and 1 alone, token 0 has 0.73: enough for 0.7, though it has 0.56 of the whole
    ({"top_k": 2, "top_p": 0.7}, [[1, 0, 0, 0, 0], [0, 0, 0, 1, 0]]),
])  # fmt: skip
def test_tokens_that_are_kept_come_out_as_often_as_the_softmax_says(
    cut: dict[str, Any], kept: list[list[int]]
) -> None:
    expected = torch.tensor(kept) * torch.softmax(LOGITS, -1)
    expected /= expected.sum(-1, keepdim=True)
    np.testing.assert_allclose(drawn(Sampling(**cut)), expected, atol=3e-4)


DRAWS = torch.tensor([0.3, 0.6], dtype=torch.float64)


@pytest.mark.parametrize("cut", [{}, {"top_k": 2}, {"top_p": 0.6}], ids=str)
def test_the_recorded_logprob_is_that_before_truncation(cut: dict[str, Any]) -> None:
    drawn = sample(LOGITS, DRAWS, Sampling(temperature=0.7, **cut))
    expected = torch.log_softmax(LOGITS / 0.7, -1).gather(1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs, expected)


@pytest.mark.parametrize(
    "cut", [{"top_k": 2}, {"top_p": 0.6}, {"top_k": 3, "top_p": 0.8}, {"top_k": 50}]
)
def test_logprob_less_mass_is_how_often_the_token_is_drawn(cut: dict[str, Any]) -> None:
    how = Sampling(temperature=0.7, **cut)
    shares, every = drawn(how), (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    for logits, share in zip(LOGITS, shares, strict=True):
        sampled = sample(logits.expand(4000, -1), every, how)
        assert sampled.mass.unique().numel() == 1
        behaviour = (sampled.logprobs - sampled.mass).exp()
        np.testing.assert_allclose(behaviour, share[sampled.tokens], atol=3e-4)
        assert cut.get("top_k") != 50 or sampled.mass[0].item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    "uncut", [{}, {"temperature": 0.5}, {"temperature": 0.0, "top_k": 3, "top_p": 0.5}], ids=str
)
def test_mass_is_on_record_only_where_something_may_be_cut(uncut: dict[str, Any]) -> None:
    assert sample(LOGITS, DRAWS, Sampling(**uncut)).mass is None


@settings(max_examples=example_count(40), deadline=None)
@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=12),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 4),
    st.floats(0.05, 1.0),
)
def test_a_token_that_was_cut_is_never_drawn(
    logits: list[float], draw: float, top_k: int, top_p: float
) -> None:
    row = torch.tensor([logits], dtype=torch.float32)
    for u in (draw, 0.0, 1.0 - 2.0**-53):
        how = Sampling(top_k=top_k, top_p=top_p)
        sampled = sample(row, torch.tensor([u], dtype=torch.float64), how)
        better = row[0] > row[0, sampled.tokens[0]]
        assert not top_k or better.sum() < top_k
        assert torch.softmax(row[0], -1)[better].sum() < top_p + 1e-6 or top_k
        assert torch.isfinite(sampled.logprobs).all()
        if sampled.mass is not None:  # a token is at most as likely as all that were kept
            assert sampled.logprobs[0] - 1e-5 <= sampled.mass[0] <= 0.0


def test_blocks_of_a_large_vocabulary_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    given = torch.randn(23, 50), torch.rand(23, dtype=torch.float64), Sampling(top_k=9)
    whole = sample(*given)
    monkeypatch.setattr(sampling, "BLOCK", 100)
    parts = sample(*given)
    for name in ("tokens", "logprobs", "mass"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(KernelError, match="0 < top_p <= 1"):
        Sampling(top_p=1.1)


@pytest.mark.parametrize("how", [Sampling(), Sampling(temperature=0.0), Sampling(top_p=0.5)])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_named(how: Sampling, number: float) -> None:
    logits = LOGITS.clone()
    logits[1, 3] = number
    with pytest.raises(KernelError, match="expected finite logits, found NaN or infinity"):
        sample(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), how)


def test_a_token_that_is_ruled_out_is_no_fault() -> None:
    logits = LOGITS.clone()
    logits[:, 0] = -torch.inf
    tokens = sample(logits, torch.tensor([0.0, 0.0], dtype=torch.float64), Sampling()).tokens
    assert tokens.tolist() == [1, 1]
