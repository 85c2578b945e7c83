"""Which kernel a node gets, and what a kernel with an engine means for its plan."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataflow.architectures import TESTED
from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.needs import Needs
from dataflow.node import Node
from engine.cli.peek import main as peek_main
from engine.cli.target import UsageError
from engine.keep.checkpoint.layout_changes import layout_changes
from engine.plan.cluster import Cluster, Host, with_first
from engine.plan.cost.kv_cache import BLOCK, MOST, cache_bytes
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.models import model_cost
from engine.plan.explain import WIDTH, explain
from engine.plan.plan import Plan
from engine.run.launch.child import environment
from engine.session.peek import _reduce_plan
from graphs.grpo import grpo
from operators.data import prompts
from operators.generate import generate
from operators.reward import reward
from operators.train import evaluate
from operators.vllm_needs import MODEL_TYPES, VLLM
from tests.kit.comparison import require_golden
from tests.kit.graphs import graph_of, policy, sampled, small_grpo, trained
from tests.kit.plans import CONFIG, module_of, placed, planned_on, workers_of
from tests.kit.rewards import exact
from tests.right_graphs import RIGHT, language_model_judge
from tests.unit.test_placements import asked_of

pytestmark = pytest.mark.usefixtures("tiny", "all_installed")
judge = Model("judge", "tiny")
BY_VLLM = {"kernel": {"rollout": "vllm"}}
TWO_RANKS = BY_VLLM | {"tensor": {"rollout": 2}}
BOTH = {"kernel": {"rollout": "vllm", "eval_rollout": "vllm"}}
TORCH = "operators.kernels.torch.generate:TorchGenerate"


def evaluated(max_lag: int = 0, model: Model = policy) -> Graph:
    """A policy that generates for training, and a Model for an evaluation, there longer rows."""
    held_out = prompts("test.parquet", name="eval_prompts")
    answers = generate(model, held_out, max_tokens=100, name="eval_rollout")
    scores = reward(exact, answers, name="eval_score")
    return Graph("g", trained(sampled(max_lag=max_lag)), evaluate(model, scores, every=2))


def on_gpus(count: int, graph: Graph, **asked: Any) -> Plan:
    return planned_on(Cluster(cores=8, memory=2**38, gpus=(2**36,) * count), graph, **asked)


def configured(**changes: Any) -> None:
    """The base `tiny` with these entries in its config.json."""
    Path("tiny/config.json").write_text(json.dumps(CONFIG | changes))


# --- which kernel ---------------------------------------------------------------------------------


REFUSED = {
    "kernel: expected a node of the plan, found 'rolout'. Fix: rollout.":
        {"kernel": {"rolout": "vllm"}},
    "kernel: rollout=vlm, and generate has torch, vllm. Fix: rollout=vllm.":
        {"kernel": {"rollout": "vlm"}},
    "kernel: score=vllm, and reward has host. Fix: score=": {"kernel": {"score": "vllm"}},
    "kernel: rollout=vllm, and with inproc everything is in this process, and it has one of its"
    " own. Fix: without inproc, or rollout=torch.": BY_VLLM | {"inproc": True},
    "engines: rollout by vllm is in main with reference, train_policy, and it needs a process of"
    " its own. Fix: pin rollout to a worker in which nothing else computes.":
        BY_VLLM | {"pin": {"rollout": ("main",)}},
    "engines: rollout by vllm is in gen with reference":
        BY_VLLM | {"pin": {"rollout": ("gen",), "reference": ("gen",)}},
    "engines: rollout by vllm is in main with":
        BY_VLLM | {"together": (("rollout", "train_policy"),)},
    "place: tensor: rollout=3, and its Model has 4 heads, 4 key heads, which are not divisible."
    " Fix: rollout=2.": BY_VLLM | {"tensor": {"rollout": 3}},
    "place: tensor: rollout=0. Fix: rollout=1.": BY_VLLM | {"tensor": {"rollout": 0}},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_with_the_nearest_fix(message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        placed(small_grpo(), **REFUSED[message])


OF_MODELS = {
    "'policy' has heads of 16, and vllm on CPU takes 32, 64, 80": {"head_dim": 16},
    "vllm is not tried here with 'helium', which 'policy' is, only with llama, mistral, qwen2,"
    " qwen3. Fix: rollout=torch.": {"model_type": "helium"},
    "only some layers of 'policy' have a sliding window, and vllm takes all or none. Fix: ":
        {"layer_types": ["full_attention", "sliding_attention"]},
    "only some layers of 'policy' have a sliding window, and vllm":
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
}  # fmt: skip


@pytest.mark.parametrize("message", OF_MODELS)
def test_models_that_a_kernel_cannot_run_are_refused(message: str) -> None:
    configured(**OF_MODELS[message])
    with pytest.raises(PlanError, match=re.escape(f"kernel: rollout=vllm, and {message}")):
        placed(small_grpo(), **BY_VLLM)
    assert placed(small_grpo()).node("rollout").kernel == TORCH


def test_head_sizes_bind_on_cpu_alone() -> None:
    configured(head_dim=16)
    assert on_gpus(2, small_grpo(), **BY_VLLM).node("rollout").kernel != TORCH


def test_a_follower_and_a_dtype_are_refused() -> None:
    behind = Model("behind", "tiny", follows=policy, rate=0.1)
    told = "eval_rollout=vllm, and 'behind' follows 'policy', and vllm takes whole versions only"
    with pytest.raises(PlanError, match=told):
        placed(evaluated(model=behind), kernel={"eval_rollout": "vllm"})
    half = with_needs(small_grpo(), vllm=replace(VLLM, dtypes=("bfloat16",)))
    with pytest.raises(PlanError, match="'policy' computes in float32, and vllm in bfloat16"):
        placed(half, **BY_VLLM)


def with_needs(graph: Graph, **needs: Needs) -> Graph:
    def change(node: Node) -> Node:
        if node.name != "rollout":
            return node
        return node.changed(operator=replace(node.operator, needs=needs))

    return graph.map(change)


def test_a_kernel_whose_needs_are_not_met_is_passed_over_and_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.plan.passes.kernels._is_installed", lambda name: name != "absent")
    plan = placed(with_needs(small_grpo(), torch=Needs(packages=("absent",)), vllm=VLLM))
    assert plan.node("rollout").kernel.endswith(":VllmGenerate")
    assert "rollout: package absent is not installed here" in plan.notes


def test_what_is_not_installed_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.plan.passes.kernels._is_installed", lambda name: name != "vllm")
    told = r"package vllm is not installed here. Fix: pip install \"dataflow-rl\[vllm\]\" .*VLLM=1"
    with pytest.raises(PlanError, match=told):
        placed(small_grpo(), **BY_VLLM)


def test_a_kernel_that_is_not_going_to_run_here_does_not_have_to_be_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.plan.passes.kernels._is_installed", lambda name: name != "vllm")
    for elsewhere in (
        placed(small_grpo(), simulated=True, **BY_VLLM),
        planned_on(with_first([Host(name="a", cores=8, memory=2**36)]), small_grpo(), **BY_VLLM),
    ):
        assert elsewhere.node("rollout").kernel.endswith(":VllmGenerate")


def test_all_layers_may_have_a_sliding_window() -> None:
    configured(layer_types=["sliding_attention"] * 2)
    assert placed(small_grpo(), **BY_VLLM).node("rollout").kernel != TORCH


def test_the_sampler_of_vllm_chooses_its_kernel_and_says_what_it_does_not_promise() -> None:
    graph = graph_of(sampled(sampler="vllm"))
    plan = placed(graph)
    assert plan.node("rollout").kernel.endswith(":VllmGenerate")
    assert "rollout: it has sampler='vllm', and torch takes sampler='keyed'" in plan.notes
    assert any("the rows that run beside a row may change them" in note for note in plan.notes)
    with pytest.raises(PlanError, match="Fix: sampler='keyed', or another kernel"):
        placed(graph, kernel={"rollout": "torch"})


def test_vllm_takes_no_model_type_that_the_project_does_not_know() -> None:
    assert MODEL_TYPES <= TESTED


# --- where it runs --------------------------------------------------------------------------------


def test_two_models_have_two_engines() -> None:
    names = ("rollout", "verdict")
    plan = placed(language_model_judge(), kernel=dict.fromkeys(names, "vllm"))
    assert plan.node("rollout").workers != plan.node("verdict").workers


@pytest.mark.parametrize("max_lag", [0, 1])
def test_nodes_of_one_model_share_an_engine(max_lag: int) -> None:
    plan, names = placed(evaluated(max_lag), **BOTH), ("rollout", "eval_rollout")
    assert workers_of(plan, *names) == ("rollout",)
    assert {module_of(plan, name) for name in names} == {"policy vllm"}
    assert {plan.node(name).layout.longest for name in names} == {1024}
    owners = [n.name for n in plan.nodes if "engine" in n.estimate.bytes]
    assert owners == ["rollout"], "one engine counts once"
    alone = placed(evaluated(max_lag), **BY_VLLM)
    assert workers_of(alone, "eval_rollout") != ("rollout",)
    assert module_of(alone, "eval_rollout") in ("policy", "policy copy")


def test_pins_replicas_and_apart_are_as_asked() -> None:
    pinned = placed(evaluated(), pin={"rollout": ("gen",)}, **BOTH)
    assert workers_of(pinned, "rollout", "eval_rollout") == ("gen",)
    two = placed(evaluated(), replicas={"rollout": 2}, **BOTH)
    assert workers_of(two, "rollout", "eval_rollout") == ("rollout-0", "rollout-1")
    apart = placed(evaluated(), workers="apart", **BOTH)
    assert workers_of(apart, "eval_rollout") == ("eval_rollout",)
    turns = placed(small_grpo(), turns=(("rollout", "main"),), **BY_VLLM)
    assert turns.turns == (("rollout", "main"),)
    assert any(note.startswith("rollout: turns free nothing here") for note in turns.notes)


# --- tensor ranks of its own ----------------------------------------------------------------------


def test_tensor_ranks_share_heads_and_have_a_thread_each() -> None:
    """What they share of a machine with more cores, and what they take: explain/vllm_lag.txt."""
    one, two = (placed(small_grpo(), cores=1, **how) for how in (BY_VLLM, TWO_RANKS))
    whole, part = (plan.node("rollout").layout for plan in (one, two))
    assert part.cache_bytes * 2 == whole.cache_bytes
    assert part.threads == 1


def test_ranks_that_share_an_engine_are_asked_for_alike() -> None:
    once = placed(evaluated(), tensor={"rollout": 2}, **BOTH)
    assert once.node("eval_rollout").layout.inner == 2
    told = "engines: tensor: rollout=2, eval_rollout=4, and they share an engine in rollout. Fix: "
    with pytest.raises(PlanError, match=told):
        placed(evaluated(), tensor={"rollout": 2, "eval_rollout": 4}, **BOTH)
    problem = "slots: rollout=64, eval_rollout=256, .* Fix: rollout=64, eval_rollout=64"
    with pytest.raises(PlanError, match=problem):
        placed(evaluated(), slots={"rollout": 64}, **BOTH)


def test_each_of_its_ranks_has_a_gpu_that_nobody_else_has() -> None:
    plan = on_gpus(3, small_grpo(), **TWO_RANKS)
    assert plan.devices == {"rollout": (0, 1), "main": (2,)}
    assert "each of GPU 0, 1" in explain(plan)
    assert "TORCH_COMPILE_DISABLE" not in plan.environments["rollout"]
    by_turns = on_gpus(2, small_grpo(), turns=(("rollout", "main"),), **TWO_RANKS)
    assert by_turns.devices == {"rollout": (0, 1), "main": (0,)}
    with pytest.raises(PlanError, match=r"and main has one of the GPUs of rollout\. Fix: turns: "):
        on_gpus(2, small_grpo(), **TWO_RANKS)
    with pytest.raises(PlanError, match="tensor: rollout=2 in rollout, and there are 1 GPUs"):
        on_gpus(1, small_grpo(), turns=(("rollout", "main"),), **TWO_RANKS)


# --- its size -------------------------------------------------------------------------------------


def test_the_cache_has_room_for_the_rows_in_whole_blocks_within_a_bound() -> None:
    shape = model_cost("tiny").shape
    token, row = 2 * 2 * 128 * 4, Lengths(prompt=40, completion=8)

    def size(rows: int, longest: int = 48, most: int = MOST) -> int:
        how = {"longest": longest, "dtype": "float32", "most": most}
        return cache_bytes(shape, row, rows=rows, **how)

    assert size(10) == size(10, most=2 * MOST) == 10 * (2 + 1) * BLOCK * token
    assert size(1, 1024) == 33 * BLOCK * token
    assert size(10**9) == MOST


def test_an_engine_has_room_for_a_prompt_of_unknown_length() -> None:
    configured(max_position_embeddings=32768)
    plan = placed(small_grpo(), **BY_VLLM)
    assert plan.node("rollout").layout.longest == 4096 + 512
    bounded = placed(graph_of(sampled(max_prompt_tokens=100)), **BY_VLLM)
    assert bounded.node("rollout").layout.longest == 132


def test_a_model_of_unknown_shape_leaves_the_size_to_the_kernel() -> None:
    far = grpo("some/hub-name", "train.parquet", exact)
    unknown = placed(far, **BY_VLLM).node("rollout").layout
    assert (unknown.cache_bytes, unknown.longest) == (0, 0)


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 10},
        {"max_tokens": 64, "max_lag": 1},
        {"max_tokens": 10, "max_lag": 1, "on_update": "drain"},
    ],
    ids=["at lag 0 nothing interrupts", "long answers", "they are drained"],
)
def test_not_all_are_better_drained(params: dict[str, Any]) -> None:
    """Short answers are: explain/vllm_lag.txt."""
    plan = placed(graph_of(sampled(max_prompt_tokens=60, **params)), **BY_VLLM)
    assert not any("on_update='drain'" in note for note in plan.notes)


# --- the run --------------------------------------------------------------------------------------


def test_the_environment_is_the_kernels_but_for_what_the_user_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    plan = placed(small_grpo(), **BY_VLLM)
    assert plan.environments == {"rollout": {**VLLM.environment, **VLLM.cpu_environment}}
    variables = environment(2, (), plan.environments["rollout"])
    assert variables["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert variables["OMP_NUM_THREADS"] == "2"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment(1, (1, 2))["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_environments_are_those_of_each_workers_host() -> None:
    of = {"cores": 4, "memory": 2**36}
    hosts = Host(name="a", **of), Host(name="b", gpus=(2**36,), **of)
    cluster = Cluster(hosts=hosts, **of)
    plan = planned_on(cluster, small_grpo(), pin={"rollout": "gen@b"}, **BY_VLLM)
    assert plan.hosts["gen"] == "b"
    assert plan.environments == {"gen": dict(VLLM.environment)}


def test_a_resume_names_another_kernel() -> None:
    old, new = (placed(small_grpo(), **asked).to_json() for asked in ({}, BY_VLLM))
    assert {c.what for c in layout_changes(old, new)} == {"kernel", "cache_bytes"}


def test_peek_takes_kernels_that_can_share_its_process() -> None:
    plan = placed(small_grpo(), **TWO_RANKS)
    small = _reduce_plan(plan, {"rollout"}, prompts=1).node("rollout")
    assert (small.kernel, small.layout.inner, small.workers) == (TORCH, 1, ("main",))
    graph = f"{Path(__file__).parents[2]}/examples/user_reward.py:graph"
    with pytest.raises(UsageError, match="peek runs in this process"):
        peek_main([graph, "rollout", "--kernel", "rollout=vllm"])


GOLDEN = {
    "vllm": {"graph": small_grpo()},
    "vllm_lag": {
        "graph": small_grpo(max_lag=1, max_tokens=16), "cores": 8, "tensor": {"rollout": 2},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    plan = replace(placed(**GOLDEN[name], **BY_VLLM), digest="0123456789abcdef")
    require_golden(f"explain/{name}.txt", explain(plan))


@pytest.mark.long
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_is_asked_for_an_engine_is_alone(data: st.DataObject) -> None:
    graph = data.draw(st.sampled_from(RIGHT))()
    names = [n.name for n in graph.nodes if n.operator.traits.generates]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    asked = data.draw(asked_of([n.name for n in graph.nodes]))
    try:
        plan = placed(graph, cores=8, memory=2**50, kernel=dict.fromkeys(chosen, "vllm"), **asked)
    except PlanError:
        return
    for node in (n for n in plan.nodes if n.name in chosen):
        for worker in node.workers:
            beside = [n for n in plan.nodes_on(worker) if n.traits.computes]
            assert {n.kernel for n in beside} == {node.kernel}
            assert len({module_of(plan, n.name) for n in beside}) == 1
            assert len({(n.layout.cache_bytes, n.layout.inner) for n in beside}) == 1
            assert plan.environments[worker]
        assert not any(node.name in model.aliases for model in plan.models)
    assert max(map(len, explain(plan).splitlines())) <= WIDTH
