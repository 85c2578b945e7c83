"""Planning: from a CheckedGraph to a Plan.

Owns: running the passes. Does not own: their order and their decisions (passes/), what is chosen by
the price of whole plans (layout_choice.py,
stream_choice.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import pyarrow as pa

from dataflow.check import CheckedGraph
from engine.plan.cluster import Cluster, detect
from engine.plan.cost.profile import Profile
from engine.plan.draft import Draft
from engine.plan.layout_choice import ChosenPlan, PlanSeconds, TimeStep, choose_layouts
from engine.plan.memory_margins import RunMemory
from engine.plan.passes import PASSES
from engine.plan.passes.place import place_nodes
from engine.plan.placement import Placing
from engine.plan.plan import Decisions, Plan
from engine.plan.planned_phase import PlannedPhase
from engine.plan.priced_work import ASSUMED, StepLengths
from engine.plan.search.searched_graph import read_graph
from engine.plan.step_price import price_step
from engine.plan.stream_choice import choose_stream
from engine.plan.warnings import WARNINGS


def make_plan(
    checked: CheckedGraph,
    *,
    seed: int,
    threads: int | None = None,
    placing: Placing | None = None,
    cluster: Cluster | None = None,
    phase: PlannedPhase | None = None,
    profile: Profile | None = None,
    time_step: TimeStep | None = None,
    memory: RunMemory | None = None,
) -> Plan:
    """Decide everything about a checked graph on a cluster (None: this host). threads: of each
    kernel (None: all cores of its Worker). placing: None for one Worker. phase: its place in a
    Program. profile: measured rates, by which seconds are predicted. time_step: by whose seconds
    the layouts of a search are compared (None: their price). memory: what memory that ran out has
    taught, where a run goes on. Raises PlanError.
    """
    chosen = choose_plan(
        checked,
        seed=seed,
        threads=threads,
        placing=placing,
        cluster=cluster,
        phase=phase,
        profile=profile,
        time_step=time_step,
        memory=memory,
    )
    return chosen.plan


def choose_plan(
    checked: CheckedGraph,
    *,
    seed: int,
    threads: int | None = None,
    placing: Placing | None = None,
    cluster: Cluster | None = None,
    phase: PlannedPhase | None = None,
    profile: Profile | None = None,
    time_step: TimeStep | None = None,
    memory: RunMemory | None = None,
    lengths: StepLengths = ASSUMED,
    plans: dict[str, Plan] | None = None,
) -> ChosenPlan:
    """Decide as `make_plan` does, for answers of these lengths; also says by which wishes. plans:
    of wishes that other lengths do not change, from earlier calls; takes those of this one. Raises
    PlanError.
    """
    cluster = cluster or detect()
    placing = placing or Placing(workers="one")

    def draft_of(wishes: Placing) -> Draft:
        draft = _draft(checked, seed, threads, wishes, cluster, phase)
        return replace(draft, profile=profile, memory=memory or {})

    def run_passes(wishes: Placing) -> Plan:
        return _run_passes(checked, draft_of(wishes))

    def make(wishes: Placing) -> Plan:
        if plans is None or wishes.stream != "off":
            return choose_stream(wishes, profile, run_passes, lengths)
        key = repr(wishes)
        if key not in plans:
            plans[key] = run_passes(wishes)
        return plans[key]

    if placing.search == "off":
        return ChosenPlan(plan=make(placing), wishes=placing, why_not="--search off")

    def price(plan: Plan) -> float:
        return price_step(plan, lengths, profile=profile).seconds()

    graph = read_graph(_run_until(draft_of(placing), place_nodes), lengths)
    seconds = PlanSeconds(price=price, simulate=time_step)
    return choose_layouts(placing, graph, cluster, make, seconds)


def _run_passes(checked: CheckedGraph, draft: Draft) -> Plan:
    """Decide everything by the passes. Raises PlanError."""
    for run in PASSES:
        draft = run(draft)
    graph = draft.graph
    # All that a Draft and a Plan have in common, so that no decision can be left out here.
    decisions = {field.name: getattr(draft, field.name) for field in fields(Decisions)}
    plan = Plan(
        **decisions,
        graph=graph.name,
        digest=graph.digest,
        seed=draft.seed,
        program=graph,
        cluster=draft.cluster,
    )
    warnings = list(checked.warnings)
    for find_warnings in WARNINGS:
        warnings += find_warnings(plan)
    return replace(plan, warnings=tuple(warnings))


def _run_until(draft: Draft, end: Callable[[Draft], Draft]) -> Draft:
    """Run the passes before one of them. Raises PlanError."""
    for run in PASSES[: PASSES.index(end)]:
        draft = run(draft)
    return draft


def workers_of(checked: CheckedGraph, placing: Placing, cluster: Cluster) -> tuple[str, ...]:
    """The Workers that a plan would have. Raises PlanError for a wish that cannot be met."""
    draft = _draft(checked, 0, None, replace(placing, turns=()), cluster, None)
    return place_nodes(_run_until(draft, place_nodes)).workers


def _draft(
    checked: CheckedGraph,
    seed: int,
    threads: int | None,
    placing: Placing | None,
    cluster: Cluster | None,
    phase: PlannedPhase | None,
) -> Draft:
    dataset: dict[str, Mapping[str, pa.DataType]] = {}
    for node in checked.graph.nodes:
        if node.operator.work == "source":
            dataset[node.name] = dict(checked.columns[node.name, 0])
    return Draft(
        graph=checked.graph,
        seed=seed,
        cluster=cluster or detect(),
        threads=threads,
        placing=placing or Placing(workers="one"),
        phase=phase,
        dataset=dataset,
    )
