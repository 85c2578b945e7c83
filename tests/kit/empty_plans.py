"""GRPO of many Workers, placed by hand, with kernels of nothing, and runs of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dataflow.check import check
from engine.keep.checkpoint.provenance import Provenance, ProvenanceRecord
from engine.keep.run_folder import RunFolder
from engine.plan.cluster import Cluster
from engine.plan.options import RunOptions
from engine.plan.placement import Placing
from engine.plan.plan import Plan, PlannedNode
from engine.plan.planner import make_plan
from engine.session.attempts import StepHooks
from engine.session.layouts import PlannedLayout, PlannedRun
from engine.session.phases import run_phases
from engine.session.run_beginning import Beginning
from engine.session.run_result import Result
from tests.kit import empty_kernels
from tests.kit.graphs import grpo_graph
from tests.kit.plans import headers

ANSWERS = 2
_KERNELS = {
    "prompts": empty_kernels.EmptyPrompts,
    "rollout": empty_kernels.EmptyGenerate,
    "score": empty_kernels.EmptyReward,
    "advantage": empty_kernels.EmptyAdvantage,
    "train_policy": empty_kernels.EmptyTrain,
}
_ALONE = {"prompts": "source", "advantage": "data", "train_policy": "train"}
"""The Worker of each node that has one; all others generate or score."""


def empty_plan(workers: int) -> Plan:
    """Half of the Workers generate, half score, a prompt of each Step for each that generates."""
    left = workers - len(_ALONE)
    generating = tuple(f"gen-{i}" for i in range(left // 2))
    scoring = tuple(f"score-{i}" for i in range(left - len(generating)))
    pin = {name: (worker,) for name, worker in _ALONE.items()}
    pin |= {"rollout": generating, "score": scoring}
    graph = grpo_graph(n=ANSWERS, batch=len(generating), max_tokens=4, max_lag=1)
    machine = Cluster(cores=2, memory=2**40)
    checked = check(graph, headers)
    planned = make_plan(checked, seed=0, threads=1, placing=Placing(pin=pin), cluster=machine)
    nodes = tuple(_with_empty_kernel(planned, name) for name in [n.name for n in planned.nodes])
    return replace(planned, nodes=nodes)


def _with_empty_kernel(plan: Plan, name: str) -> PlannedNode:
    kind = _KERNELS[name]
    return replace(plan.node(name), kernel=f"{kind.__module__}:{kind.__name__}")


def run_of(plan: Plan, runs: Path, steps: int, hooks: StepHooks) -> Result:
    """A run of it, by the real Supervisor, coordinator and loop."""
    options = RunOptions(steps=steps, threads=1, progress=False, runs=runs)
    nothing = Provenance(nodes={}, models={}, sources={}, trains=(), places={}, version="")
    begins = Beginning(record=ProvenanceRecord(made_of=nothing))
    with RunFolder.create("many", runs) as folder:
        present = PlannedLayout(options=options, planned=plan)
        planned_run = PlannedRun(options=options, present=present)
        return run_phases(planned_run, folder, hooks, begins)
