"""Whole runs that generate with vLLM: the rows of the torch kernel, and recovery of its Worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from graphs.grpo import grpo
from tests.kit.models import save_tiny
from tests.kit.rewards import exact
from tests.kit.runs import column, require_each_row_once
from tests.kit.tiny_runs import TinyRuns, save_tiny_inputs
from tests.vllm.conftest import KIND, SHAPE, TENSOR
from tests.vllm.test_vllm_processes import alive, children

pytestmark = pytest.mark.skipif(
    KIND == "llama" and TENSOR == 1, reason="the same as with tied embeddings"
)
ENGINE = {"kernel": {"rollout": "vllm"}, "tensor": {"rollout": TENSOR}}


@pytest.fixture
def tiny(tmp_path: Path) -> TinyRuns:
    save_tiny_inputs(tmp_path)
    save_tiny(tmp_path / "model", KIND, layers=1, **SHAPE)
    return TinyRuns(folder=tmp_path, runs=tmp_path / "runs")


def graph_of(tiny: TinyRuns, lag: int = 0) -> Any:
    base, data = str(tiny.folder / "model"), str(tiny.folder / "train.parquet")
    return grpo(base, data, exact, n=4, batch=4, max_tokens=8, lr=1e-3, max_lag=lag)


def rollout_worker() -> int:
    """The process of the Worker that generates."""
    for process in children(os.getpid()):
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        if b"rollout" in words:
            return process
    raise AssertionError("no Worker named rollout")


def test_a_run_has_the_rows_of_the_torch_kernel(tiny: TinyRuns) -> None:
    steps = 6
    ours = tiny.run(graph_of(tiny), steps, name="vllm", workers="auto", **ENGINE)
    its = tiny.run(graph_of(tiny), steps, name="torch", workers="auto")
    for name in ("reward/mean", "completion/tokens"):
        assert column(ours, name) == column(its, name), name
    assert max(column(ours, "policy/mismatch_kl")) < 1e-8
    require_each_row_once(ours, 24, 4)


@pytest.mark.parametrize("lag", [TENSOR - 1])
def test_a_killed_engine_loses_no_row_and_leaves_no_process(tiny: TinyRuns, lag: int) -> None:
    below: set[int] = set()

    def kill(row: Any) -> None:
        if row["step"] == 2:
            worker = rollout_worker()
            below.update({worker} | children(worker))
            os.kill(worker, signal.SIGKILL)

    killed = tiny.run(
        graph_of(tiny, lag), 5, name="killed", workers="auto", on_step=[kill], **ENGINE
    )
    assert killed.step == 5
    assert below
    assert not [each for each in below if alive(each)]
    require_each_row_once(killed, 20, 4)
    if not lag:
        whole = tiny.run(graph_of(tiny, lag), 5, name="whole", workers="auto", **ENGINE)
        assert column(killed, "reward/mean") == column(whole, "reward/mean")
