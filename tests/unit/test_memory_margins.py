"""What memory that ran out teaches a run: margins, limits of later plans, closed layouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.errors import PlanError, RunError, ShortOfMemory
from dataflow.memory_limits import MemoryLimits
from engine.coordinator.relayout_policy import RelayoutPolicy
from engine.keep.layouts_file import encode_layouts, read_layouts
from engine.keep.memory_file import MemoryRecord, find_lowered, read_memory
from engine.keep.run_folder import MEMORY, RunFolder
from engine.plan.cost.memory import lasting
from engine.plan.explain import explain
from engine.plan.layout_table import LayoutBucket, LayoutTable, RunLayout
from engine.plan.memory_margins import NodeMemory, describe_stand, measure_margin
from engine.plan.options import RunOptions
from engine.plan.plan import Plan, PlannedNode
from engine.plan.worker_peaks import process_bytes
from engine.protocol.events import InstructionTold
from engine.protocol.memory_messages import LimitLowered
from engine.run.worker.counters import peak_bytes
from engine.run.worker.short_memory import read_asked_bytes
from engine.run.worker.timing import Timing
from engine.session.layouts import plan_resumed
from tests.kit.graphs import grpo_graph
from tests.kit.plans import CLUSTER, planned

TABLE = LayoutTable(
    layouts=(RunLayout(), RunLayout(text="more"), RunLayout(text="most")),
    buckets=tuple(LayoutBucket(start=start, best=0) for start in (0, 1000, 4000)),
)


@pytest.fixture
def plan(tiny: Path) -> Plan:
    return planned(grpo_graph())


def passing(node: PlannedNode) -> int:
    return node.estimate.total - lasting(node.estimate.bytes)


def lowered_of(node: PlannedNode, *, peak: int = 0, **less: Any) -> InstructionTold:
    before = MemoryLimits.of(node.layout)
    limits = replace(before, **less)
    lowered = LimitLowered(
        node=node.name, worker="main", limits=limits, before=before, error="no room", peak=peak
    )
    return InstructionTold(at=0.0, instruction=lowered)


def test_a_margin_is_what_passed_over_what_was_estimated(plan: Plan) -> None:
    node = plan.node("train_policy")
    lasts = process_bytes(plan, "main")
    for other in plan.nodes_on("main"):
        lasts += lasting(other.estimate.bytes)
    assert measure_margin(plan, node, "main", lasts + 3 * passing(node)) == pytest.approx(3.0)
    assert measure_margin(plan, node, "main", lasts) == 1.0
    counted = replace(plan, margins={node.name: 2.0})
    assert measure_margin(counted, node, "main", lasts + 3 * passing(node)) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total", 5 << 29),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes.", 123),
        ("no room", 0),
    ],
)
def test_what_was_asked_for_is_in_the_error(error: str, asked: int) -> None:
    assert read_asked_bytes(error) == asked


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_card_the_peak_is_what_torch_had_and_what_it_asked_for() -> None:
    """The same code path as on a host, with the allocator's own error."""
    free_bytes, _ = torch.cuda.mem_get_info()
    held = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    wanted = r"rollout: .* its memory ran out"
    with (
        pytest.raises(ShortOfMemory, match=wanted) as caught,
        Timing("main").during("rollout", "rollout", "chunk 1"),
    ):
        torch.empty(2 * free_bytes, dtype=torch.uint8, device="cuda")
    assert peak_bytes() >= held.nbytes
    assert read_asked_bytes(str(caught.value)) == pytest.approx(2 * free_bytes, rel=0.01)


def test_later_plans_count_with_a_margin_and_take_the_limits(plan: Plan) -> None:
    node = plan.node("train_policy")
    limits = replace(MemoryLimits.of(node.layout), tokens=64)
    memory = {node.name: NodeMemory(limits=limits, stand=describe_stand(plan, node), margin=1.5)}
    later = planned(grpo_graph(), memory=memory)
    assert later.node(node.name).layout.tokens == 64
    assert "train_policy: counted 1.50 times" in " ".join(explain(later).split())
    elsewhere = {node.name: replace(memory[node.name], stand="another")}
    other = planned(grpo_graph(), memory=elsewhere)
    assert other.node(node.name).layout.tokens == node.layout.tokens
    assert passing(other.node(node.name)) == pytest.approx(1.5 * passing(node), rel=1e-3)
    assert lasting(other.node(node.name).estimate.bytes) == lasting(node.estimate.bytes)


def test_what_was_learned_is_in_the_folder(plan: Plan, tmp_path: Path) -> None:
    node = plan.node("train_policy")
    with RunFolder.create("run", tmp_path) as folder:
        record = MemoryRecord(plan, folder)
        record.take(lowered_of(node, peak=1 << 40, tokens=100))
        record.take(lowered_of(node, tokens=50))
        memory = read_memory(folder.path)
        assert memory[node.name].margin > 2
        assert find_lowered(plan, memory)[node.name].tokens == 50
        others = replace(memory[node.name], stand="another")
        assert find_lowered(plan, {node.name: others}) == {}
        assert read_memory(tmp_path) == {}
        (folder.path / MEMORY).write_text("{")
        with pytest.raises(RunError, match=r"memory\.json: expected what .*Fix: restore it"):
            read_memory(folder.path)


def test_a_resume_that_does_not_fit_with_what_was_learned_says_so(
    plan: Plan, tmp_path: Path
) -> None:
    node = plan.node("train_policy")

    def make(options: RunOptions, memory: Any) -> Plan:
        return planned(grpo_graph(), CLUSTER, memory=memory)

    def no_search(options: RunOptions) -> None:
        return None

    with RunFolder.create("run", tmp_path) as folder:
        assert plan_resumed(folder, RunOptions(), make, no_search, asks_anew=False).layouts is None
        stand = describe_stand(plan, node)
        memory = {node.name: {"limits": MemoryLimits.of(node.layout), "stand": stand}}
        encoded = {name: each | {"margin": 1e6} for name, each in memory.items()}
        text = json.dumps(encoded, default=lambda limits: {"slots": 1, "tokens": 9})
        folder.write_text(MEMORY, text)
        with pytest.raises(PlanError, match=r"as memory ran out \(memory\.json\)\. Fix: "):
            plan_resumed(folder, RunOptions(), make, no_search, asks_anew=False)


def policy_of(stands: tuple[str, ...] | None = ("a", "a", "b")) -> RelayoutPolicy:
    policy = RelayoutPolicy(TABLE)
    if stands is not None:
        policy.stands = {"rollout": stands}
    return policy


def test_a_short_closes_its_bucket_and_those_above_and_the_run_moves_away() -> None:
    policy = policy_of()
    policy.note_step(1, 1500.0)
    policy.note_short("rollout")
    assert policy.choose(None) is None  # nothing is known of the Step before it ends
    policy.note_step(2, 1600.0)
    assert [layout.most for layout in policy.table.layouts] == [999, 999, float("inf")]
    switch = policy.choose(None)
    assert switch is not None
    assert (switch.layout, switch.forced) == (2, True)
    policy.note_switch(2)
    for step in range(3, 20):
        policy.note_step(step, 1600.0)
        assert policy.choose(None) is None
    for step in range(20, 40):
        policy.note_step(step, 500.0)
    assert policy.choose(None).layout == 0  # type: ignore[union-attr]


def test_where_a_node_stands_alike_in_all_layouts_none_is_closed() -> None:
    policy = policy_of(("a", "a", "a"))
    policy.note_short("rollout")
    policy.note_step(1, 1500.0)
    assert policy.table == TABLE


def test_a_step_that_is_repeated_closes_too() -> None:
    policy = policy_of()
    policy.note_step(3, 5000.0)
    policy.note_short("rollout")
    policy.note_step(3, 5000.0)
    assert policy.table.layouts[0].most == 3999


def test_what_is_closed_stays_so_over_a_resume(tmp_path: Path) -> None:
    closed = TABLE.close_from([0], 2000.0)
    (tmp_path / "layouts.json").write_text(encode_layouts(closed, 1, ()))
    recorded = read_layouts(tmp_path)
    assert recorded is not None
    assert recorded.table() == closed
    assert not TABLE.close_from([1], 10.0).fits(1, 1.0)
