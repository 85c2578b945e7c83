"""Which layouts a plan has where nobody asked for any: the best few of a search, as whole plans.

Owns: the choice by the seconds, or the cost, of whole plans, and what is said of it. Does not own:
the search (search/), the rule that it is compared with (passes/place.py), seconds of a Step
(step_price.py; engine/simulation where the caller has it).

The search prices nodes and groups; a whole plan has edges, chunks, streams and processes besides.
So its best few are planned, and those that can be are compared with one another and with the plan
of the rule, which stays where nothing is much better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from dataflow.errors import PlanError
from engine.plan.cluster import Cluster
from engine.plan.hardware_cost import step_cost, why_no_prices
from engine.plan.placement import Placing
from engine.plan.plan import Plan
from engine.plan.search.bounds import describe_bound, describe_groups
from engine.plan.search.choice import Findings, search
from engine.plan.search.searched_graph import SearchedGraph
from engine.plan.search.wishes import make_wishes

LEAST_GAIN = 0.03
"""Of a Step: what other layouts have to be worth."""

MakePlan = Callable[[Placing], Plan]
"""Makes the plan of wishes that leave no layout to a search. Raises PlanError."""
TimeStep = Callable[[Plan], float]
"""Seconds of a Step of a plan. Raises PlanError where they are not known."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """A plan of the search, or of the rule. score: what is to be least."""

    name: str
    plan: Plan
    seconds: float
    score: float
    bound: str = ""


def choose_layouts(
    placing: Placing, graph: SearchedGraph, cluster: Cluster, make: MakePlan, time_step: TimeStep
) -> Plan:
    """Make the plan with the best layouts. graph: what is searched. Raises PlanError where neither
    the rule nor the search has a plan that can be.
    """
    ruled = replace(placing, search="off")
    if placing.objective == "cost" and (why := why_no_prices(cluster)):
        raise PlanError(f"objective: cost, and {why}. Fix: price = 2.5 in the cluster file.")
    if graph.problem is None:
        return _with_lines(make(ruled), [f"no layouts were searched: {graph.why}"])
    findings = search(graph.problem)
    refusals: list[str] = []
    trials = list(_try_rule(ruled, make, time_step, refusals))
    if not trials and not findings.best:
        make(ruled)  # says why there is no plan
    for number, placement in enumerate(findings.best, start=1):
        name = f"{number}. {describe_groups(graph.problem, placement)}"
        wishes = make_wishes(ruled, graph.problem, placement, cluster, graph.hosts)
        if wishes is None:
            refusals.append(f"{name}: its groups do not fit into whole hosts")
            continue
        try:
            plan = make(wishes)
            seconds = time_step(plan)
        except PlanError as error:
            refusals.append(f"{name}: no such plan: {str(error).splitlines()[0]}")
            continue
        bound = describe_bound(graph.problem, placement)
        trials.append(_Trial(name, plan, seconds, _score(ruled, plan, seconds), bound))
    if not trials:
        return make(ruled)
    return _choose(trials, findings, refusals)


def _try_rule(
    ruled: Placing, make: MakePlan, time_step: TimeStep, refusals: list[str]
) -> Iterator[_Trial]:
    try:
        plan = make(ruled)
        seconds = time_step(plan)
    except PlanError as error:
        refusals.append(f"by rule: no such plan: {str(error).splitlines()[0]}")
        return
    yield _Trial("by rule", plan, seconds, _score(ruled, plan, seconds))


def _score(placing: Placing, plan: Plan, seconds: float) -> float:
    if placing.objective == "seconds":
        return seconds
    cost = step_cost(plan, seconds)
    assert cost is not None  # without prices nothing is searched
    return cost


def _choose(trials: Sequence[_Trial], findings: Findings, refusals: Sequence[str]) -> Plan:
    first = trials[0]
    best = min(trials, key=lambda trial: trial.score)
    gain = 0.0
    if first.score:
        gain = 1.0 - best.score / first.score
    is_ruled = first.name == "by rule"
    if is_ruled and gain < LEAST_GAIN:
        best = first
    lines = list(_describe(trials, best, findings, refusals))
    plan = best.plan
    if best is not first or not is_ruled:
        worth = f"a Step is {gain:.0%} shorter than by rule" if is_ruled else "the rule has no plan"
        note = f"layouts by search: {worth} (--why; --search off)"
        plan = replace(plan, notes=(*plan.notes, note))
    return _with_lines(plan, lines)


def _describe(
    trials: Sequence[_Trial], best: _Trial, findings: Findings, refusals: Sequence[str]
) -> Iterator[str]:
    """What was compared, and why the rest fell out."""
    for trial in sorted(trials, key=lambda trial: trial.score):
        mark = "taken" if trial is best else f"{trial.score / best.score - 1.0:+.1%}"
        bound = f"; {trial.bound}" if trial.bound else ""
        yield f"{trial.seconds:.3g} s a Step ({mark}): {trial.name}{bound}"
    yield from refusals
    fitting = findings.tried - findings.unfit
    yield (
        f"{findings.tried:,} groupings were priced in {findings.priced:,} placements:"
        f" {findings.unfit:,} do not fit into memory or devices,"
        f" {max(0, fitting - len(findings.best)):,} are slower than those above"
    )


def _with_lines(plan: Plan, lines: Sequence[str]) -> Plan:
    return replace(plan, considered=tuple(lines))
