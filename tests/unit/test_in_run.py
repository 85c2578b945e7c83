"""How much longer passes take in a run than predicted; the runs are made up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from dataflow.graph import Graph
from engine.cost.devices import CPU, coefficients, device
from engine.cost.distribution import constant, lognormal
from engine.cost.machine import this_installation, this_machine
from engine.cost.profile import Profile, ProfiledNode, model_key
from engine.plan.costs import kind_of_pass, plan_costs
from engine.plan.plan import Plan
from engine.profile.in_run import compared, functions_alone
from engine.profile.short_run import ShortRun
from engine.seen_rows import SeenRows
from engine.simulate.predict import predict
from tests.kit.graphs import grpo_graph
from tests.kit.plans import placed

pytestmark = pytest.mark.usefixtures("tiny")
ROWS = SeenRows(prompts=constant(20), answers=lognormal(10, 0.6, 32))
SCORED = 1e-4


@dataclass(frozen=True)
class ProfiledPlan:
    """A plan, and a profile of each of its kinds of pass."""

    plan: Plan
    profile: Profile


def measured(graph: Graph, **asked: Any) -> ProfiledPlan:
    how: dict[str, Any] = {"workers": "one", **asked}
    plan = placed(graph, **how)
    costs, entries = plan_costs(plan), {}
    for node in plan.nodes:
        sizes = costs.sizes(node.name)
        if sizes is not None:
            kind = kind_of_pass(node)
            fit = replace(coefficients(device(CPU))[kind], origin="fitted")
            entries[model_key(sizes), kind] = ProfiledNode(
                model=model_key(sizes), kind=kind, node=node.name, coefficients=fit
            )
    machine, installation = this_machine(), this_installation()
    nodes, of = tuple(entries.values()), device(CPU)
    profile = Profile(machine=machine, installation=installation, device=of, nodes=nodes)
    return ProfiledPlan(plan, profile)


def run(of: ProfiledPlan, times: dict[str, float]) -> ShortRun:
    """One whose nodes take so many times as long as predicted."""
    found = predict(
        of.plan, steps=9, lengths=ROWS, profile=of.profile, seconds={"score": SCORED}, seed=1
    )
    seconds: dict[str, float] = {"score": SCORED}
    for node, longer in times.items():
        spans = [s for s in found.spans if s.node == node and s.what in ("chunk", "train")]
        seconds[node] = longer * sum(s.busy for s in spans) / sum(s.rows for s in spans)
    return ShortRun(seconds=seconds, steps=3, rows=ROWS)


def in_run(profile: Profile) -> dict[str, float]:
    return {entry.node: entry.in_run for entry in profile.nodes}


def test_each_kind_of_pass_has_its_own() -> None:
    of = measured(grpo_graph(batch=16, n=4))
    found = compared(of.profile, [of.plan], [run(of, {"rollout": 1.3, "train_policy": 0.9})])
    assert in_run(found) == {
        "rollout": pytest.approx(1.3, rel=0.05), "train_policy": pytest.approx(0.9, rel=0.05)
    }  # fmt: skip


def test_what_is_compared_is_predicted_from_then_on() -> None:
    of = measured(grpo_graph(batch=16, n=4))
    longer = {"rollout": 2.0, "train_policy": 2.0}
    found = compared(of.profile, [of.plan], [run(of, longer)])
    before, after = (
        predict(of.plan, steps=4, lengths=ROWS, profile=p, seconds={"score": 0.0}).seconds
        for p in (of.profile, found)
    )
    assert after == pytest.approx(2 * before, rel=0.1)
    again = compared(found, [of.plan], [run(replace(of, profile=found), longer)])
    assert in_run(again) == pytest.approx(dict.fromkeys(longer, 4.0), rel=0.05)


def test_a_function_that_shared_its_core_takes_half_as_long_alone() -> None:
    """Predictions of such a plan say twice as long again."""
    crowded = measured(grpo_graph(max_lag=1), cores=2, workers="auto", threads=1)
    for of, share in ((crowded, 0.5), (measured(grpo_graph()), 1.0)):
        found = functions_alone(of.profile, [of.plan], [run(of, {})])
        assert found == {"score": pytest.approx(share * SCORED)}


def test_rows_of_unknown_length_say_nothing() -> None:
    of = measured(grpo_graph())
    blind = replace(run(of, {"rollout": 2.0}), rows=None)
    assert compared(of.profile, [of.plan], [blind]) == of.profile


def test_a_node_that_did_not_run_says_nothing() -> None:
    of = measured(grpo_graph())
    assert compared(of.profile, [of.plan], [ShortRun(steps=3, rows=ROWS)]) == of.profile


def test_several_ranks_say_nothing() -> None:
    of = measured(grpo_graph(batch=8, n=4), workers="apart", ranks={"train_policy": 2})
    found = compared(of.profile, [of.plan], [run(of, {"rollout": 1.5, "train_policy": 1.5})])
    assert in_run(found) == {"rollout": pytest.approx(1.5, rel=0.05), "train_policy": 1.0}
