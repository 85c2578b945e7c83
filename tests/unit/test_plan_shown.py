"""The planner's last passes, and what is shown of a plan: `explain` as golden texts.

`GOLDEN=write pytest tests/unit/test_plan_shown.py` writes the golden texts anew; read the
difference before keeping it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.node import Node
from engine.plan.cluster import Cluster
from engine.plan.draft import Draft
from engine.plan.explain import WIDTH, explain
from engine.plan.passes.verify import verify_plan
from engine.plan.plan import Plan, PlannedNode
from engine.plan.planned_input import Fetch
from graphs.grpo import grpo
from graphs.sft import sft
from operators.advantage import group_advantage
from operators.losses import clipped_policy_loss
from operators.reward import reward
from tests.kit.comparison import require_golden
from tests.kit.graphs import graph_of, grpo_graph, sampled
from tests.kit.plans import CLUSTER, grpo_plan, placed, planned, ppo_plan
from tests.kit.rewards import exact
from tests.right_graphs import RIGHT, prompts_chosen

pytestmark = pytest.mark.usefixtures("tiny")


def with_kernels(**kernels: str) -> Graph:
    def change(node: Node) -> Node:
        if node.name != "rollout":
            return node
        others = {name: path for name, path in node.operator.kernels.items() if name not in kernels}
        return node.changed(operator=replace(node.operator, kernels=kernels | others))

    return grpo_graph().map(change)


def test_a_kernel_that_is_not_installed_is_passed_over_and_reported() -> None:
    far, near = "no_such_package.generate:Far", "operators.kernels.no_such_module:Near"
    plan = planned(with_kernels(far=far, near=near))
    assert plan.node("rollout").kernel == "operators.kernels.torch.generate:TorchGenerate"
    for kernel in (far, near):
        assert f"rollout: kernel {kernel} is not installed here" in plan.notes


def test_an_operator_without_a_kernel_is_refused() -> None:
    told = r"rollout: operator 'generate' has no kernel here .*no_such_package"
    with pytest.raises(PlanError, match=told):
        planned(with_kernels(**dict.fromkeys(("torch", "vllm"), "no_such_package.generate:Far")))


def test_the_outbox_holds_all_admitted_prompts() -> None:
    synchronous, lagging = (
        grpo_plan(max_lag=lag).node("rollout").estimate.bytes["outbox"] for lag in (0, 2)
    )
    assert lagging == 3 * synchronous


def test_a_model_that_is_not_here_is_unknown_and_said_so() -> None:
    plan = planned(grpo("some/hub-name", "train.parquet", exact))
    assert plan.models[0].parameters is None
    unknown = "unknown: base is not a local directory"
    assert f"policy: parameters, memory and seconds {unknown}" in plan.notes
    assert plan.node("train_policy").estimate.seconds is None
    assert unknown in explain(plan)


def test_a_longer_prompt_bound_replaces_the_assumption() -> None:
    plan = planned(graph_of(sampled(max_prompt_tokens=40)))
    assert not [note for note in plan.notes if "assumed" in note]
    assert next(e.bytes for e in plan.edges if e.consumer == "rollout") == 64 * (8 + 4 * 40)


def draft_of(plan: Plan, **fields: Any) -> Draft:
    kept = {name: getattr(plan, name) for name in ("sources", "models", "edges", "recorded")}
    kept |= {"nodes": plan.nodes} | fields
    return Draft(graph=plan.program, seed=0, cluster=CLUSTER, **kept)


def test_a_plan_that_does_not_fit_is_refused_with_its_parts_and_a_fix() -> None:
    told = r"^memory: main needs [\d.]+ GiB, this host has 0\.1 GiB: .*kv_cache .* Fix: "
    with pytest.raises(PlanError, match=told):
        planned(grpo_graph(), Cluster(cores=2, memory=2**26))


def test_on_a_gpu_rows_wait_in_host_memory() -> None:
    def with_gpu(memory: int, gpu: int) -> Plan:
        return planned(grpo_graph(), Cluster(cores=2, memory=memory, gpus=(gpu,)))

    plan = with_gpu(2**26, 2**31)
    assert plan.node("rollout").estimate.seconds is None
    why = "no seconds are predicted: its kind of GPU is not known (dataflow profile measures it)"
    assert f"rollout: {why}" in plan.notes
    with pytest.raises(PlanError, match="the GPU has"):
        with_gpu(2**35, 2**26)
    with pytest.raises(PlanError, match=r"rows of .* wait"):
        with_gpu(2**20, 2**31)


def changed(plan: Plan, name: str, change: Callable[[PlannedNode], PlannedNode]) -> Draft:
    return draft_of(plan, nodes=tuple(change(n) if n.name == name else n for n in plan.nodes))


def first_input(node: PlannedNode, **fields: object) -> PlannedNode:
    return replace(node, inputs=(replace(node.inputs[0], **fields), *node.inputs[1:]))


def fetching(producer: str, column: str) -> dict[str, object]:
    return {"fetches": (Fetch(producer=producer, columns=(column,)),)}


NO_NODE = "expects rows of a node upstream, 'rolout' is no node. Fix: rollout"
BROKEN = {
    "kernels: advantage has none": lambda n: replace(n, kernel=""),
    f"producers: advantage.rollout {NO_NODE}": (
        lambda n: first_input(n, **fetching("rolout", "completion_mask"))
    ),
    "producers: advantage.rollout expects rows of a node upstream, 'train_policy' runs after it": (
        lambda n: first_input(n, gate="train_policy")
    ),
    "producers: advantage.rollout: 'rollout' does not return finished": (
        lambda n: first_input(n, **fetching("rollout", "finished"))
    ),
    "ratios: advantage.rollout: 8 rows a prompt, and 2 for each of the 8 of 'rollout'": (
        lambda n: first_input(n, ratio=2)
    ),
    "workers: advantage: 1 replicas on []": lambda n: replace(n, workers=()),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_plan_is_refused_by_the_name_of_the_check(message: str) -> None:
    with pytest.raises(PlanError) as caught:
        verify_plan(changed(grpo_plan(), "advantage", BROKEN[message]))
    assert message in str(caught.value)


def test_minibatches_that_split_groups_are_refused() -> None:
    plan = grpo_plan(batch=64, minibatches=4)
    told = r"groups: train_policy: 62 prompts in 4 minibatches .* Fix: minibatches=2"
    with pytest.raises(PlanError, match=told):
        verify_plan(draft_of(plan, sources=(replace(plan.sources[0], batch=62),)))


def test_an_alias_above_the_cut_at_a_lag_is_refused() -> None:
    plan = grpo_plan(max_lag=1)
    shared = replace(plan.node("rollout").models[0], module="policy")
    draft = changed(plan, "rollout", lambda n: replace(n, models=(shared,)))
    with pytest.raises(PlanError, match="aliases: rollout shares the weights of 'policy' at lag 1"):
        verify_plan(draft)


def test_a_constant_divisor_needs_a_longest_completion() -> None:
    step = sft("tiny", "demos.jsonl").node("train_policy")
    constant = Graph("sft", step.changed(params=step.params | {"aggregate": "constant"}))
    with pytest.raises(PlanError, match="constant: train_policy"):
        planned(constant)


@pytest.mark.parametrize("make", RIGHT, ids=lambda f: f.__name__)
def test_every_right_graph_has_a_plan_that_can_be_shown(make: Callable[[], Graph]) -> None:
    """It fits its width, and has its digest: test_narrow.py, test_declarations.py."""
    plan = planned(make())
    text = explain(plan)
    assert text.isascii()
    assert all(n.name in text for n in plan.nodes)


def test_a_step_of_refilled_prompts_is_full() -> None:
    plan = planned(prompts_chosen())
    full = "\n  64 prompts x 8 = 512 completions a Step, 1 update of 512 (train_policy)"
    assert full in explain(plan)


PLANS = {
    "grpo": lambda: grpo_plan(beta=0.04, minibatches=4),
    "grpo_lag": lambda: placed(
        grpo_graph(beta=0.04, max_lag=1, minibatches=4),
        cores=8,
        replicas={"rollout": 2},
        ranks={"train_policy": 2},
        turns=(("rollout-0", "train-1"),),
    ),
    "grpo_grid": lambda: placed(
        grpo_graph(),
        cores=8,
        ranks={"train_policy": 2},
        tensor={"train_policy": 2},
        shard=True,
    ),
    "ppo": ppo_plan,
    "sft": lambda: planned(sft("tiny", "demos.jsonl")),
}


@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str) -> None:
    text = explain(replace(PLANS[name](), digest="0123456789abcdef"))
    require_golden(f"explain/{name}.txt", text)


def test_a_long_name_has_a_line_of_its_own() -> None:
    rollout = sampled()
    name = "advantage_of_each_row_within_its_group_of_eight" * 2
    advantage = group_advantage(rollout, reward(exact, rollout), name=name)
    text = explain(planned(graph_of(rollout, clipped_policy_loss(advantage))))
    assert f"  {name}" in text.splitlines()
    assert max(map(len, text.splitlines())) <= WIDTH
