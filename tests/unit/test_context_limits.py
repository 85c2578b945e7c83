"""At how long rows the nodes of a plan stop fitting: the plan of one token more is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflow.errors import PlanError
from engine.plan.cluster import Cluster
from engine.plan.context_limits import ContextLimit, list_context_limits, list_intake_limits
from engine.plan.explain import explain
from engine.plan.plan import Plan
from tests.kit.graphs import small_grpo
from tests.kit.plans import CONFIG, planned

pytestmark = pytest.mark.usefixtures("tiny")

CLUSTER = Cluster(cores=2, memory=2 * 2**30)


def plan_of(tokens: int) -> Plan:
    return planned(small_grpo(beta=0.0, max_tokens=tokens), CLUSTER)


def limits_of(plan: Plan) -> dict[str, ContextLimit]:
    return {limit.node: limit for limit in list_context_limits(plan)}


@pytest.fixture
def _no_positions(tiny: Path) -> None:
    """The Model of the test has positions for any row."""
    config = {**CONFIG, "max_position_embeddings": 2**24}
    (Path("tiny") / "config.json").write_text(json.dumps(config))


@pytest.mark.usefixtures("_no_positions")
def test_rows_fit_up_to_the_limit_of_the_first_node_and_no_further() -> None:
    plan = plan_of(64)
    limits = limits_of(plan)
    assert {limit.by for limit in limits.values()} == {"memory"}
    first = min(limits.values(), key=lambda limit: limit.fits)
    assert first.planned < first.fits
    prompt = first.planned - 64
    # Of a plan all nodes' rows grow together, so that it ends a little earlier.
    plan_of(int(0.8 * first.fits) - prompt)
    with pytest.raises(PlanError, match=r"this host has 2\.0 GiB"):
        plan_of(first.fits + 1 - prompt)
    assert f"up to {first.fits:,} fit" in " ".join(explain(plan).split())


def test_positions_that_end_before_memory_are_the_limit() -> None:
    plan = plan_of(64)
    assert {limit.by for limit in limits_of(plan).values()} == {"positions"}
    assert {limit.fits for limit in limits_of(plan).values()} == {1024}
    assert "contexts" not in explain(plan)


def late_plan(max_lag: int) -> Plan:
    params = {"n": 8, "batch": 32, "max_tokens": 64, "max_lag": max_lag}
    return planned(small_grpo(beta=0.0, **params), CLUSTER)


def test_explain_says_from_how_many_live_tokens_on_the_intake_slows() -> None:
    plan = late_plan(60)
    [limit] = list_intake_limits(plan)
    assert limit.planned == 61 * 32 * 8 * 64 < limit.slows
    assert f"the intake slows from {limit.slows:,} on" in " ".join(explain(plan).split())
    assert not list(list_intake_limits(plan_of(64)))


def test_it_is_what_the_plan_has_room_for() -> None:
    plan = late_plan(2000)
    [limit] = list_intake_limits(plan)
    [source] = plan.sources
    assert source.room is not None
    assert limit.slows < limit.planned
    assert limit.slows == pytest.approx(source.room.live_tokens(source.allowed), rel=0.02)
