"""Planning: from a CheckedGraph to a Plan.

Owns: running the passes in their order. Does not own: any decision (passes/), their order
(passes/__init__.py), nor showing a plan (explain.py).
"""

from __future__ import annotations

from dataclasses import replace

from dataflow.check import CheckedGraph
from engine.plan.cluster import Cluster, detect
from engine.plan.draft import Draft
from engine.plan.passes import PASSES
from engine.plan.placing import Placing
from engine.plan.plan import Plan
from engine.plan.warnings import WARNINGS


def make_plan(
    checked: CheckedGraph,
    *,
    seed: int,
    threads: int | None = None,
    placing: Placing | None = None,
    cluster: Cluster | None = None,
) -> Plan:
    """Decide everything about a checked graph on a cluster (None: this host).

    threads: of each kernel, None for all cores of its Worker. placing: the wishes for Workers (from
    engine.options.placing), None for all nodes in one. Raises PlanError where the cluster, the
    installed kernels or the places cannot run the graph.
    """
    sources = [n.name for n in checked.graph.nodes if n.operator.work == "source"]
    draft = Draft(
        graph=checked.graph,
        seed=seed,
        cluster=cluster or detect(),
        threads=threads,
        placing=placing or Placing(workers="one"),
        dataset={name: dict(checked.columns[name, 0]) for name in sources},
    )
    for run in PASSES:
        draft = run(draft)
    plan = Plan(
        graph=draft.graph.name,
        digest=draft.graph.digest,
        seed=seed,
        nodes=draft.nodes,
        sources=draft.sources,
        models=draft.models,
        edges=draft.edges,
        recorded=draft.recorded,
        recorder=draft.recorder,
        turns=draft.turns,
        hosts=draft.hosts,
        devices=draft.devices,
        notes=draft.notes,
        cluster=draft.cluster,
        program=draft.graph,
    )
    found = (warning for look in WARNINGS for warning in look(plan))
    return replace(plan, warnings=(*checked.warnings, *found))
