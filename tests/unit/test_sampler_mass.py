"""The mass that top-k and top-p kept of every token, through interruptions, and its columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.batch import Batch
from dataflow.kernel import Layout
from dataflow.schema import TruncatedRollout
from engine.channels.frames import put_together, take_apart
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.models import pieces
from tests.kit.kernels import open_kernel, prompt_chunk
from tests.kit.models import save_tiny
from tests.kit.rows import padded_logits, plain

PROMPTS = ["Reverse this: abc", "add 1 2", "Reverse this: x", "q"] * 3


def opened(base: str, slots: int = 8, **params: Any) -> TorchGenerate:
    given = {"n": 3, "max_tokens": 20, "temperature": 0.9, "stop": ("a", "X", "7")} | params
    return open_kernel(TorchGenerate(), base, layout=Layout(slots=slots), **given)


def answers(base: str, **params: Any) -> Batch:
    """To two prompts, in one batch."""
    (rows,) = opened(base, slots=64, **params).run(prompt_chunk(PROMPTS[:2]))
    return rows


def masses(
    base: str, rows: Batch, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray:
    """Log of what top-k, then top-p, keep of each distribution: a full forward of transformers."""
    logs: list[float] = []
    with torch.no_grad():
        logits = torch.cat(padded_logits(plain(base), rows))
    for distribution in (logits / temperature).double().softmax(-1):
        best = distribution.sort(descending=True).values[: top_k or None]
        share = best / best.sum()
        logs.append(float(best[share.cumsum(0) - share < top_p].sum().log()))
    return np.array(logs)


@pytest.mark.long
@pytest.mark.parametrize("cut", [{"top_p": 0.6}, {"top_k": 9, "top_p": 0.8}])
def test_each_token_has_the_mass_of_the_cut_that_it_was_drawn_behind(
    base: str, tmp_path: Path, cut: dict[str, Any]
) -> None:
    bases = base, save_tiny(tmp_path, seed=1)
    kernel = opened(base, slots=5, **cut)
    running = kernel.run(prompt_chunk(PROMPTS))
    first = [next(running) for _ in range(2)]
    kernel.load(pieces(opened(bases[1])._module), 3)
    rows = Batch.concat(first + list(running))
    versions = rows.ragged("version")
    assert any(len(set(versions[i])) == 2 for i in range(len(rows))), "no row was interrupted"
    expected = [masses(each, rows, 0.9, **cut) for each in bases]
    mass = rows.ragged("sampler_mass")
    np.testing.assert_array_equal(mass.offsets, versions.offsets)
    np.testing.assert_allclose(mass.values, np.where(versions.values == 0, *expected), atol=1e-4)
    assert mass.values.min() < -0.01


def test_the_cut_changes_neither_tokens_nor_logprobs_of_a_sampler_that_cuts_nothing(
    base: str,
) -> None:
    whole, cut = answers(base), answers(base, top_k=10_000)
    for name in whole.names:
        assert whole.array(name).equals(cut.array(name)), name
    np.testing.assert_allclose(cut.ragged("sampler_mass").values, 0.0, atol=1e-6)


def test_what_recorded_logprobs_are_of_travels_with_them(base: str) -> None:
    rows = answers(base, top_p=0.5)
    framed = take_apart(rows.records)
    sent = put_together(framed.layout, framed.rows, framed.nodes, framed.buffers)
    twice, some = Batch.concat([rows, rows]), rows.take(np.array([1]))
    for records in (rows.records, rows.with_keys(), twice.records, some.records, sent):
        for name in ("sampler_logprobs", "sampler_mass"):
            said = TruncatedRollout.columns[name].distribution
            assert "top-k and top-p" in said
            assert records.schema.field(name).metadata == {b"distribution": said.encode()}
        assert records.schema.field("version").metadata is None
