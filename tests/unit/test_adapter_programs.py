"""Programs that train adapters: which weights go on, what shares a base, what is refused."""

from __future__ import annotations

import re

import pytest

from dataflow.adapters import Lora, lora
from dataflow.check import check
from dataflow.errors import GraphError
from dataflow.graph import Graph, Phase
from dataflow.model import Model
from dataflow.program import Program
from engine.plan.cluster import Cluster
from engine.plan.cost.models import cost_of_model
from engine.plan.explain import explain
from engine.plan.plan import Plan
from engine.plan.program_plan import ProgramPlan, make_program_plan
from graphs.grpo import grpo
from graphs.sft import sft
from tests.kit.models import save_tiny
from tests.kit.plans import headers
from tests.kit.rewards import exact

FLOAT = 4
SMALL = lora(rank=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("base"))


def warm(base: str, adapter: Lora | None) -> Graph:
    return sft(base, "demos.parquet", batch=4, adapter=adapter)


def reinforced(base: str, adapter: Lora | None) -> Graph:
    how = {"n": 2, "batch": 4, "max_tokens": 8, "beta": 0.1}
    return grpo(base, "train.parquet", exact, adapter=adapter, **how)  # type: ignore[arg-type]


def make_program(base: str, *adapters: Lora | None) -> Program:
    """A warm start, and phases of reinforcement after it, each with its adapter or none."""
    first, *others = adapters
    graphs = [warm(base, first)]
    graphs += [reinforced(base, adapter) for adapter in others]
    return Program(*[Phase(graph, 2) for graph in graphs])


def plan_program(base: str, *adapters: Lora | None) -> ProgramPlan:
    checked = check(make_program(base, *adapters), headers)
    return make_program_plan(checked, seed=0, cluster=Cluster(cores=4, memory=24 * 2**30))


def total_weights(plan: Plan) -> int:
    return sum(node.estimate.bytes.get("weights", 0) for node in plan.nodes)


REFUSED = {
    "expected lora(rank=4, alpha=32), which phase 1 'sft' trained, since its weights go on, found"
    " lora(rank=8, alpha=32)": (SMALL, lora(rank=8)),
    "its adapter of phase 2 'grpo' is beside weights that phase 1 'sft' trained, and this phase"
    " would begin with those of its base. Fix: a run of its own": (None, SMALL, SMALL),
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_adapter_that_cannot_go_on_is_refused(base: str, message: str) -> None:
    with pytest.raises(GraphError, match=re.escape(message)):
        check(make_program(base, *REFUSED[message]), headers)


def test_one_that_goes_on_is_taken(base: str) -> None:
    program = make_program(base, SMALL, SMALL)
    weights = program.begins[1]["policy"]
    assert (weights.phase, weights.is_adapter) == (1, True)
    assert check(program, headers)


def test_what_an_earlier_phase_trained_is_no_base_of_others(base: str) -> None:
    """The reference is at the base, and the adapter beside what the warm start left."""
    plan = plan_program(base, None, SMALL).phases[1]
    parameters = cost_of_model(Model("reference", base)).parameters or 0
    assert total_weights(plan) == 2 * FLOAT * parameters
    assert "shared by" not in explain(plan, width=200)


def test_an_adapter_that_goes_on_has_its_base_with_others(base: str) -> None:
    plan = plan_program(base, SMALL, SMALL).phases[1]
    parameters = cost_of_model(Model("reference", base)).parameters or 0
    assert total_weights(plan) == FLOAT * parameters
    assert "shared by 2" in explain(plan, width=200)
