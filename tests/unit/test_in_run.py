"""How much longer passes take in a run than predicted; the runs are made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.plan.cost.devices import CPU, coefficients, device
from engine.plan.cost.distribution import constant_length, lognormal
from engine.plan.cost.machine import this_installation, this_machine
from engine.plan.cost.profile import Profile, ProfiledNode, model_key
from engine.plan.costs import plan_costs
from engine.plan.plan import Plan
from engine.plan.profiled_passes import kind_of_pass
from engine.predict.profile.run_slowdown import add_functions, compare_with_runs
from engine.predict.profile.short_run import ShortRun
from engine.predict.row_statistics import SeenRows
from engine.simulation.prediction_run import predict
from tests.kit.graphs import grpo_graph
from tests.kit.plans import placed

pytestmark = pytest.mark.usefixtures("tiny")
ROWS = SeenRows(prompts=constant_length(20), answers=lognormal(10, 0.6, 32))
SCORED = 1e-4


def profiled(plan: Plan) -> Profile:
    """A profile of each kind of pass of a plan."""
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
    return Profile(machine=machine, installation=installation, device=of, nodes=nodes)


def run(plan: Plan, profile: Profile, times: dict[str, float]) -> ShortRun:
    """One whose nodes take so many times as long as predicted."""
    seconds = {"score": SCORED}
    found = predict(plan, steps=9, lengths=ROWS, profile=profile, seconds=seconds, seed=1)
    for node, longer in times.items():
        spans = [s for s in found.spans if s.node == node and s.what in ("chunk", "train")]
        predicted = sum(s.busy for s in spans) / sum(s.rows for s in spans)
        seconds = seconds | {node: longer * predicted}
    return ShortRun(seconds=seconds, steps=3, rows=ROWS)


def in_run(profile: Profile) -> dict[str, float]:
    return {entry.node: entry.in_run for entry in profile.nodes}


def together(**params: Any) -> Plan:
    """All in one Worker."""
    return placed(grpo_graph(**params), workers="one")


@pytest.mark.long
def test_what_is_compared_is_predicted_from_then_on() -> None:
    plan = together(batch=16, n=4)
    profile, longer = profiled(plan), {"rollout": 2.0, "train_policy": 1.5}
    found = compare_with_runs(profile, [plan], [run(plan, profile, longer)])
    assert in_run(found) == pytest.approx(longer, rel=0.05)
    as_predicted = run(plan, found, dict.fromkeys(longer, 1.0))
    same = compare_with_runs(profile, [plan], [as_predicted])
    assert in_run(same) == pytest.approx(longer, rel=0.05)
    again = compare_with_runs(found, [plan], [run(plan, found, longer)])
    assert in_run(again) == pytest.approx({"rollout": 4.0, "train_policy": 2.25}, rel=0.05)


def test_functions_are_those_of_the_first_phase_that_has_them() -> None:
    plan = together()
    first = ShortRun(seconds={"score": SCORED, "rollout": 1.0}, cpu={"score": 0.25})
    runs = [first, ShortRun(seconds={"score": 1.0, "prompts": 2.0}, cpu={"score": 1.0})]
    found = add_functions(profiled(plan), [plan, plan], runs)
    assert (found.functions, found.cpu) == ({"score": SCORED, "prompts": 2.0}, {"score": 0.25})
    assert plan_costs(plan, found).computing("score") == 0.25
    assert plan_costs(plan, found).computing("prompts") == 1.0, "nobody measured it"


@pytest.mark.parametrize(
    "short",
    [ShortRun(seconds={"rollout": 2.0}, steps=3), ShortRun(steps=3, rows=ROWS)],
    ids=["rows of unknown length", "nodes that did not run"],
)
def test_what_says_nothing(short: ShortRun) -> None:
    plan = together()
    profile = profiled(plan)
    assert compare_with_runs(profile, [plan], [short]) == profile


def test_several_ranks_say_nothing() -> None:
    plan = placed(grpo_graph(batch=8, n=4), workers="apart", ranks={"train_policy": 2})
    profile = profiled(plan)
    short = run(plan, profile, {"rollout": 1.5, "train_policy": 1.5})
    found = compare_with_runs(profile, [plan], [short])
    assert in_run(found) == {"rollout": pytest.approx(1.5, rel=0.05), "train_policy": 1.0}


def test_what_the_process_of_the_run_takes_is_divided_by_its_messages() -> None:
    """And with two cores for two kernels, Steps are longer by that."""
    plan = placed(grpo_graph(batch=32, n=8, max_tokens=32, max_lag=2), cores=2, workers="auto")
    profile = profiled(plan)
    short = replace(run(plan, profile, {}), engine=0.05)
    compared = compare_with_runs(profile, [plan], [short])
    assert 0.05 / 100 < compared.handling < 0.05 / 5
    seconds: dict[float, float] = {}
    for handling in (0.0, compared.handling):
        told = replace(profile, handling=handling)
        prediction = predict(plan, steps=9, lengths=ROWS, profile=told, seconds={"score": SCORED})
        seconds[handling] = prediction.seconds
    assert seconds[0.0] < seconds[compared.handling] < seconds[0.0] + 9 * 0.05
