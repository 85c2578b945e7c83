"""Planning as a Python call: from what the user wrote, and the options, to a plan.

Owns: what the planner is told, and the digest that a plan gets. Does not own: the planner
(engine/plan/planner.py), a run of the plan (calls.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import overload

from dataflow.check import CheckedGraph, CheckedProgram, check
from dataflow.errors import GraphError, PlanError
from dataflow.graph import Graph
from dataflow.program import Phase, Program
from dataflow.program_snapshot import identity
from dataflow.snapshot import fingerprint
from engine.keep.record.place import require_recordable
from engine.plan import options as run_options
from engine.plan.cluster import Cluster
from engine.plan.cluster_file import read_cluster
from engine.plan.cost.devices import CPU
from engine.plan.cost.profile import Profile, read_profile
from engine.plan.options import RunOptions
from engine.plan.placement import on_hosts
from engine.plan.plan import Plan
from engine.plan.planner import make_plan
from engine.plan.program_plan import ProgramPlan, make_program_plan

Runnable = Graph | CheckedGraph | Program | CheckedProgram


@overload
def plan(
    graph: Graph | CheckedGraph,
    options: RunOptions | None = None,
    *,
    profile: Path | None = None,
    cluster: Cluster | None = None,
    simulated: bool = False,
) -> Plan: ...
@overload
def plan(
    graph: Program | CheckedProgram,
    options: RunOptions | None = None,
    *,
    profile: Path | None = None,
    cluster: Cluster | None = None,
    simulated: bool = False,
) -> ProgramPlan: ...
@overload
def plan(
    graph: Runnable,
    options: RunOptions | None = None,
    *,
    profile: Path | None = None,
    cluster: Cluster | None = None,
    simulated: bool = False,
) -> Plan | ProgramPlan: ...
def plan(
    graph: Runnable,
    options: RunOptions | None = None,
    *,
    profile: Path | None = None,
    cluster: Cluster | None = None,
    simulated: bool = False,
) -> Plan | ProgramPlan:
    """Check and plan a graph, or every phase of a Program. profile: a file of `dataflow profile`,
    by whose rates seconds are predicted. cluster: hosts in the place of those that the options
    name. simulated: nothing of it is going to run. Raises GraphError (with options.strict, for
    warnings), PlanError.
    """
    options = options or RunOptions()
    checked = check(graph) if isinstance(graph, Graph | Program) else graph
    placing = replace(run_options.placing(options), simulated=simulated)
    cluster = cluster or _cluster(options, source_of(checked))
    if cluster is not None:
        placing, cluster = on_hosts(placing, cluster)
    rates = None if profile is None else _profile(profile, cluster)
    if isinstance(checked, CheckedProgram):
        _refuse_steps(options)
        planned = make_program_plan(
            checked,
            seed=options.seed,
            threads=options.threads,
            placing=placing,
            cluster=cluster,
            profile=rates,
        )
    else:
        planned = make_plan(
            checked,
            seed=options.seed,
            threads=options.threads,
            placing=placing,
            cluster=cluster,
            profile=rates,
        )
    require_recordable(
        planned.phases if isinstance(planned, ProgramPlan) else [planned], options.record
    )
    if options.strict and planned.warnings:
        raise GraphError(planned.warnings)
    return _identified(planned, source_of(checked))


def _cluster(options: RunOptions, source: Graph | Program) -> Cluster | None:
    """The hosts that a plan may use; None for this one alone."""
    if options.cluster in (None, run_options.HERE) or options.inproc:
        return None
    if not run_options.on_ray(options):
        return read_cluster(Path(options.cluster))
    from engine.run.hosts.ray_cluster import ray_cluster  # here: Ray is not needed on one host

    return ray_cluster(options, source)


def _profile(path: Path, cluster: Cluster | None) -> Profile:
    """Of this machine; for a cluster file, of a kind of device that it names. Raises PlanError."""
    if cluster is None or cluster.live:
        return read_profile(path)
    profile = read_profile(path, here=False)
    kinds = {host.kind or CPU for host in cluster.hosts}
    if profile.device.name not in kinds:
        problem = f"expected one of {', '.join(sorted(kinds))}, found {profile.device.name}"
        raise PlanError(
            f"profile {path}: {problem}. Fix: measure it: dataflow profile GRAPH there."
        )
    return profile


def _refuse_steps(options: RunOptions) -> None:
    if options.steps is not None:
        problem = f"a Program's phases have Steps of their own, found steps={options.steps}"
        raise PlanError(f"options: --steps: {problem}. Fix: (graph, {options.steps}) in it.")


def source_of(graph: Runnable) -> Graph | Program:
    """What the user wrote."""
    if isinstance(graph, CheckedGraph):
        return graph.graph
    return graph.program if isinstance(graph, CheckedProgram) else graph


def _identified(planned: Plan | ProgramPlan, source: Graph | Program) -> Plan | ProgramPlan:
    """The plan with digests that another process computes, too."""
    if isinstance(planned, Plan):
        return replace(planned, digest=identity(source))
    of = [replace(p, digest=fingerprint(s.graph)) for p, s in _paired(planned)]
    return replace(planned, phases=tuple(of))


def _paired(planned: ProgramPlan) -> Iterable[tuple[Plan, Phase]]:
    return zip(planned.phases, planned.program.phases, strict=True)
