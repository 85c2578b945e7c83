"""Peak bytes of a plan whose kernels a profile has measured."""

from __future__ import annotations

import math

import pytest

from engine.plan.cost.devices import Kind, coefficients, device
from engine.plan.cost.machine import this_installation, this_machine
from engine.plan.cost.memory import LASTING, peak
from engine.plan.cost.profile import PeakCorrection, Profile, ProfiledNode, model_key
from engine.plan.costs import plan_costs
from engine.plan.explain import explain
from engine.plan.plan import Plan
from tests.kit.graphs import grpo_graph
from tests.kit.plans import placed

pytestmark = pytest.mark.usefixtures("tiny")
MIB = 2**20
BASES = {
    "decode": PeakCorrection(base=40 * MIB, factor=1.5),
    "forward": PeakCorrection(base=60 * MIB, factor=0.5),
    "train": PeakCorrection(base=50 * MIB, factor=1.25),
}


def measured(name: str = "cpu", workers: str = "one") -> tuple[Plan, Plan]:
    """A plan without a profile, and with one that has BASES."""
    plain = placed(grpo_graph(beta=0.04), workers=workers)
    model = plan_costs(plain).sizes("rollout")
    how = coefficients(device("cpu"))
    nodes = [
        ProfiledNode(model=model_key(model), kind=kind, coefficients=how[kind], peak=peak)
        for kind, peak in BASES.items()
    ]
    profile = Profile(
        machine=this_machine(),
        installation=this_installation(),
        device=device(name),
        nodes=tuple(nodes),
    )
    return plain, placed(grpo_graph(beta=0.04), workers=workers, profile=profile)


KINDS: dict[str, Kind] = {"rollout": "decode", "reference": "forward", "train_policy": "train"}


def test_what_passes_is_multiplied_and_what_stays_counts_once_a_worker() -> None:
    plain, by_profile = measured()
    for node in plain.nodes:
        factor = BASES[KINDS[node.name]].factor if node.name in KINDS else 1.0
        after = by_profile.node(node.name).estimate.bytes
        for part, size in node.estimate.bytes.items():
            assert after[part] == (size if part in LASTING else math.ceil(factor * size))
    libraries = [n.estimate.bytes.get("libraries", 0) for n in by_profile.nodes]
    held = plain.node("train_policy").estimate.bytes
    trained = math.ceil(50 * MIB + 0.25 * (held["weights"] + held["optimizer"]))
    forward = math.ceil(60 * MIB - 0.5 * plain.node("reference").estimate.bytes["weights"])
    assert sorted(libraries)[-2:] == [0, max(trained, forward)]


def test_each_worker_has_its_libraries() -> None:
    _, by_profile = measured(workers="apart")
    having = {n.name for n in by_profile.nodes if "libraries" in n.estimate.bytes}
    assert having == {n.name for n in by_profile.nodes if n.traits.computes}


def test_a_node_alone_has_the_peak_that_its_kernel_had_alone() -> None:
    plain, by_profile = measured(workers="apart")
    for name in ("rollout", "train_policy"):
        before, after = (plan.node(name).estimate.bytes for plan in (plain, by_profile))
        rows = sum(before.get(part, 0) for part in ("outbox", "snapshot", "fetched"))
        alone = peak([before]) - rows
        wanted = BASES[KINDS[name]].base + BASES[KINDS[name]].factor * alone
        assert peak([after]) - rows == pytest.approx(wanted, abs=8)


def test_explain_says_what_libraries_take() -> None:
    assert "libraries" in explain(measured()[1])


def test_a_profile_of_another_kind_of_device_changes_no_peak() -> None:
    plain, by_profile = measured("H100")
    for node in plain.nodes:
        assert by_profile.node(node.name).estimate.bytes == node.estimate.bytes
