"""Whole runs in which memory runs out: their rows are those of a run that had enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.errors import RunError
from dataflow.graph import Graph
from graphs.grpo import grpo
from operators.kernels.torch import forward
from operators.kernels.torch.decode import Decoder
from operators.kernels.torch.loss_backward import LossBackward
from tests.kit.run_graphs import vowels
from tests.kit.runs import metrics, timeless
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(120)]


def with_reference(folder: Path) -> Graph:
    base, data = str(folder / "model"), str(folder / "train.parquet")
    return grpo(base, data, vowels, n=4, batch=4, max_tokens=6, lr=1e-3, beta=0.1, minibatches=2)


def fail_above(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, size: Callable[..., int], most: int
) -> list[int]:
    """Have a call of this run out of memory where its size is above `most`. Returns the sizes of
    those that did not.
    """
    call = getattr(owner, name)
    sizes: list[int] = []

    def limited(*args: Any, **kwargs: Any) -> Any:
        if size(*args) > most:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {size(*args)}")
        sizes.append(size(*args))
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, name, limited)
    return sizes


def test_a_run_with_less_memory_trains_the_same_rows(
    tiny: TinyRuns, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual = tiny.run(with_reference, name="usual", inproc=True)
    decoded = fail_above(monkeypatch, Decoder, "_advance", lambda d: len(d._step.rows), 3)
    passed = fail_above(monkeypatch, forward, "predictions", lambda *args: len(args[1].rows), 5)
    trained = fail_above(monkeypatch, LossBackward, "run", lambda *args: len(args[3]), 2)
    short = tiny.run(with_reference, name="short", inproc=True)
    assert max(decoded) <= 3 and max(passed) <= 5 and max(trained) <= 2
    first, *rows = metrics(short)
    assert {name: first[f"short/{name}"] for name in ("rollout", "reference", "train_policy")}
    print(first, caplog.text)
    for one, other in zip(timeless(metrics(usual)), timeless([first, *rows]), strict=True):
        for name in one:
            assert np.isclose(one[name], other[name], rtol=1e-4, atol=1e-6), name
