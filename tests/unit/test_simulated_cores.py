"""Functions beside kernels on the cores of a simulated host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import pytest

from dataflow.graph import Graph
from dataflow.model import Model
from engine.plan.plan import Plan
from engine.run.simulated_workers.clock import VirtualClock
from engine.run.simulated_workers.cores import SimulatedCores
from operators.advantage import add, group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train
from tests.kit.graphs import grpo_graph
from tests.kit.plans import placed, plan_of, planned_node
from tests.kit.simulated_rows import predicted

pytestmark = pytest.mark.usefixtures("tiny")


@dataclass(frozen=True)
class TwoCores:
    """Kernels of a thread each, and functions with these shares."""

    shares: Mapping[str, float]

    def threads(self, node: Any) -> int:
        return 1

    def computing(self, node: Any) -> float:
        return self.shares[node.name]

    def cores(self, worker: str) -> int:
        return 2


@dataclass
class ClockedWorker:
    name: str
    clock: VirtualClock

    def after(self, seconds: float, action: Any) -> None:
        self.clock.after(seconds, action)


class BusyHost:
    """Nodes `gen` and `train` are kernels; the others functions that take ten seconds alone. Each
    is on a Worker of its name.
    """

    def __init__(self, **shares: float) -> None:
        names = ("gen", "train", *shares)
        self.plan = plan_of(*(planned_node(name, workers=(name,)) for name in names))
        self.clock, self.ends = VirtualClock(), dict[str, float]()
        self.cores = SimulatedCores(self.plan, self.clock, cast("Any", TwoCores(shares)))
        for name in shares:
            self.at(0.0, lambda name=name: self.function(name))

    def at(self, seconds: float, action: Any) -> None:
        self.clock.after(seconds, action)

    def kernel(self, name: str, begin: float, end: float) -> None:
        self.at(begin, lambda: self.cores.begin(name, self.plan.node(name)))
        self.at(end, lambda: self.cores.end(name, self.plan.node(name)))

    def compute(self, name: str, seconds: float) -> None:
        """A kernel that has cores for so long from the beginning on; its end is kept."""
        worker = cast("Any", ClockedWorker(name, self.clock))

        def begin() -> None:
            self.cores.begin(name, self.plan.node(name))
            self.cores.compute(worker, seconds, end)

        def end() -> None:
            self.ends[name] = self.clock.now
            self.cores.end(name, self.plan.node(name))

        self.at(0.0, begin)

    def function(self, name: str) -> None:
        worker = cast("Any", ClockedWorker(name, self.clock))

        def ended() -> None:
            self.ends[name] = self.clock.now

        self.cores.run(worker, self.plan.node(name), 10.0, ended)

    def run(self) -> dict[str, float]:
        while self.clock.step():
            pass
        return self.ends


@pytest.mark.parametrize(("share", "end"), [(1.0, 12.0), (0.25, 10.8), (0.0, 10.0)])
def test_a_function_is_slower_for_as_long_as_all_cores_are_busy(share: float, end: float) -> None:
    """From second 2 to 6 it does half as much, if all of it is computing."""
    host = BusyHost(score=share)
    host.kernel("gen", 1.0, 30.0)
    host.kernel("train", 2.0, 6.0)
    assert host.run() == {"score": pytest.approx(end)}


def test_functions_share_cores_with_functions() -> None:
    host = BusyHost(one=1.0, two=1.0)
    host.kernel("gen", 0.0, 99.0)
    assert host.run() == {"one": pytest.approx(20.0), "two": pytest.approx(20.0)}
    assert BusyHost(one=1.0, two=1.0).run() == {
        "one": pytest.approx(10.0),
        "two": pytest.approx(10.0),
    }


def test_what_a_worker_ran_that_is_gone_is_slow_for_nobody() -> None:
    host = BusyHost(one=1.0, two=1.0)
    host.kernel("gen", 0.0, 99.0)
    host.at(4.0, lambda: host.cores.lose("one"))
    assert host.run()["two"] == pytest.approx(12.0)


def test_kernels_lose_what_a_function_computes_while_all_cores_are_busy() -> None:
    """Ten seconds of computing take it twenty; each of two kernels loses five."""
    host = BusyHost(score=1.0)
    host.compute("gen", 30.0)
    host.compute("train", 40.0)
    ends = host.run()
    assert ends == {
        "score": pytest.approx(20.0),
        "gen": pytest.approx(35.0),
        "train": pytest.approx(45.0),
    }


def test_a_kernel_loses_nothing_to_a_function_with_a_core_of_its_own() -> None:
    host = BusyHost(score=1.0)
    host.compute("gen", 30.0)
    host.at(5.0, lambda: host.cores.take("gen", 3.0))
    assert host.run() == {"score": pytest.approx(10.0), "gen": pytest.approx(33.0)}


def test_kernels_lose_what_the_coordinator_computes() -> None:
    host = BusyHost()
    host.compute("gen", 30.0)
    host.compute("train", 10.0)
    host.at(5.0, lambda: host.cores.take("gen", 3.0))
    host.at(20.0, lambda: host.cores.take("gen", 3.0))
    assert host.run() == {"gen": pytest.approx(31.5), "train": pytest.approx(11.5)}


def test_kernels_go_on_beside_many_functions() -> None:
    """Five want two cores: each has two fifths of one."""
    host = BusyHost(one=1.0, two=1.0, three=1.0)
    host.compute("gen", 1.0)
    host.kernel("train", 0.0, 99.0)
    assert host.run()["gen"] == pytest.approx(2.5)


def in_lag(cores: int) -> Plan:
    graph = grpo_graph(batch=32, n=8, max_tokens=32, max_lag=2)
    return placed(graph, cores=cores, workers="auto", threads=1)


def scored(plan: Plan, share: float, seconds: float = 1e-3) -> float:
    """Seconds that the reward took, in all."""
    prediction = predicted(plan, seconds={"score": seconds}, cpu={"score": share})
    return sum(span.busy for span in prediction.spans if span.node == "score")


def test_a_reward_shares_a_core_only_while_kernels_have_all() -> None:
    free, crowded = in_lag(3), in_lag(2)
    alone = scored(free, 1.0, 1e-4)
    assert 1.2 * alone < scored(crowded, 0.5, 1e-4) < scored(crowded, 1.0, 1e-4) < 2.0 * alone
    slow = scored(crowded, 1.0, 1e-3) / scored(free, 1.0, 1e-3)
    assert 1.0 <= slow < 1.1, "kernels wait for it most of the time"


def test_a_reward_that_waits_is_as_long_at_a_lag_as_alone() -> None:
    assert scored(in_lag(2), 0.0) == pytest.approx(scored(in_lag(3), 1.0))


def judge(completions: list[str]) -> list[float]:
    return [0.0 for _ in completions]


REWARDS: dict[str, Any] = {"seconds": {"judge": 5e-3, "score": 3e-3}, "cpu": {"judge": 0.0}}


def two_rewards(max_lag: int) -> Graph:
    policy = Model("policy", "tiny", trainable=True)
    prompt = prompts("prompts.parquet", batch=4)
    rollout = generate(policy, prompt, n=4, max_tokens=32, max_lag=max_lag, name="rollout")
    scores = [reward(judge, rollout, name=name) for name in ("judge", "score")]
    advantage = group_advantage(rollout, add(*scores), name="advantage")
    return Graph("two", train(policy, rollout, loss=clipped_policy_loss(advantage), lr=1e-6))


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_each_row_is_scored_once_by_each_reward(max_lag: int) -> None:
    """Rows of up to 1 + max_lag Steps are under way as the run ends."""
    graph = two_rewards(max_lag)
    prediction = predicted(placed(graph, cores=2, workers="auto", threads=1), **REWARDS)
    rows = {
        node: sum(span.rows for span in prediction.spans if span.node == node)
        for node in ("rollout", "judge", "score")
    }
    step, steps = 16, len(prediction.steps)
    assert step * steps <= rows["judge"] == rows["score"] <= step * (steps + max_lag)
    assert rows["judge"] <= rows["rollout"] <= step * (steps + max_lag + 1)
    seconds = sum(span.busy for span in prediction.spans if span.node == "judge")
    assert seconds == pytest.approx(rows["judge"] * 5e-3), "it waits, at each lag"
