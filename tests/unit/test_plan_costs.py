"""A plan's decisions put into the formulas: places, rates and ways of known plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dataflow.errors import PlanError
from engine.plan.cluster import Cluster, ClusterLink, Host, with_first
from engine.plan.cost import training
from engine.plan.cost.decode import DecodeBatch, schedule_decode
from engine.plan.cost.devices import Coefficients, catalogue_place, coefficients, device
from engine.plan.cost.machine import this_installation, this_machine
from engine.plan.cost.machine_load import MachineLoad
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.profile import Profile, ProfileCell, ProfiledNode, model_key
from engine.plan.costs import plan_costs
from engine.plan.explain import explain
from engine.plan.plan import Plan
from engine.plan.profiled_passes import kind_of_pass
from engine.plan.row_lengths import RowLengths
from tests.kit.graphs import grpo_graph
from tests.kit.plans import grpo_plan, placed, planned_on

pytestmark = pytest.mark.usefixtures("tiny")

GPUS = Cluster(cores=16, memory=2**38, gpus=(80 * 2**30,) * 2, kind="H100")


def lengths(rows: int) -> RowLengths:
    return RowLengths(np.full(rows, 20), np.full(rows, 30))


def sizes_of(plan: Plan) -> Sizes:
    """Those of the policy."""
    return plan_costs(plan).sizes("rollout")


def profile_of(plan: Plan, name: str = "cpu", **functions: float) -> Profile:
    """One in which every pass takes a second, whatever it does."""
    second = Coefficients(
        compute=1e9, reads=1e9, step=1.0, layer=0.0, row=0.0, link=1.0, hop=0.0, origin="fitted"
    )
    kinds = ("decode", "prefill", "forward", "train")
    key = model_key(sizes_of(plan))
    nodes = [ProfiledNode(model=key, kind=k, coefficients=second) for k in kinds]
    return Profile(
        machine=this_machine(),
        installation=this_installation(),
        device=device(name),
        nodes=tuple(nodes),
        functions=functions,
    )


def test_on_a_gpu_of_a_known_kind_seconds_are_those_of_the_formulas() -> None:
    plan = planned_on(GPUS, grpo_graph())
    costs = plan_costs(plan)
    where = costs.place("rollout")
    assert (where.device, where.cores) == (device("H100"), 1)
    rows, layout = lengths(64), plan.node("rollout").layout
    batch = DecodeBatch(
        prompts=rows.prompts,
        answers=rows.answers,
        shared=8,
        slots=layout.slots,
        budget=16384,
        copied=True,
    )
    by_hand = schedule_decode(sizes_of(plan), catalogue_place(device("H100")), batch)
    assert costs.decode("rollout", rows).seconds == pytest.approx(by_hand.seconds)
    estimate = plan.node("rollout").estimate
    assert (estimate.bound, estimate.origin) == ("latency", "catalogue")


def test_training_is_that_of_one_rank_with_all_updates_of_the_step() -> None:
    plan = placed(grpo_graph(minibatches=4), cores=4, threads=2, ranks={"train_policy": 2})
    costs, rows = plan_costs(plan), lengths(512)
    where = costs.place("train_policy")
    assert (where.data, where.cores) == (2, 2)
    fed = training.pack_rows(rows.prompts, rows.answers, budget=16384, shared=8, divisor=2)
    by_hand = training.train_time(sizes_of(plan), where, fed, updates=4)
    assert costs.train("train_policy", {"rows": rows}).seconds == pytest.approx(by_hand.seconds)


def test_what_was_measured_goes_before_the_catalogue() -> None:
    plan = grpo_plan()
    costs = plan_costs(plan, profile_of(plan, score=0.25))
    assert costs.origin("train_policy") == "fitted"
    decoded = costs.decode("rollout", lengths(8))
    assert decoded.seconds == pytest.approx(31.0, rel=1e-3), "a prefill and 30 passes"
    assert costs.function("score", 8) == 2.0
    assert plan_costs(plan).function("score", 8) is None


def test_a_profile_of_another_kind_of_device_changes_nothing() -> None:
    plan = grpo_plan()
    costs = plan_costs(plan, profile_of(plan, "H100"))
    assert costs.place("rollout").coefficients == coefficients(device("cpu"))
    assert costs.origin("rollout") == "catalogue"


def slow_profile(plan: Plan) -> Profile:
    """One of a machine that others use, whose rates are a tenth of the catalogue's."""
    rates = {dtype: rate / 10 for dtype, rate in device("cpu").operations.items()}
    slow = replace(device("cpu"), operations=rates, memory_rate=device("cpu").memory_rate / 10)
    busy = MachineLoad(cores=1.5, all_cores=2, share=0.4)
    return replace(profile_of(plan), device=slow, load=busy)


def test_a_model_that_is_not_in_the_profile_has_the_rates_of_the_catalogue() -> None:
    graph = grpo_graph(beta=0.04)
    plan = placed(graph, workers="one")
    slow = slow_profile(plan)
    without = replace(slow, nodes=tuple(n for n in slow.nodes if n.kind != "forward"))
    costs = plan_costs(plan, without)
    where = costs.place("reference")
    known = coefficients(device("cpu"))["forward"]
    assert (where.device, where.coefficients["forward"]) == (device("cpu"), known)
    assert costs.origin("reference") == "catalogue"
    assert costs.place("train_policy").device == slow.device, "its shares are of these rates"


def test_explain_says_what_is_not_in_the_profile_and_that_its_machine_was_busy() -> None:
    graph = grpo_graph(beta=0.04)
    slow = slow_profile(placed(graph, workers="one"))
    without = replace(slow, nodes=tuple(n for n in slow.nodes if n.kind != "forward"))
    text = " ".join(explain(placed(graph, workers="one", profile=without)).split())
    assert "reference: not in the profile: seconds by the catalogue" in text
    assert "rollout: not in the profile" not in text
    assert slow.load.note in text
    quiet = replace(slow, load=MachineLoad())
    assert "busy machine" not in explain(placed(graph, workers="one", profile=quiet))


def test_entries_are_told_apart_by_answers_a_prompt() -> None:
    """A profile of several groups of them would be priced by whichever came first."""
    plan = placed(grpo_graph(n=8, beta=0.04), workers="one")
    single = profile_of(plan)
    eight = [
        replace(n, samples=8, coefficients=replace(n.coefficients, step=8.0)) for n in single.nodes
    ]
    costs = plan_costs(plan, replace(single, nodes=(*single.nodes, *eight)))
    for node in ("rollout", "reference", "train_policy"):
        assert costs.entry(node).samples == 8
        kind = kind_of_pass(plan.node(node))
        assert costs.place(node).coefficients[kind].step == 8.0


def test_a_profile_has_the_rates_of_a_gpu_that_the_catalogue_does_not_know() -> None:
    plan = planned_on(replace(GPUS, kind="B7"), grpo_graph())
    costs = plan_costs(plan)
    assert costs.unpriced_reason("rollout") == "nobody has measured a B7 GPU"
    with pytest.raises(PlanError, match=r"device B7: expected .* catalogue.*dataflow profile"):
        costs.place("rollout")
    known = plan_costs(plan, replace(profile_of(plan), device=replace(device("H100"), name="B7")))
    assert known.unpriced_reason("rollout") == ""
    assert known.place("rollout").device.name == "B7"


def on_two_hosts(
    *links: ClusterLink, train: str = "train@b", ranks: int = 1, **wishes: Any
) -> Plan:
    """Generation on the one, training on the other, or on both."""
    hosts = [
        Host(name=name, cores=8, memory=2**38, gpus=(80 * 2**30,) * 4, kind="A100", region=region)
        for name, region in (("a", "east"), ("b", "west"))
    ]
    return planned_on(
        with_first(hosts, links=links),
        grpo_graph(),
        workers="apart",
        pin={"rollout": "gen@a", "train_policy": train},
        ranks={"train_policy": ranks},
        **wishes,
    )


def test_ways_between_workers() -> None:
    costs = plan_costs(on_two_hosts())
    card = device("A100").network
    assert costs.link("gen", "train").rate == card, "one of four cards"
    assert costs.link("gen", "gen").delay == 0.0
    near = plan_costs(placed(grpo_graph(), workers="apart"))
    assert near.link("rollout", "data").rate == device("cpu").link
    assert near.rows(1e6, "data", "data").seconds == 0.0


def test_a_slow_link_is_what_weights_and_rows_wait_for() -> None:
    slow = ClusterLink(between=("east", "west"), rate=1e6, delay=0.5)
    fast, far = plan_costs(on_two_hosts()), plan_costs(plan := on_two_hosts(slow))
    model = next(m for m in plan.models if m.name == "policy")
    took = far.weights(model, "gen")
    assert took.bound == "link"
    assert took.seconds > 1.5 > fast.weights(model, "gen").seconds
    assert far.rows(1e6, "gen", "train").seconds == pytest.approx(1e6 / 0.25e6 + 0.5)
    assert model.seconds == pytest.approx(took.seconds)
    assert "a version" in explain(plan)
    edge = next(e for e in plan.edges if (e.producer, e.consumer) == ("rollout", "train_policy"))
    assert edge.seconds > 0.5


def test_ranks_on_two_hosts_reduce_at_the_rate_of_the_way_between_them() -> None:
    slow = ClusterLink(between=("east", "west"), rate=4e6)
    near, far = (
        plan_costs(on_two_hosts(*links, train="t0@a,t1@b", ranks=2)).place("train_policy").rate
        for links in ((), (slow,))
    )
    assert near == device("A100").network
    assert far == 1e6, "one of four cards"


FOUR = "t0@a,t1@a,t2@b,t3@b"


@pytest.mark.parametrize(("ranks", "tensor", "cards"), [(4, 1, 2), (2, 2, 1)])
def test_ranks_with_the_same_part_have_the_cards_of_all_of_them_on_a_host(
    ranks: int, tensor: int, cards: int
) -> None:
    """A ring enters each host once; that of a tensor rank's part has one rank on each."""
    slow = ClusterLink(between=("east", "west"), rate=4e6)
    wishes = {"tensor": {"train_policy": tensor}, "shard": True}
    plan = on_two_hosts(slow, train=FOUR, ranks=ranks, **wishes)
    assert plan_costs(plan).place("train_policy").rate == cards * 1e6
    one_host = on_two_hosts(slow, train="t0@b,t1@b,t2@b,t3@b", ranks=ranks, **wishes)
    assert plan_costs(one_host).place("train_policy").rate == 0.0


def test_no_ring_is_faster_than_the_link_of_its_devices() -> None:
    fast = ClusterLink(between=("east", "west"), rate=1e15)
    plan = on_two_hosts(fast, train=FOUR, ranks=4)
    assert plan_costs(plan).place("train_policy").rate == device("A100").link


def test_what_a_fit_leaves_over_at_a_measured_size_counts_at_it() -> None:
    plan = placed(grpo_graph(beta=0.04), workers="one")
    fit, rows = profile_of(plan), lengths(16)
    cell = ProfileCell(rows=16, prompt=20, answer=30, seconds=2.0, fitted=1.0)
    left = replace(fit, nodes=tuple(replace(node, cells=(cell,)) for node in fit.nodes))
    fitted, measured = plan_costs(plan, fit), plan_costs(plan, left)
    for took in (
        lambda costs: costs.decode("rollout", rows).ends,
        lambda costs: costs.forward("reference", rows).seconds,
        lambda costs: costs.train("train_policy", {"rows": rows}).seconds,
    ):
        assert took(measured) == pytest.approx(2.0 * took(fitted))
