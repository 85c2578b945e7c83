"""Tasks of a decode loop: random prompts, rows of several lengths, and what was written."""

from __future__ import annotations

import numpy as np

from dataflow.batch import Ragged
from operators.kernels.decoding import DecodeTask, Written
from operators.kernels.torch.decode import Decoder
from operators.kernels.torch.sampling import Sampling
from tests.kit.rows import ragged

PLAIN, CUT = Sampling(temperature=0.8), Sampling(temperature=0.7, top_k=20, top_p=0.8)


def make_task(
    prompts: Ragged,
    *,
    n: int = 1,
    slots: int = 64,
    max_tokens: int = 20,
    how: Sampling = PLAIN,
    budget: int = 64,
) -> DecodeTask:
    """Rows that end at an id or at one of several lengths."""
    return DecodeTask(
        prompts=prompts,
        n=n,
        seeds=np.arange(len(prompts) * n, dtype=np.uint64) << np.uint64(60),
        max_tokens=max_tokens,
        how=how,
        ends=np.array([5, 6], np.int64),
        slots=slots,
        budget=budget,
        stopped=lambda tails: np.array([len(tail) > 3 + tail[0] % max_tokens for tail in tails]),
        window=max_tokens,
    )


def random_prompts(lengths: list[int], shared: int) -> Ragged:
    """Prompts of these lengths behind a beginning of `shared` tokens."""
    draw = np.random.default_rng(len(lengths))
    beginning = draw.integers(7, 95, shared).tolist()
    return ragged([beginning + draw.integers(7, 95, length).tolist() for length in lengths])


def written_by(decoder: Decoder, renewals: int = 0) -> Written:
    """All rows. renewals: after how many steps with ended rows all keys are computed again."""
    for step, _ in enumerate(decoder.write_rows()):
        if step < renewals:
            decoder.renew(step + 1)
    return decoder.written


def require_same(one: Written, other: Written) -> None:
    """The same tokens, and log-probs that differ by rounding."""
    assert one.length.tolist() == other.length.tolist()
    assert one.stop.tolist() == other.stop.tolist()
    for row, length in enumerate(one.length):
        assert one.tokens[row, :length].tolist() == other.tokens[row, :length].tolist()
        np.testing.assert_allclose(
            one.logprobs[row, :length], other.logprobs[row, :length], atol=1e-4
        )
        assert (one.mass is None) == (other.mass is None)
        if one.mass is not None and other.mass is not None:
            np.testing.assert_allclose(one.mass[row, :length], other.mass[row, :length], atol=1e-4)
