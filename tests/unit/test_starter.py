"""Which Workers are forked from a template, and what that imports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.launch.starter import Starter
from engine.observe.runfolder import RunFolder
from engine.plan.plan import Plan
from tests.kit.graphs import small_grpo
from tests.kit.plans import placed

VLLM = "operators.kernels.vllm"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create("run", tmp_path) as made:
        yield made


def by_vllm() -> Plan:
    """Its generator has a kernel that needs variables of its own."""
    return placed(small_grpo(), workers="apart", threads=1, kernel={"rollout": "vllm"})


def forked(planned: Plan, folder: RunFolder) -> set[str]:
    starter = Starter(planned, planned.workers, folder)
    return {worker for worker in planned.workers if starter.forked(worker)}


def test_a_worker_with_variables_of_its_own_is_not_forked(folder: RunFolder) -> None:
    planned = by_vllm()
    assert forked(planned, folder) == {*planned.workers} - {"rollout"}


def test_a_worker_with_a_gpu_is_not_forked(folder: RunFolder) -> None:
    planned = replace(by_vllm(), devices={"train_policy": (0,)})
    assert forked(planned, folder) == {*planned.workers} - {"rollout", "train_policy"}


def test_a_worker_that_no_other_has_the_threads_of_is_not_forked(folder: RunFolder) -> None:
    planned = by_vllm()
    more = replace(planned.node("train_policy").layout, threads=4)
    nodes = [replace(n, layout=more) if n.name == "train_policy" else n for n in planned.nodes]
    found = forked(replace(planned, nodes=tuple(nodes)), folder)
    assert found == {*planned.workers} - {"rollout", "train_policy"}


def test_a_template_imports_kernels_of_its_own_workers_alone(folder: RunFolder) -> None:
    planned = by_vllm()
    assert planned.node("rollout").kernel.startswith(VLLM)
    imported = Starter(planned, planned.workers, folder)._modules("train_policy")
    assert "operators.kernels.torch.train" in imported
    assert not [name for name in imported if name.startswith(VLLM)]


def test_of_workers_on_other_hosts_it_knows_nothing(folder: RunFolder) -> None:
    assert not Starter(by_vllm(), ["train_policy"], folder).forked("train_policy")
