"""Which Workers are forked from a template, and what that imports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.keep.run_folder import RunFolder
from engine.plan.plan import Plan
from engine.run.launch.starter import Starter
from tests.kit.graphs import small_grpo
from tests.kit.plans import placed

pytestmark = pytest.mark.usefixtures("all_installed")

VLLM = "operators.kernels.vllm"


def by_vllm() -> Plan:
    """Its generator has a kernel that needs variables of its own."""
    return placed(small_grpo(), workers="apart", threads=1, kernel={"rollout": "vllm"})


def forked(planned: Plan, run_folder: RunFolder) -> set[str]:
    starter = Starter(planned, planned.workers, run_folder)
    return {worker for worker in planned.workers if starter.is_forked(worker)}


def test_a_worker_with_variables_or_a_gpu_of_its_own_is_not_forked(run_folder: RunFolder) -> None:
    planned = by_vllm()
    assert forked(planned, run_folder) == {*planned.workers} - {"rollout"}
    on_gpu = replace(planned, devices={"train_policy": (0,)})
    assert forked(on_gpu, run_folder) == {*planned.workers} - {"rollout", "train_policy"}


def test_a_worker_that_no_other_has_the_threads_of_is_not_forked(run_folder: RunFolder) -> None:
    planned = by_vllm()
    nodes = [
        replace(n, layout=replace(n.layout, threads=4)) if n.name == "train_policy" else n
        for n in planned.nodes
    ]
    planned = replace(planned, nodes=tuple(nodes))
    assert forked(planned, run_folder) == {*planned.workers} - {"rollout", "train_policy"}


def test_a_template_imports_kernels_of_its_own_workers_alone(run_folder: RunFolder) -> None:
    planned = by_vllm()
    assert planned.node("rollout").kernel.startswith(VLLM)
    imported = Starter(planned, planned.workers, run_folder)._modules("train_policy")
    assert "operators.kernels.torch.train" in imported
    assert not [name for name in imported if name.startswith(VLLM)]


def test_of_workers_on_other_hosts_it_knows_nothing(run_folder: RunFolder) -> None:
    assert not Starter(by_vllm(), ["train_policy"], run_folder).is_forked("train_policy")
