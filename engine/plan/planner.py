"""Planning: from a CheckedGraph to a Plan.

Owns: running the passes. Does not own: their order and their decisions (passes/).
"""

from __future__ import annotations

from dataclasses import fields, replace

from dataflow.check import CheckedGraph
from engine.plan.cluster import Cluster, detect
from engine.plan.draft import Draft
from engine.plan.passes import PASSES
from engine.plan.placing import Placing
from engine.plan.plan import Decisions, Plan
from engine.plan.warnings import WARNINGS


def make_plan(
    checked: CheckedGraph,
    *,
    seed: int,
    threads: int | None = None,
    placing: Placing | None = None,
    cluster: Cluster | None = None,
) -> Plan:
    """Decide everything about a checked graph on a cluster (None: this host). threads: of each
    kernel (None: all cores of its Worker). placing: None for one Worker. Raises PlanError.
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
    graph, decided = draft.graph, {f.name: getattr(draft, f.name) for f in fields(Decisions)}
    own = {"graph": graph.name, "digest": graph.digest, "seed": seed, "program": graph}
    plan = Plan(**decided, **own, cluster=draft.cluster)
    found = (warning for look in WARNINGS for warning in look(plan))
    return replace(plan, warnings=(*checked.warnings, *found))
