"""Check and plan of a graph of 1,000 nodes, the plan of 10,000 Workers, and the import of a graph
file in a fresh process.

    python -m benchmarks.check_and_plan [--quick] [--json FILE]

Owns: the graphs that are measured, and the goals. Does not own: how results are shown
(report.py).

There are two graphs, as different things are slow: a chain, in which each node depends on all
before it, and a fan, in which every node reads one rollout and feeds one sum. A small graph on many
Workers, each placed by hand, shows what grows with those.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import tyro

from benchmarks.report import SideResult, machine, show, write_json
from dataflow.check import check
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Reward, Rollout
from engine.plan.cluster import Cluster
from engine.plan.explain import explain
from engine.plan.placement import Placing
from engine.plan.plan import Plan
from engine.plan.planner import make_plan
from operators.advantage import add, group_advantage, overlong_penalty
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train

NODES = 1000
WORKERS = 10_000
CLUSTER = Cluster(cores=2, memory=2**40)
ROOMY = Cluster(cores=2, memory=2**50)
POLICY = Model("policy", "models/policy", trainable=True)

_IMPORT = """
import sys, time
start = time.perf_counter()
import numpy, pyarrow
theirs = time.perf_counter() - start
import graphs.grpo
print(theirs, time.perf_counter() - start)
assert "torch" not in sys.modules, "importing a graph imported torch"
"""


def lengths(completions: Sequence[str]) -> list[float]:
    """A reward function, never called here."""
    return [float(len(c)) for c in completions]


def chain(nodes: int) -> Graph:
    """One reward, shaped again and again."""
    rollout = _rollout()
    score: Port[Reward] = reward(lengths, rollout, name="reward")
    for i in range(nodes - 5):
        score = overlong_penalty(rollout, score, max_tokens=64, buffer=8, name=f"shaped_{i}")
    return _trained("chain", rollout, score)


def fan(nodes: int) -> Graph:
    """Many rewards of one rollout, with a frozen Model's log-probs for every tenth."""
    rollout = _rollout()
    judges = max(1, nodes // 10)
    scores = [reward(lengths, rollout, name=f"reward_{i}") for i in range(nodes - judges - 5)]
    terms = [logprobs(Model(f"judge_{i}", f"models/judge_{i}"), rollout) for i in range(judges)]
    return _trained("fan", rollout, add(*scores), terms)


def by_hand(workers: int) -> tuple[Graph, Placing]:
    """Half of the Workers generate, the rest score, but for one with all other nodes."""
    rollout = _rollout(batch=workers)
    graph = _trained("by_hand", rollout, reward(lengths, rollout, name="score"))
    generating = workers // 2
    pin: dict[str, tuple[str, ...]] = {"prompts": ("train",), "advantage": ("train",)}
    pin["train_policy"] = ("train",)
    replicas = {
        "rollout": tuple(f"gen-{i}" for i in range(generating)),
        "score": tuple(f"score-{i}" for i in range(workers - generating - 1)),
    }
    return graph, Placing(pin=pin | replicas)


def _rollout(batch: int = 64) -> Port[Rollout]:
    source = prompts("train.parquet", batch=batch)
    return generate(POLICY, source, n=8, max_tokens=64, name="rollout")


def _trained(
    name: str, rollout: Port[Rollout], score: Port[Reward], references: Sequence[Port] = ()
) -> Graph:
    advantage = group_advantage(rollout, score, name="advantage")
    loss = clipped_policy_loss(advantage)
    for reference in references:
        loss = loss + clipped_policy_loss(advantage, reference=reference, beta=0.1)
    return Graph(name, train(POLICY, rollout, loss=loss, lr=1e-6))


def _columns(data: str, split: str | None) -> dict[str, pa.DataType]:
    return {"prompt": pa.utf8(), "answer": pa.utf8()}


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The median of some calls."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def imported(repeats: int) -> tuple[float, float]:
    """Median seconds of importing NumPy and Arrow, and of `import graphs.grpo` including these, in
    fresh processes. The interpreter's own start is not counted.
    """
    run = [sys.executable, "-c", _IMPORT]
    done = [
        subprocess.run(run, capture_output=True, text=True, check=True, timeout=60)
        for _ in range(repeats)
    ]
    theirs, all_of_it = zip(*(map(float, d.stdout.split()) for d in done), strict=True)
    return statistics.median(theirs), statistics.median(all_of_it)


def results(repeats: int) -> list[SideResult]:
    """All numbers."""
    found = []
    for make in (chain, fan):
        graph = make(NODES)
        checked = check(graph, _columns)
        plan = make_plan(checked, seed=0, threads=1, cluster=CLUSTER)
        name = f"{graph.name} of {len(graph.nodes):,} nodes"
        parts = {
            "build": seconds(lambda make=make: make(NODES), repeats),
            "check": seconds(lambda graph=graph: check(graph, _columns), repeats),
            "plan": seconds(
                lambda c=checked: make_plan(c, seed=0, threads=1, cluster=CLUSTER), repeats
            ),
        }
        found += [
            SideResult(name=f"{name}/{part}", value=value, unit="s")
            for part, value in parts.items()
        ]
        both = parts["check"] + parts["plan"]
        found.append(
            SideResult(name=f"{name}/check and plan", value=both, unit="s", goal=2.0, least=False)
        )
        found.append(
            SideResult(
                name=f"{name}/explain", value=seconds(lambda p=plan: explain(p), repeats), unit="s"
            )
        )
    found += placed(repeats)
    theirs, all_of_it = imported(repeats)
    found.append(
        SideResult(name="import graphs.grpo", value=all_of_it, unit="s", goal=0.5, least=False)
    )
    return [
        *found,
        SideResult(name="import graphs.grpo/of it numpy and pyarrow", value=theirs, unit="s"),
    ]


def placed(repeats: int) -> list[SideResult]:
    """Plan and explain of many Workers."""
    graph, placing = by_hand(WORKERS)
    checked = check(graph, _columns)

    def planned() -> Plan:
        return make_plan(checked, seed=0, threads=1, placing=placing, cluster=ROOMY)

    plan, name = planned(), f"{WORKERS:,} Workers placed by hand"
    assert len(plan.workers) == WORKERS
    parts = {"plan": seconds(planned, repeats), "explain": seconds(lambda: explain(plan), repeats)}
    return [
        SideResult(name=f"{name}/{part}", value=value, unit="s", goal=2.0, least=False)
        for part, value in parts.items()
    ]


def main(*, quick: bool = False, json: Path | None = None) -> None:
    """Measure.

    Args:
        quick: each once; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    found, where = results(1 if quick else 5), machine()
    show("check and plan", found, where)
    if json is not None:
        write_json(json, found, where)


if __name__ == "__main__":
    tyro.cli(main)
