"""Which kernel the planner chooses, where an engine goes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.model import Model
from engine.cost.models import model_cost
from engine.plan.explain import explain
from engine.plan.passes import kernels
from operators.data import prompts
from operators.generate import generate
from operators.reward import reward
from operators.train import evaluate
from tests.kit.graphs import small_grpo
from tests.kit.plans import module_of, placed
from tests.kit.rewards import exact

pytestmark = pytest.mark.usefixtures("tiny", "installed")
ASKED = {"kernel": {"rollout": "vllm"}}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where vLLM is installed, whose attention takes heads of the tiny model's size."""
    monkeypatch.setattr(kernels, "_installed", lambda module: True)


def test_torch_is_the_default() -> None:
    plan = placed(small_grpo())
    assert plan.node("rollout").kernel == "operators.kernels.torch.generate:TorchGenerate"
    assert not plan.node("rollout").engine
    assert plan.workers == ("main",)


@pytest.mark.parametrize("lag", [0, 1])
def test_an_engine_has_a_worker_without_other_nodes_that_compute(lag: int) -> None:
    plan = placed(small_grpo(max_lag=lag), **ASKED)
    node = plan.node("rollout")
    assert node.kernel == "operators.kernels.vllm.generate:VllmGenerate"
    assert node.workers == ("rollout",)
    assert [n.name for n in plan.nodes_on("rollout") if n.traits.computes] == ["rollout"]
    assert module_of(plan, "rollout") != module_of(plan, "train_policy")
    [policy] = [m for m in plan.models if m.name == "policy"]
    assert "rollout" in policy.copied
    assert plan.environment_of("rollout")["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert not plan.environment_of(plan.node("train_policy").workers[0])


def with_evaluation(graph: Graph) -> Graph:
    policy = next(s for s in graph.states if isinstance(s, Model) and s.name == "policy")
    asked = prompts("hub/other", shuffle=False, name="held_out")
    answers = generate(policy, asked, max_tokens=600, max_prompt_tokens=10, name="answers")
    return graph.extend(evaluate(policy, reward(exact, answers, name="scored"), every=1))


def test_the_nodes_of_a_model_share_an_engine_with_room_for_the_longest_row() -> None:
    kernel = {"rollout": "vllm", "answers": "vllm"}
    plan = placed(with_evaluation(small_grpo()), kernel=kernel)
    one, other = plan.node("rollout"), plan.node("answers")
    assert one.workers == other.workers == ("rollout",)
    assert module_of(plan, "rollout") == module_of(plan, "answers")
    assert one.layout.longest == other.layout.longest > 0
    assert one.layout.cache == other.layout.cache > 0


def test_tensor_ranks_of_an_engine_are_in_its_one_worker() -> None:
    plan = placed(small_grpo(), tensor={"rollout": 2}, **ASKED)
    node = plan.node("rollout")
    assert node.workers == ("rollout",)
    assert (node.ranks, node.layout.inner, node.layout.threads) == (1, 2, 2)
    assert "2 tensor ranks inside of the Worker" in " ".join(explain(plan).split())


def test_explain_says_what_an_engine_is_and_that_it_was_asked_for() -> None:
    text = " ".join(explain(placed(small_grpo(), **ASKED)).split())
    assert "an engine in a Worker of its own" in text
    assert "rollout: kernel vllm, as asked for" in text


def test_another_node_that_computes_is_not_pinned_beside_an_engine() -> None:
    told = "reference is in Worker 'main', which runs the engine of rollout"
    with pytest.raises(PlanError, match=told):
        placed(small_grpo(), pin={"rollout": ("main",)}, **ASKED)


REFUSED: dict[str, dict[str, Any]] = {
    "expected a node of the plan, found 'rolout'. Fix: rollout": {"kernel": {"rolout": "vllm"}},
    "'generate' has no such kernel. Fix: vllm": {"kernel": {"rollout": "vlm"}},
    "kernel: rollout=vllm, but an engine needs a Worker of its own, and inproc has none": {
        **ASKED,
        "inproc": True,
    },
    "tensor: rollout=2, but only train nodes and engines have tensor ranks. Fix: --kernel": {
        "tensor": {"rollout": 2}
    },
    "tensor: rollout=3, and its Model has": {"tensor": {"rollout": 3}, **ASKED},
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_cannot_be_is_refused_with_the_nearest_fix(told: str) -> None:
    with pytest.raises(PlanError) as caught:
        placed(small_grpo(), **REFUSED[told])
    assert told in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_a_type_that_the_kernel_cannot_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_type", lambda base: "gpt2")
    with pytest.raises(PlanError, match="is of type 'gpt2', and it is tried with llama"):
        placed(small_grpo(), **ASKED)


def test_heads_without_attention_on_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = model_cost("tiny", "lm")
    assert cost.shape is not None
    odd = replace(cost, shape=replace(cost.shape, head_dim=24))
    monkeypatch.setattr(kernels, "model_cost", lambda base, head: odd)
    with pytest.raises(PlanError, match="has heads of 24, and without a GPU it has attention for"):
        placed(small_grpo(), **ASKED)


def test_a_package_that_is_not_installed_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_installed", lambda module: module != "vllm")
    with pytest.raises(PlanError, match=r"vllm is not installed here\. Fix: make setup VLLM=1"):
        placed(small_grpo(), **ASKED)
