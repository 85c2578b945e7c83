"""Planning as a Python call: from what the user wrote, and the options, to a plan.

Owns: what the planner is told, and the digest that a plan gets. Does not own: the planner
(engine/plan/planner.py), a run of the plan (calls.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import overload

from dataflow.check import AnyChecked, CheckedGraph, CheckedProgram, check
from dataflow.errors import GraphError, PlanError
from dataflow.graph import Graph
from dataflow.program import AnyGraph, Program
from dataflow.snapshot import fingerprint
from engine.keep.record.place import require_recordable
from engine.plan import options as run_options
from engine.plan.cluster import Cluster
from engine.plan.cluster_file import read_cluster
from engine.plan.cost.devices import CPU
from engine.plan.cost.profile import Profile, read_profile
from engine.plan.layout_table import LayoutTable
from engine.plan.memory_margins import RunMemory
from engine.plan.options import AUTO, RunOptions
from engine.plan.placement import Placing, resolve_labels
from engine.plan.plan import Plan
from engine.plan.planner import make_plan
from engine.plan.program_plan import AnyPlan, ProgramPlan, make_program_plan
from engine.plan.relayout_option import read_relayout
from engine.session.layout_search import SearchedLayouts, search_layouts
from engine.simulation.step_seconds import simulate_step

Runnable = AnyGraph | AnyChecked
LAYOUTS_NOTE, ONE_LAYOUT_NOTE = "layouts: ", "one layout: "
"""How notes of a plan begin on the layouts among which a run switches, and on why there is one."""


@overload
def plan(
    graph: Graph | CheckedGraph,
    options: RunOptions | None = None,
    *,
    cluster: Cluster | None = None,
    simulated: bool = False,
    memory: RunMemory | None = None,
) -> Plan: ...
@overload
def plan(
    graph: Program | CheckedProgram,
    options: RunOptions | None = None,
    *,
    cluster: Cluster | None = None,
    simulated: bool = False,
    memory: RunMemory | None = None,
) -> ProgramPlan: ...
def plan(
    graph: Runnable,
    options: RunOptions | None = None,
    *,
    cluster: Cluster | None = None,
    simulated: bool = False,
    memory: RunMemory | None = None,
) -> AnyPlan:
    """Check and plan a graph, or every phase of a Program. cluster: hosts in the place of those
    that the options name. simulated: nothing of it is going to run. memory: of a run that goes on,
    what memory that ran out has taught it. Raises GraphError (with options.strict, for warnings),
    PlanError.
    """
    options = options or RunOptions()
    task = _read_task(graph, options, cluster, simulated=simulated, memory=memory)
    if options.relayout != AUTO:
        return note_layouts(task.plan(options), read_relayout(options))
    searched = task.search(options)
    alone = replace(options, relayout={})
    if searched.table is None:
        return _add_notes(task.plan(alone), [f"{ONE_LAYOUT_NOTE}{searched.why}"])
    first = searched.table.layouts[searched.table.first]
    planned = note_layouts(task.plan(replace(alone, **first.changes)), searched.table)
    (phase,) = planned.phases
    return planned.with_phases([replace(phase, considered=searched.considered)])


def find_layouts(
    graph: Runnable, options: RunOptions, *, simulated: bool = False
) -> LayoutTable | None:
    """Search the layouts among which a run may switch, each as `plan` would plan it; None where
    nothing is searched, of which the plan says why. Raises GraphError, PlanError.
    """
    return _read_task(graph, options, None, simulated=simulated).search(options).table


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanningTask:
    """A checked graph, and the machine that it is planned for."""

    checked: AnyChecked
    cluster: Cluster | None
    rates: Profile | None
    simulated: bool
    memory: RunMemory | None

    def plan(self, options: RunOptions) -> AnyPlan:
        """Plan it with these options, of which `relayout` does not count."""
        placing, cluster = self._read_wishes(options)
        planned = _plan_checked(self.checked, options, placing, cluster, self.rates, self.memory)
        require_recordable(planned.phases, options.record)
        if options.strict and planned.warnings:
            raise GraphError(planned.warnings)
        return _with_digests(planned, self.checked.source)

    def search(self, options: RunOptions) -> SearchedLayouts:
        """Search its layouts."""
        placing, cluster = self._read_wishes(options)
        return search_layouts(self.checked, options, placing, cluster, self.rates, self.plan)

    def _read_wishes(self, options: RunOptions) -> tuple[Placing, Cluster | None]:
        placing = replace(run_options.make_placing(options), simulated=self.simulated)
        if self.cluster is None:
            return placing, None
        return resolve_labels(placing, self.cluster)


def _read_task(
    graph: Runnable,
    options: RunOptions,
    cluster: Cluster | None,
    *,
    simulated: bool,
    memory: RunMemory | None = None,
) -> _PlanningTask:
    """Check a graph, find the machine and read its rates. Raises GraphError, PlanError."""
    checked = check(graph) if isinstance(graph, AnyGraph) else graph
    run_options.make_placing(options)  # raises before hosts are looked for, which may take long
    cluster = cluster or _find_cluster(options, checked.source)
    rates = None
    if options.profile is not None:
        rates = _read_rates(options.profile, cluster)
    return _PlanningTask(
        checked=checked, cluster=cluster, rates=rates, simulated=simulated, memory=memory
    )


def note_layouts(planned: AnyPlan, table: LayoutTable | None) -> AnyPlan:
    """Add the layouts among which a run may switch to the notes of each plan."""
    if table is None:
        return planned
    return _add_notes(planned, [f"{LAYOUTS_NOTE}{line}" for line in table.lines()])


def _add_notes(planned: AnyPlan, notes: Sequence[str]) -> AnyPlan:
    plans = [replace(plan, notes=(*plan.notes, *notes)) for plan in planned.phases]
    return planned.with_phases(plans)


def _plan_checked(
    checked: AnyChecked,
    options: RunOptions,
    placing: Placing,
    cluster: Cluster | None,
    profile: Profile | None,
    memory: RunMemory | None,
) -> AnyPlan:
    """Plan a graph, or all phases of a Program: these share out the wishes for places, and have
    Steps of their own. Raises PlanError.
    """
    time_step = partial(simulate_step, profile=profile)
    if isinstance(checked, CheckedGraph):
        return make_plan(
            checked,
            seed=options.seed,
            threads=options.threads,
            placing=placing,
            cluster=cluster,
            profile=profile,
            time_step=time_step,
            memory=memory,
        )
    _refuse_steps(options)
    return make_program_plan(
        checked,
        seed=options.seed,
        threads=options.threads,
        placing=placing,
        cluster=cluster,
        profile=profile,
        time_step=time_step,
        memory=memory,
    )


def _find_cluster(options: RunOptions, source: AnyGraph) -> Cluster | None:
    """Find the hosts that a plan may use; None for this one alone."""
    if options.cluster in (None, run_options.HERE) or options.inproc:
        return None
    if not run_options.is_on_ray(options):
        return read_cluster(Path(options.cluster))
    from engine.run.hosts.ray_cluster import ray_cluster  # here: Ray is not needed on one host

    return ray_cluster(options, source)


def _read_rates(path: Path, cluster: Cluster | None) -> Profile:
    """Read a profile, of this machine, or for a cluster file of a kind of device that it names.
    Raises PlanError for any other.
    """
    if cluster is None or cluster.live:
        return read_profile(path)
    profile = read_profile(path, here=False)
    kinds = {host.kind or CPU for host in cluster.hosts}
    if profile.device.name not in kinds:
        problem = f"expected one of {', '.join(sorted(kinds))}, found {profile.device.name}"
        fix = "measure it: dataflow profile GRAPH there"
        raise PlanError(f"profile {path}: {problem}. Fix: {fix}.")
    return profile


def _refuse_steps(options: RunOptions) -> None:
    if options.steps is not None:
        problem = f"a Program's phases have Steps of their own, found steps={options.steps}"
        raise PlanError(f"options: --steps: {problem}. Fix: (graph, {options.steps}) in it.")


def source_of(graph: Runnable) -> AnyGraph:
    """Look up what the user wrote."""
    if isinstance(graph, AnyGraph):
        return graph
    return graph.source


def _with_digests(planned: AnyPlan, source: AnyGraph) -> AnyPlan:
    """Add digests to the plan that another process computes, too."""
    plans: list[Plan] = []
    for plan, phase in zip(planned.phases, source.phases, strict=True):
        plans.append(replace(plan, digest=fingerprint(phase.graph)))
    return planned.with_phases(plans)
