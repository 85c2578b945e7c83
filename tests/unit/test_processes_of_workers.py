"""What the processes of Workers take, beside what their nodes need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.plan.checks.memory import find_memory_rooms
from engine.plan.cluster import Cluster
from engine.plan.cost.devices import device
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.machine import this_installation, this_machine
from engine.plan.cost.memory import Work, peak
from engine.plan.cost.process_memory import (
    FIRST_USE,
    FORKED_FILES,
    OPENED,
    READS,
    ImportedMemory,
    ProcessMemory,
)
from engine.plan.cost.profile import Profile
from engine.plan.plan import Plan
from engine.plan.worker_index import nodes_by_worker
from engine.plan.worker_peaks import process_bytes, shared_process_bytes, worker_peak
from tests.kit.graphs import grpo_graph
from tests.kit.plans import placed, planned_on

pytestmark = pytest.mark.usefixtures("tiny")
SIZES = ProcessMemory()


def apart() -> Plan:
    """Each node in a Worker of its own, each with a thread."""
    return placed(grpo_graph(beta=0.04), workers="apart", threads=1)


def test_workers_of_one_template_have_what_it_has_imported_for_all() -> None:
    plan = apart()
    forked = SIZES.torch.anonymous + FORKED_FILES
    assert {p.imported for p in plan.processes.values()} == {forked}
    assert len({p.template for p in plan.processes.values()}) == 1
    used = {worker: process.used for worker, process in plan.processes.items()}
    assert used["score"] == used["advantage"] == OPENED
    assert used["prompts"] == OPENED + READS
    assert used["reference"] > OPENED + FIRST_USE, "and what an allocator scatters"


def test_one_worker_has_an_interpreter_of_its_own() -> None:
    plan = placed(grpo_graph(), workers="one")
    (process,) = plan.processes.values()
    assert process.template == ""
    assert process.imported == SIZES.torch.anonymous + SIZES.torch.files


def test_a_worker_without_torch_and_without_others_like_it_has_not_imported_it() -> None:
    """With as many threads both would be of one template."""
    pins = dict.fromkeys(("prompts", "rollout", "train_policy"), "main") | {"score": "judge"}
    plan = planned_on(Cluster(cores=8, memory=2**38), grpo_graph(), pin=pins)
    threads = {w: max(n.layout.threads for n in plan.nodes_on(w)) for w in plan.workers}
    assert threads["main"] != threads["judge"]
    assert plan.processes["judge"].imported < SIZES.torch.anonymous
    assert plan.processes["main"].imported > SIZES.torch.anonymous


def test_the_peak_of_a_worker_is_its_process_and_its_nodes() -> None:
    plan = apart()
    for worker, nodes in nodes_by_worker(plan.nodes).items():
        parts = peak(node.estimate.bytes for node in nodes)
        assert worker_peak(plan, worker, nodes) == process_bytes(plan, worker) + parts


def test_a_host_has_what_a_template_imported_once() -> None:
    plan = apart()
    used = sum(process.used for process in plan.processes.values())
    imported = SIZES.torch.anonymous + FORKED_FILES
    assert shared_process_bytes(plan, plan.workers) == imported + used
    assert plan.cluster is not None
    (room,) = find_memory_rooms(plan, plan.cluster)
    without = next(find_memory_rooms(replace(plan, processes={}), plan.cluster))
    assert room.need - without.need == imported + used


def test_nothing_is_said_of_processes_on_hosts_with_gpus() -> None:
    gpus = Cluster(cores=8, memory=2**38, gpus=(80 * 2**30,), kind="H100")
    plan = planned_on(gpus, grpo_graph())
    assert plan.processes == {}
    assert shared_process_bytes(plan, plan.workers) == 0


def test_a_profile_says_what_imports_take_here() -> None:
    mine = ProcessMemory(
        plain=ImportedMemory(anonymous=1, files=2), torch=ImportedMemory(anonymous=4, files=8)
    )
    profile = Profile(
        machine=this_machine(),
        installation=this_installation(),
        device=device("cpu"),
        process=mine,
    )
    (process,) = placed(grpo_graph(), workers="one", profile=profile).processes.values()
    assert process.imported == 12


def test_a_reader_of_another_worker_has_a_version_in_shared_memory() -> None:
    plan = apart()
    held = plan.node("rollout").estimate.bytes
    assert held["fetched"] == held["weights"]
    assert "fetched" not in plan.node("reference").estimate.bytes
    one = placed(grpo_graph(), workers="one")
    assert "fetched" not in one.node("rollout").estimate.bytes


@pytest.mark.parametrize(
    ("minibatches", "tokens"), [(1, 4 * 30), (2, 2 * 30), (3, 2 * 30), (4, 30)]
)
def test_a_microbatch_is_no_larger_than_a_minibatch_of_whole_prompts(
    minibatches: int, tokens: int
) -> None:
    work = Work(
        lengths=Lengths(prompt=10, completion=5), prompts=4, rows=16, minibatches=minibatches
    )
    assert work.at_once == tokens
    assert work.predicted_tokens == tokens * 2 // 3
