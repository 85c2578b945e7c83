"""Plans of graphs with adapters and subsets: what is counted, what is shared, what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from dataflow import GraphError, Model, linear, lora, subset
from dataflow.adapters import Lora
from dataflow.base_digest import base_digest
from dataflow.check import check
from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.needs import NO_NEEDS, Needs
from dataflow.node import Node
from engine.plan.cluster import Cluster
from engine.plan.cost.memory import lasting, peak
from engine.plan.cost.models import cost_of_model
from engine.plan.cost.process_memory import ADAPTERS, FIRST_USE, OPENED, SCATTERED_BESIDE
from engine.plan.explain import explain
from engine.plan.plan import Plan
from graphs.grpo import grpo
from graphs.ppo import ppo
from operators.advantage import group_advantage
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, kl_loss
from operators.reward import reward
from operators.train import train
from operators.vllm_needs import VLLM
from tests.kit.models import save_tiny
from tests.kit.plans import headers, placed, planned, planned_on
from tests.kit.rewards import exact

pytest.importorskip("peft")
FLOAT = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("base"))


def apart(graph: Graph) -> Plan:
    """A plan with a Worker for each node that computes."""
    return planned_on(Cluster(cores=4, memory=24 * 2**30), graph, workers="apart")


def small_ppo(base: str, adapter: Lora | None) -> Graph:
    return ppo(base, "train.parquet", exact, batch=4, max_tokens=8, adapter=adapter)


def small_grpo(base: str, adapter: Lora | None, **params: Any) -> Graph:
    return grpo(base, "train.parquet", exact, n=2, batch=4, max_tokens=8, adapter=adapter, **params)


def total(plan: Plan, part: str) -> int:
    """Bytes of a part, of all nodes together."""
    return sum(node.estimate.bytes.get(part, 0) for node in plan.nodes)


def counts(base: str, **part: Any) -> tuple[int, int]:
    """Parameters of a base, and of what a Model trains."""
    cost = cost_of_model(Model("policy", base, **part))
    return cost.parameters or 0, cost.version


def test_one_base_is_counted_for_policy_reference_and_critic(base: str) -> None:
    adapter = lora(rank=4)
    parameters, policy = counts(base, trainable=True, adapter=adapter)
    _, critic = counts(base, trainable=True, adapter=adapter, head="scalar")
    plan = planned(small_ppo(base, adapter))
    # The critic's head is counted with its adapter, and once more where the base is its.
    assert parameters <= total(plan, "weights") / FLOAT <= parameters + 33
    assert total(plan, "own_weights") == FLOAT * (policy + critic)
    whole = planned(small_ppo(base, None))
    assert total(whole, "weights") > 2.5 * FLOAT * parameters
    assert total(whole, "own_weights") == 0


def test_a_version_has_the_bytes_of_what_is_trained(base: str) -> None:
    _, trained = counts(base, trainable=True, adapter=lora(rank=4))
    plan = apart(small_grpo(base, lora(rank=4), max_lag=1))
    writer, reader = plan.node("train_policy").estimate.bytes, plan.node("rollout").estimate.bytes
    assert (writer["snapshot"], reader["fetched"]) == (2 * FLOAT * trained, FLOAT * trained)
    assert writer["optimizer"] == 2 * FLOAT * trained
    assert plan.models[0].version_parameters == trained
    whole = apart(small_grpo(base, None, max_lag=1))
    assert (plan.models[0].seconds or 0.0) < (whole.models[0].seconds or 0.0)


def test_each_worker_has_a_base_of_its_own(base: str) -> None:
    parameters, trained = counts(base, trainable=True, adapter=lora(rank=4))
    plan = apart(small_grpo(base, lora(rank=4), max_lag=1))
    for node in ("train_policy", "rollout"):
        parts = plan.node(node).estimate.bytes
        assert parts["weights"] == FLOAT * parameters
        assert parts["own_weights"] == FLOAT * trained


def merging(graph: Graph, **params: Any) -> Graph:
    """The graph whose generation merges the adapter."""

    def change(node: Node) -> Node:
        if node.name != "rollout":
            return node
        return node.changed(params=dict(node.params) | {"merge": True} | params)

    return graph.map(change)


def test_a_generation_that_merges_has_the_merged_matrices_besides(base: str) -> None:
    adapter = lora(rank=4, targets=("q_proj", "o_proj"))
    parameters, trained = counts(base, trainable=True, adapter=adapter)
    plan = planned(merging(small_grpo(base, adapter)))
    writer, reader = plan.node("train_policy"), plan.node("rollout")
    assert reader.estimate.bytes["merged"] == FLOAT * 2 * 2 * 32 * 32
    assert reader.estimate.bytes["own_weights"] == FLOAT * trained
    assert "weights" not in reader.estimate.bytes
    assert writer.estimate.bytes["weights"] == FLOAT * parameters
    assert (reader.models[0].module, plan.models[0].aliases) == ("policy merged", ())
    assert re.search(r"own_weights \S+ \S+, merged 16\S* \S+", explain(plan, width=200))
    assert "merged" not in explain(planned(small_grpo(base, adapter)), width=200)


def test_what_merges_shares_no_module_with_what_does_not(base: str) -> None:
    plan = apart(merging(small_grpo(base, lora(rank=4), max_lag=1)))
    assert plan.node("rollout").models[0].module == "policy copy merged"


def test_an_adapter_that_is_not_there_is_not_merged(base: str) -> None:
    message = (
        "generate 'rollout': merge=True merges an adapter into its base, and Model 'policy' has"
        " none. Fix: merge=False, or Model(..., adapter=lora(rank=16))."
    )
    with pytest.raises(GraphError, match=re.escape(message)):
        check(merging(small_grpo(base, None)), headers)


def test_merging_in_bfloat16_is_doubtful(base: str) -> None:
    graph = merging(small_grpo(base, lora(rank=4), lr=1e-4))
    assert "merged_in_bfloat16" not in [w.rule for w in check(graph, headers).warnings]

    def narrow(node: Node) -> Node:
        states = {k: replace(state, dtype="bfloat16") for k, state in node.states.items()}
        return node.changed(states=states)

    assert "merged_in_bfloat16" in [w.rule for w in check(graph.map(narrow), headers).warnings]


def graph_of_subset(base: str, part: Any) -> Graph:
    """A policy of which a part is trained, and a reference of its base."""
    policy = Model("policy", base, trainable=part)
    rollout = generate(policy, prompts("train.parquet", batch=4), n=2, max_tokens=8, name="rollout")
    reference = logprobs(Model("reference", base), rollout, name="reference")
    advantage = group_advantage(rollout, reward(exact, rollout, name="score"))
    loss = clipped_policy_loss(advantage) + 0.1 * kl_loss(reference)
    return Graph("g", train(policy, rollout, loss=loss, lr=1e-3))


def test_a_subset_is_beside_the_base_that_a_reference_has(base: str) -> None:
    parameters, trained = counts(base, trainable=subset(last=1))
    plan = planned(graph_of_subset(base, subset(last=1)))
    assert total(plan, "weights") == FLOAT * parameters
    assert total(plan, "own_weights") == FLOAT * trained
    assert plan.node("train_policy").estimate.bytes["optimizer"] == 2 * FLOAT * trained


def test_split_modules_share_no_base(base: str) -> None:
    parameters, trained = counts(base, trainable=True, adapter=lora(rank=4))
    graph = small_grpo(base, lora(rank=4), beta=0.04)
    plan = placed(graph, ranks={"train_policy": 2}, shard=True)
    parts = plan.node("train_policy").estimate.bytes
    assert parts["weights"] == FLOAT * -(-(parameters + trained) // 2)
    # The generation has the base of its copy together with the reference.
    assert plan.node("rollout").estimate.bytes["weights"] == FLOAT * parameters
    assert "weights" not in plan.node("reference").estimate.bytes


def test_explain_says_what_is_shared_and_what_is_trained(base: str) -> None:
    text = explain(planned(small_ppo(base, lora(rank=4))), width=200)
    sizes = r"base \S+ \S+ shared by 3, adapter \S+ \S+, optimizer \S+ \S+"
    assert len(re.findall(sizes, text)) == 2
    assert len(re.findall(r"base \S+ \S+ shared by 3\n", text)) == 1
    alone = explain(planned(small_grpo(base, None)), width=200)
    assert "shared by" not in alone


TENSOR = {
    "train_policy": "tensor: train_policy=2, and the adapter of 'policy' is computed with whole"
    " matrices. Fix: train_policy=1, or --ranks train_policy=2 --shard.",
    "old": "tensor: old=2, and the adapter of 'policy' is computed with whole matrices. Fix:"
    " old=1.",
    "rollout": "tensor: rollout=2, and the adapter of 'policy' is computed with whole matrices."
    " Fix: rollout=1.",
}


@pytest.mark.parametrize("node", TENSOR)
def test_tensor_ranks_do_not_split_an_adapter(base: str, node: str) -> None:
    with pytest.raises(PlanError, match=re.escape(TENSOR[node])):
        placed(small_ppo(base, lora(rank=4)), tensor={node: 2})


def test_a_kernel_takes_adapters_up_to_its_highest_rank(base: str) -> None:
    few = replace(NO_NEEDS, adapter_ranks=(1, 8))
    graph = with_needs(small_grpo(base, lora(rank=9)), few)
    message = "kernel: rollout=vllm, and the adapter of 'policy' has rank 9, and vllm has room for"
    with pytest.raises(PlanError, match=f"{message} 8 at most. Fix: rollout=torch."):
        placed(graph, kernel={"rollout": "vllm"})
    assert VLLM.adapter_ranks[-1] == 512


def test_a_plan_without_peft_says_what_is_missing(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.plan.passes.kernels._ADAPTER_PACKAGE", "no_such_package")
    message = (
        "torch: package no_such_package, which makes the adapter of 'policy', is not installed"
    )
    with pytest.raises(PlanError, match=message):
        planned(small_grpo(base, lora(rank=4)))


def with_needs(graph: Graph, needs: Needs) -> Graph:
    """The graph whose generations by vLLM need this, and are installed."""

    def change(node: Node) -> Node:
        if node.name != "rollout":
            return node
        kernels = dict.fromkeys(("torch", "vllm"), node.operator.kernels["torch"])
        return node.changed(operator=replace(node.operator, kernels=kernels, needs={"vllm": needs}))

    return graph.map(change)


FAULTS = {
    "expected targets among its base's linear layers, down_proj, gate_proj, k_proj, o_proj,"
    " q_proj, up_proj, v_proj, found query. Fix: targets='all-linear'": lora(targets="query"),
    "found lm_head": lora(targets=("q_proj", "lm_head")),
    "expected adapter_model.safetensors and adapter_config.json in nowhere, found nothing there."
    " Fix: ": lora(start="nowhere"),
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_no_base_or_folder_has_is_refused(base: str, message: str) -> None:
    graph = small_grpo(base, FAULTS[message])
    with pytest.raises(GraphError, match=re.escape(message)):
        check(graph, headers)


def test_parts_that_no_weight_has_are_refused(base: str) -> None:
    graph = graph_of_subset(base, subset(parts=("norms",)))
    message = r"expected weights of its base in subset\(parts=\('norms',\)\), found none. Fix: "
    with pytest.raises(GraphError, match=message):
        check(graph, headers)


SAVED = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": ["q_proj"]}
STARTS: dict[str, dict[str, Any]] = {
    "found DoRA, which scales the base's own matrices (use_dora=True). Fix: ": {"use_dora": True},
    "found one that began with 'pissa_niter_4', which takes away from the base": {
        "init_lora_weights": "pissa_niter_4"
    },
    "found one that began with 'olora'": {"init_lora_weights": "olora"},
    "whole weights of the base that were trained beside it (modules_to_save=['score'])": {
        "modules_to_save": ["score"]
    },
    "expected targets in the layers, found lm_head": {"target_modules": ["q_proj", "lm_head"]},
    "expected no trained biases, found bias='all'": {"bias": "all"},
    "expected lora(rank=4, alpha=32), found r=8, lora_alpha=16 and scale 'rslora'. Fix:"
    " lora(rank=8, alpha=16, scale='rslora', start=...)": {
        "r": 8,
        "lora_alpha": 16,
        "use_rslora": True,
    },
    "expected an adapter of plain LoRA, found peft_type IA3": {"peft_type": "IA3"},
}


def save_adapter_config(folder: Path, config: Mapping[str, Any], base_digest: str = "") -> Lora:
    """An adapter's folder with this configuration, as the beginning of an adapter."""
    (folder / "adapter_config.json").write_text(json.dumps(dict(config)))
    save_file({}, folder / "adapter_model.safetensors", metadata={"base_digest": base_digest})
    start = str(folder)
    return lora(rank=4, start=start)


@pytest.mark.parametrize("message", STARTS)
def test_an_adapter_that_changes_more_than_it_adds_is_refused(
    base: str, message: str, tmp_path: Path
) -> None:
    adapter = save_adapter_config(tmp_path, SAVED | STARTS[message])
    shown = message.replace("lora(rank=4, alpha=32)", str(adapter))
    with pytest.raises(GraphError, match=re.escape(shown)):
        check(small_grpo(base, adapter), headers)


def test_a_plain_one_is_taken(base: str, tmp_path: Path) -> None:
    adapter = save_adapter_config(tmp_path, SAVED | {"init_lora_weights": "gaussian"})
    assert check(small_grpo(base, adapter), headers)


def test_an_adapter_that_was_trained_beside_another_base_is_refused(
    base: str, tmp_path: Path
) -> None:
    digest = base_digest(Path(base))
    adapter = save_adapter_config(tmp_path, SAVED, digest)
    assert check(small_grpo(base, adapter), headers)
    adapter = save_adapter_config(tmp_path, SAVED, "0" * 32)
    problem = f"expected an adapter that was trained beside its base {base}, digest {digest}, found"
    with pytest.raises(GraphError, match=re.escape(problem)) as refused:
        check(small_grpo(base, adapter), headers)
    assert "Fix: the base beside which it was trained" in str(refused.value)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(GraphError, match="expected a safetensors file, found no header"):
        check(small_grpo(base, adapter), headers)


@pytest.mark.parametrize(
    ("lr", "adapter", "is_low"),
    [
        (1e-6, lora(), True),
        (linear(1e-6, 9e-6, 10), lora(), True),
        (linear(1e-6, 1e-4, 10), lora(), False),
        (1e-5, lora(), False),
        (1e-6, None, False),
    ],
)
def test_the_rate_of_whole_weights_is_doubtful_for_a_fresh_adapter(
    base: str, lr: Any, adapter: Lora | None, is_low: bool
) -> None:
    warnings = check(small_grpo(base, adapter, lr=lr), headers).warnings
    rules = [warning.rule for warning in warnings]
    assert ("low_adapter_rate" in rules) == is_low


def test_a_process_with_an_adapter_has_peft_and_scatters_more_as_it_trains(base: str) -> None:
    plans = [apart(small_grpo(base, adapter, beta=0.1)) for adapter in (None, lora(rank=4))]
    plain, used = ({w: p.used for w, p in plan.processes.items()} for plan in plans)
    assert used["reference"] == plain["reference"]
    assert used["rollout"] == plain["rollout"] + ADAPTERS
    parts = plans[1].node("train_policy").estimate.bytes
    passing = peak([parts]) - lasting(parts)
    scattered = math.ceil(SCATTERED_BESIDE * passing)
    assert used["train_policy"] == OPENED + FIRST_USE + ADAPTERS + scattered
