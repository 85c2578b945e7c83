"""A whole run in which the reference's weights wait on the host: the numbers of one without."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.graph import Graph
from graphs.grpo import grpo
from operators.kernels.torch.waiting_weights import WaitingWeights
from tests.kit.run_graphs import vowels
from tests.kit.runs import column, metrics, timeless
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(120)]


def with_reference(folder: Path) -> Graph:
    base, data = str(folder / "model"), str(folder / "train.parquet")
    return grpo(base, data, vowels, n=4, batch=4, max_tokens=6, lr=1e-3, beta=0.1)


def test_a_reference_that_waits_gives_the_same_bits(
    tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the CPU had memory of its own, in this process."""
    usual = tiny.run(with_reference, name="usual", inproc=True)
    copies: list[WaitingWeights] = []
    copy = WaitingWeights._copied

    def counted(weights: WaitingWeights) -> object:
        copies.append(weights)
        return copy(weights)

    monkeypatch.setattr(
        "operators.kernels.torch.waiting_weights.has_own_memory", lambda device: True
    )
    monkeypatch.setattr(WaitingWeights, "_copied", counted)
    waiting = tiny.run(
        with_reference, name="waiting", inproc=True, offload={"reference": "weights"}
    )
    assert timeless(metrics(waiting)) == timeless(metrics(usual))
    assert len(copies) == len(column(waiting, "reward/mean"))
