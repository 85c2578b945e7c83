"""The planner's last passes, and what is shown of a plan: `explain` as golden texts.

`GOLDEN=write pytest tests/unit/test_plan_shown.py` writes the golden texts anew; read the
difference before keeping it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Node
from engine.plan.cluster import Cluster
from engine.plan.draft import Draft
from engine.plan.explain import WIDTH, explain
from engine.plan.passes.verify import verify
from engine.plan.plan import Fetch, Plan, PlannedNode
from graphs.grpo import grpo
from graphs.sft import sft
from operators.advantage import gae, group_advantage
from operators.forward import values
from operators.losses import clipped_policy_loss, policy_gradient_loss
from operators.reward import reward
from tests.kit.comparison import require_golden
from tests.kit.graphs import graph_of, grpo_graph, sampled
from tests.kit.plans import CLUSTER, grpo_plan, placed, planned, ppo_plan
from tests.kit.rewards import exact
from tests.right_graphs import RIGHT

pytestmark = pytest.mark.usefixtures("tiny")
critic = Model("v", "hub/critic", head="scalar")


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


def test_training_holds_gradients_and_the_optimizer() -> None:
    held = grpo_plan().node("train_policy").estimate.bytes
    parts = {"weights": 4, "gradients": 4, "optimizer": 8}
    assert {name: held[name] for name in parts} == {n: b * 452_480 for n, b in parts.items()}


def test_bytes_of_an_edge_and_those_that_stay_are_all_that_the_producer_offers() -> None:
    plan = grpo_plan(beta=0.1)
    offered = {e.producer: e.bytes + e.saved for e in plan.edges}
    assert all(e.bytes + e.saved == offered[e.producer] for e in plan.edges)
    mask = next(e for e in plan.edges if (e.producer, e.consumer) == ("rollout", "advantage"))
    assert mask.bytes == 64 * 8 * (8 + 512)


def test_users_functions_have_no_predicted_time() -> None:
    seconds = {n.name: n.estimate.seconds for n in grpo_plan().nodes}
    assert seconds["score"] is None
    assert (seconds["train_policy"] or 0) > (seconds["advantage"] or 0) > 0


def test_a_model_that_is_not_here_is_unknown_and_said_so() -> None:
    plan = planned(grpo("some/hub-name", "train.parquet", exact))
    assert plan.models[0].parameters is None
    unknown = "unknown: base is not a local directory"
    assert f"policy: parameters, memory and seconds {unknown}" in plan.notes
    assert plan.node("train_policy").estimate.seconds is None
    assert unknown in explain(plan)


def test_a_longer_prompt_bound_replaces_the_assumption() -> None:
    bounded = sampled(n=1, max_prompt_tokens=40)
    advantage = gae(bounded, reward(exact, bounded), values(critic, bounded))
    plan = planned(graph_of(bounded, policy_gradient_loss(advantage)))
    assert not [note for note in plan.notes if "assumed" in note]
    assert next(e.bytes for e in plan.edges if e.consumer == "rollout") == 64 * (8 + 4 * 40)


def draft_of(plan: Plan, cluster: Cluster = CLUSTER) -> Draft:
    assert plan.program is not None
    return Draft(
        graph=plan.program,
        seed=0,
        cluster=cluster,
        nodes=plan.nodes,
        sources=plan.sources,
        models=plan.models,
        edges=plan.edges,
        recorded=plan.recorded,
    )


def test_a_right_plan_passes_unchanged() -> None:
    draft = draft_of(ppo_plan())
    assert verify(draft) is draft


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
    draft = draft_of(plan)
    return replace(draft, nodes=tuple(change(n) if n.name == name else n for n in draft.nodes))


def first_input(node: PlannedNode, **fields: object) -> PlannedNode:
    return replace(node, inputs=(replace(node.inputs[0], **fields), *node.inputs[1:]))


def fetching(producer: str, column: str) -> dict[str, object]:
    return {"fetches": (Fetch(producer=producer, columns=(column,)),)}


NO_NODE = "expects rows of a node upstream, 'rolout' is no node. Fix: rollout"
BROKEN: dict[str, Callable[[PlannedNode], PlannedNode]] = {
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
        verify(changed(grpo_plan(), "advantage", BROKEN[message]))
    assert message in str(caught.value)


def test_minibatches_that_split_groups_are_refused() -> None:
    draft = draft_of(grpo_plan(batch=64, minibatches=4))
    sources = (replace(draft.sources[0], batch=62),)
    told = r"groups: train_policy: 62 prompts in 4 minibatches .* Fix: minibatches=2"
    with pytest.raises(PlanError, match=told):
        verify(replace(draft, sources=sources))


def test_an_alias_above_the_cut_at_a_lag_is_refused() -> None:
    plan = grpo_plan(max_lag=1)
    shared = replace(plan.node("rollout").models[0], module="policy")
    draft = changed(plan, "rollout", lambda n: replace(n, models=(shared,)))
    with pytest.raises(PlanError, match="aliases: rollout shares the weights of 'policy' at lag 1"):
        verify(draft)


def test_a_constant_divisor_needs_a_longest_completion() -> None:
    graph = sft("tiny", "demos.jsonl")
    step = graph.node("train_policy")
    constant = Graph("sft", step.changed(params=step.params | {"aggregate": "constant"}))
    with pytest.raises(PlanError, match="constant: train_policy"):
        planned(constant)


@pytest.mark.parametrize("make", RIGHT, ids=lambda f: f.__name__)
def test_every_right_graph_has_a_plan_that_can_be_shown(make: Callable[[], Graph]) -> None:
    plan = planned(make())
    text = explain(plan)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(n.name in text for n in plan.nodes)
    assert json.loads(plan.to_json())["digest"] == plan.digest


def test_the_same_graph_has_the_same_plan() -> None:
    assert ppo_plan() == ppo_plan()


PLANS: dict[str, Callable[[], Plan]] = {
    "grpo": lambda: grpo_plan(beta=0.04, minibatches=4),
    "grpo_lag": lambda: placed(
        grpo_graph(beta=0.04, max_lag=1, minibatches=4),
        cores=8,
        replicas={"rollout": 2},
        ranks={"train_policy": 2},
        turns=(("rollout-0", "train-1"),),
    ),
    "ppo": ppo_plan,
    "sft": lambda: planned(sft("tiny", "demos.jsonl")),
}


@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str) -> None:
    text = explain(replace(PLANS[name](), digest="0123456789abcdef"))
    require_golden(f"explain/{name}.txt", text)


def test_the_header_says_how_many_rows_and_updates_a_step_has() -> None:
    text = explain(grpo_plan(minibatches=4, max_lag=1))
    assert "64 prompts x 8 = 512 completions a Step, 4 updates of 128 (train_policy)" in text
    assert "no row is more than 1 version old when it is trained" in text
    assert "at most 64 prompts" not in text


def test_a_long_name_has_a_line_of_its_own() -> None:
    rollout = sampled()
    name = "advantage_of_each_row_within_its_group_of_eight" * 2
    advantage = group_advantage(rollout, reward(exact, rollout), name=name)
    text = explain(planned(graph_of(rollout, clipped_policy_loss(advantage))))
    assert f"  {name}" in text.splitlines()
    assert max(map(len, text.splitlines())) <= WIDTH
