"""How many prompts wait with the longest rows where memory holds less than a lag allows."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from dataflow.errors import PlanError
from engine.plan.checks.memory import find_memory_rooms
from engine.plan.cluster import Cluster
from engine.plan.explain import explain
from engine.plan.plan import Plan
from engine.plan.planned_source import PlannedSource
from tests.kit.graphs import grpo_graph
from tests.kit.plans import planned_on

pytestmark = pytest.mark.usefixtures("tiny")

GIB = 2**30
LAG = 60
WIDE: dict[str, Any] = {"n": 8, "batch": 32, "max_tokens": 512, "max_lag": LAG}
"""Rows of so many Steps take a hundred megabytes as they wait."""


def plan_with(memory: int, *, live_tokens: int = 0, **params: Any) -> Plan:
    cluster = Cluster(cores=2, memory=memory)
    graph = grpo_graph(**(WIDE | params))
    return planned_on(cluster, graph, workers="apart", live_tokens=live_tokens)


def source_of(plan: Plan) -> PlannedSource:
    [source] = plan.sources
    return source


def need(plan: Plan) -> int:
    assert plan.cluster is not None
    [room] = find_memory_rooms(plan, plan.cluster)
    return room.need


@pytest.fixture
def whole() -> int:
    """Bytes of all rows that the lag allows, and the rest."""
    plan = plan_with(64 * GIB)
    assert source_of(plan).room is None
    return need(plan)


def test_fewer_prompts_wait_where_memory_holds_no_more(whole: int) -> None:
    step = need(plan_with(64 * GIB, max_lag=0))
    memory = (whole + step) // 2
    plan = plan_with(memory)
    room = source_of(plan).room
    assert room is not None
    batch = WIDE["batch"]
    assert 0.95 * memory < need(plan) <= memory
    assert batch < room.prompts < (1 + LAG) * batch
    longest = WIDE["n"] * WIDE["max_tokens"]
    assert room.tokens == room.prompts * (longest + room.beside)
    assert 0 < room.beside < longest
    line = f"the intake slows from {room.live_tokens((1 + LAG) * batch):,} live tokens on"
    assert line in " ".join(explain(plan).split())


def test_a_step_whose_rows_do_not_fit_is_refused() -> None:
    step = need(plan_with(64 * GIB, max_lag=0))
    with pytest.raises(PlanError, match=r"this host has"):
        plan_with(step // 2)


def test_what_was_asked_for_changes_no_bytes(whole: int) -> None:
    plan = plan_with(64 * GIB, live_tokens=1000)
    assert source_of(plan).live_tokens == 1000
    assert need(plan) == whole
    assert source_of(plan_with(64 * GIB, live_tokens=1000, max_lag=0)).live_tokens == 0


def test_a_room_is_written_with_the_plan(whole: int) -> None:
    plan = plan_with(whole - (1 << 20))
    assert re.search(r'"room": \{\s*"prompts": \d+', plan.to_json())
    assert replace(source_of(plan), room=None).most == (1 + LAG) * WIDE["batch"]
