"""Runs whose synchronous Steps are trained in parts while they are generated."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.graph import Graph
from engine.session.run_result import Result
from graphs.grpo import grpo
from tests.kit.run_graphs import vowels
from tests.kit.runs import metrics, timeless
from tests.kit.tiny_runs import TinyRuns

STREAMED = {"workers": "apart", "stream": "ordered", "part_tokens": 40, "chunks": {"rollout": 2}}


def graph(folder: Path) -> Graph:
    return grpo(
        str(folder / "model"),
        str(folder / "train.parquet"),
        vowels,
        n=4,
        batch=6,
        max_tokens=24,
        beta=0.05,
    )


def weights_of(run: Result) -> bytes:
    (file,) = sorted(run.folder.glob("checkpoints/step_*/train_policy/model.safetensors"))[-1:]
    return file.read_bytes()


@pytest.mark.timeout(240)
def test_an_ordered_step_has_the_same_bits_on_one_replica_and_on_two(tiny: TinyRuns) -> None:
    one = tiny.run(graph, name="one", **STREAMED)
    two = tiny.run(graph, name="two", replicas={"rollout": 2}, **STREAMED)
    assert weights_of(one) == weights_of(two)
    assert timeless(metrics(one)) == timeless(metrics(two))
    whole = tiny.run(graph, name="whole", workers="apart", chunks={"rollout": 2})
    for streamed, row in zip(metrics(one), metrics(whole), strict=True):
        assert streamed["loss/train_policy"] == pytest.approx(row["loss/train_policy"], abs=1e-5)
        assert streamed["reward/mean"] == row["reward/mean"]
