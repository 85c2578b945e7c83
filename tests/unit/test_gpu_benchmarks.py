"""Benchmarks of one card: operations and bytes that count, uneven rows, what a profile says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.autograd import DeviceType

from benchmarks import gpu_generate, gpu_steps, gpu_tests, gpu_train, gpu_uneven
from benchmarks.gpu_runs import CardRun, CardSpan
from benchmarks.report import SavedResults, SideResult
from dataflow.ragged import Ragged
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.models import Shape

MARKED = "@pytest.mark." + "gpu"
"""In two, as no test here is."""
SIZES = Sizes(
    parameters=1000,
    shape=Shape(
        layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, head_dim=2, vocabulary=25,
        context=64, tied=True,
    ),
)  # fmt: skip


def test_training_counts_a_shared_prompt_once_and_the_head_where_a_token_is_predicted() -> None:
    size = gpu_train.TrainedSize(
        name="", prompts=1, samples=2, prompt=3, answer=2, micro=64, recompute="layers", goal=0.0
    )
    # Half of a row's square of keys, the prompt's own part once.
    keys = 2 * 5**2 / 2 - 3**2 / 2
    body, head, attention = 2 * 900 * 7, 2 * 100 * 4, 4 * 2 * 4 * keys
    counted = gpu_train.count_operations(size, SIZES)
    assert counted == pytest.approx(3.0 * (body + head + attention))


def test_the_sizes_of_training_are_those_of_the_table() -> None:
    first, second = gpu_train.SIZES
    assert (2 * first.prompt + 16 * first.answer, first.micro) == (16_384, 16_384)
    assert (second.prompt + second.answer, second.micro) == (32_768, 32_768)


def test_generation_reads_weights_for_each_token_and_each_row_its_keys() -> None:
    read = gpu_generate.count_read_bytes(SIZES, 10, [1, 3])
    assert read == 2 * SIZES.read_bytes + (11 + 12) * SIZES.cached_bytes


def test_rows_are_cut_to_their_first_values() -> None:
    column = Ragged(np.arange(9), np.array([0, 3, 6, 9]))
    cut = gpu_uneven.cut_rows(column, np.array([1, 0, 3]))
    assert [cut[row].tolist() for row in range(3)] == [[0], [], [6, 7, 8]]


def event(key: str, kind: DeviceType, busy: float, cpu: float, count: int) -> Any:
    return SimpleNamespace(
        key=key, device_type=kind, self_device_time_total=busy, cpu_time_total=cpu, count=count,
        is_user_annotation=False,
    )  # fmt: skip


def test_a_profile_counts_the_time_of_kernels_once() -> None:
    events = [
        event("aten::mm", DeviceType.CPU, 2e6, 5.0, 3),
        event("gemm", DeviceType.CUDA, 2e6, 0.0, 3),
        event("cudaLaunchKernel", DeviceType.CPU, 0.0, 9.0, 3),
        event("cudaMemcpyAsync", DeviceType.CPU, 0.0, 4e3, 2),
    ]
    values = {each.name: each.value for each in gpu_steps.event_results(events, 3.0)}
    assert values["profile: device busy"] == 2000.0
    assert values["profile: launches"] == 3
    assert values["profile: cudaMemcpyAsync, calls"] == 2
    assert values["profile: cudaMemcpyAsync"] == 4.0


def test_clocks_are_read_of_whole_lines() -> None:
    text = "345, 0\n1980, 90\n1980, 60\n[N/A], 3\n19"
    values = [each.value for each in gpu_steps.clock_results(text)]
    assert values == [1980.0, 345.0, 50.0]
    assert list(gpu_steps.clock_results("")) == []


def span(name: str, start: float, end: float, version: int = 0) -> CardSpan:
    return CardSpan(
        worker="gen", node="rollout", name=name, start=start, end=end, args={"version": version}
    )


def test_weights_are_timed_by_spans_where_metrics_do_not_tell() -> None:
    spans = [
        span("offer policy", 1.0, 2.0, 1),
        span("load policy", 2.5, 3.5, 1),
        span("load policy", 9.0, 9.5, 7),
        span("rollout", 4.0, 8.0),
    ]
    row = {"time/step": 8.0, "time/rollout": 6.0, "time/record": 1.0}
    card_run = CardRun(metrics=[row], spans=spans)
    assert card_run.offered_to_loaded() == [2.5]
    assert card_run.outside_seconds() == 2.0
    assert card_run.other_seconds() == {"load": 1.5, "offer": 1.0}


def test_metrics_of_weights_and_of_what_is_outside_go_before() -> None:
    row = {"time/step": 8.0, "time/rollout": 6.0, "time/outside": 0.5}
    card_run = CardRun(metrics=[{**row, "weights/policy/offered_to_loaded": 0.25}], spans=[])
    assert card_run.offered_to_loaded() == [0.25]
    assert card_run.outside_seconds() == 0.5
    assert card_run.node_seconds() == {"rollout": 6.0}


def test_only_files_that_name_the_mark_are_collected(tmp_path: Path) -> None:
    for folder, text in (("unit", MARKED), ("unit/a", ""), ("vllm", MARKED)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "test_a.py").write_text(text)
    assert gpu_tests.marked_files(tmp_path) == [tmp_path / "unit/test_a.py"]


def test_results_are_on_the_disk_before_the_last_one_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = SavedResults(path)
    results.add(SideResult(name="first", value=1.0, unit="ms"))
    assert '"first"' in path.read_text()
    results.replace(SideResult(name="second", value=1.0, unit="ms"))
    assert '"first"' not in path.read_text()
