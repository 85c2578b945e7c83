"""Which layouts a plan has where nobody asked for any: the best few of a search, as whole plans.

Owns: the choice by the seconds, or the cost, of whole plans, and what is said of it. Does not own:
the search (search/), the rule that it is compared with (passes/place.py), seconds of a Step
(step_price.py, engine/simulation).

The search prices nodes and groups; a whole plan has edges, chunks, streams and processes besides.
So its best few are planned, those that can be are simulated, and compared with one another and with
the plan of the rule, which stays where nothing is much better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from dataflow.errors import PlanError
from engine.plan.cluster import Cluster
from engine.plan.placement import Placing
from engine.plan.plan import Plan
from engine.plan.search.bounds import describe_bound, describe_groups
from engine.plan.search.choice import Findings, search
from engine.plan.search.problem import Problem
from engine.plan.search.searched_graph import SearchedGraph
from engine.plan.search.wishes import make_wishes
from engine.plan.step_cost import step_cost, why_no_prices

LEAST_GAIN = 0.03
"""Of a Step: what other layouts have to be worth."""

MakePlan = Callable[[Placing], Plan]
"""Makes the plan of wishes that leave no layout to a search. Raises PlanError."""
TimeStep = Callable[[Plan], float]
"""Seconds of a Step of a plan. Raises PlanError where they are not known."""


_FINALISTS = 2
"""Plans whose Steps may be streamed, which takes several plans to find out."""
_LARGE = 50_000
"""Nodes times devices from which a plan takes so long that only the best placement becomes one."""
_PLAUSIBLE = 1.5
"""Times the least price of a Step: what costs more is not simulated."""
_RULE = "by rule"


@dataclass(frozen=True, slots=True)
class _TriedPlan:
    """Wishes of the search, or of the rule, with their plan. score: what is to be least."""

    name: str
    wishes: Placing
    plan: Plan
    seconds: float
    score: float
    bound: str = ""
    groups: str = _RULE


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPlan:
    """A plan, and the wishes that it was made of, which leave no layout to a search. name: its
    groups, in words. why_not: why nothing was searched; empty where it was.
    """

    plan: Plan
    wishes: Placing
    name: str = _RULE
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSeconds:
    """How long a Step of a plan takes: by its price, and as it is simulated (None: its price is
    enough). Both raise PlanError where nobody knows.
    """

    price: TimeStep
    simulate: TimeStep | None


def choose_layouts(
    placing: Placing, graph: SearchedGraph, cluster: Cluster, make: MakePlan, seconds: PlanSeconds
) -> ChosenPlan:
    """Make the plan with the best layouts. graph: what is searched. Raises PlanError where neither
    the rule nor the search has a plan that can be.
    """
    ruled = replace(placing, search="off")
    if placing.objective == "cost" and (why := why_no_prices(cluster)):
        raise PlanError(f"objective: cost, and {why}. Fix: price = 2.5 in the cluster file.")
    if graph.problem is None:
        plan = _with_lines(make(ruled), [f"no layouts were searched: {graph.why}"])
        return ChosenPlan(plan=plan, wishes=ruled, why_not=graph.why)
    return _LayoutChoice(ruled, graph.problem, make, seconds).run(cluster, graph.hosts)


class _LayoutChoice:
    """Between the plans of a search and that of the rule."""

    def __init__(
        self, ruled: Placing, problem: Problem, make: MakePlan, seconds: PlanSeconds
    ) -> None:
        self._ruled, self._problem = ruled, problem
        self._make, self._seconds = make, seconds
        self._refusals: list[str] = []

    def run(self, cluster: Cluster, hosts: Sequence[Sequence[str]]) -> ChosenPlan:
        """Choose. hosts: of each pool."""
        findings = search(self._problem)
        trials: list[_TriedPlan] = []
        placements = findings.best
        if self._is_large():
            placements = placements[:1]
        elif (ruled := self._try(_RULE, self._ruled)) is not None:
            trials.append(ruled)
        for number, placement in enumerate(placements, start=1):
            groups = describe_groups(self._problem, placement)
            name = f"{number}. {groups}"
            wishes = make_wishes(self._ruled, self._problem, placement, cluster, hosts)
            if wishes is None:
                self._refusals.append(f"{name}: its groups do not fit into whole hosts")
                continue
            bound = describe_bound(self._problem, placement)
            trial = self._try(name, wishes, bound, groups)
            if trial is not None:
                trials.append(trial)
        if not trials:
            # Or it says why there is no plan.
            return ChosenPlan(plan=self._make(self._ruled), wishes=self._ruled)
        if len(trials) > 1:
            trials = self._stream(self._simulate(trials))
        return _choose(trials, findings, self._refusals)

    def _is_large(self) -> bool:
        devices = sum(pool.devices for pool in self._problem.pools)
        return len(self._problem.nodes) * devices > _LARGE

    def _try(
        self, name: str, wishes: Placing, bound: str = "", groups: str = _RULE
    ) -> _TriedPlan | None:
        """Plan these wishes, with whole Steps where the price may choose, and price a Step."""
        whole = replace(wishes, stream="off") if wishes.stream == "auto" else wishes
        try:
            plan = self._make(whole)
            seconds = self._seconds.price(plan)
        except PlanError as error:
            self._refusals.append(f"{name}: no such plan: {str(error).splitlines()[0]}")
            return None
        return _TriedPlan(name, wishes, plan, seconds, self._score(plan, seconds), bound, groups)

    def _simulate(self, trials: Sequence[_TriedPlan]) -> list[_TriedPlan]:
        """Simulate those that are not much worse than the best. The best first."""
        if self._seconds.simulate is None:
            return sorted(trials, key=_score_of)
        most = min(trial.score for trial in trials) * _PLAUSIBLE
        simulated: list[_TriedPlan] = []
        for trial in trials:
            if trial.score <= most:
                trial = self._time(trial, trial.plan)
            simulated.append(trial)
        return sorted(simulated, key=_score_of)

    def _stream(self, trials: Sequence[_TriedPlan]) -> list[_TriedPlan]:
        """Plan the best few, and the rule's, with Steps that may be streamed. The best first."""
        streamed: list[_TriedPlan] = []
        for place, trial in enumerate(trials):
            if trial.wishes.stream == "auto" and (place < _FINALISTS or trial.name == _RULE):
                plan = self._make(trial.wishes)
                if plan.sources == trial.plan.sources:
                    trial = replace(trial, plan=plan)
                else:
                    trial = self._time(trial, plan)
            streamed.append(trial)
        return sorted(streamed, key=_score_of)

    def _time(self, trial: _TriedPlan, plan: Plan) -> _TriedPlan:
        seconds = (self._seconds.simulate or self._seconds.price)(plan)
        return replace(trial, plan=plan, seconds=seconds, score=self._score(plan, seconds))

    def _score(self, plan: Plan, seconds: float) -> float:
        if self._ruled.objective == "seconds":
            return seconds
        # Without prices nothing is searched.
        return step_cost(plan, plan.cluster, seconds).step


def _score_of(trial: _TriedPlan) -> float:
    return trial.score


def _choose(
    trials: Sequence[_TriedPlan], findings: Findings, refusals: Sequence[str]
) -> ChosenPlan:
    """The best of these, ascending; the rule's where nothing is much better."""
    best = trials[0]
    ruled = next((trial for trial in trials if trial.name == _RULE), None)
    worth = "no plan of the rule beside it"
    if ruled is not None:
        gain = 1.0 - best.score / ruled.score if ruled.score else 0.0
        worth = f"a Step is {gain:.0%} shorter than by rule"
        if gain < LEAST_GAIN:
            best = ruled
    plan = best.plan
    if best is not ruled:
        note = f"layouts by search: {worth} (--why; --search off)"
        plan = replace(plan, notes=(*plan.notes, note))
    plan = _with_lines(plan, list(_describe(trials, best, findings, refusals)))
    return ChosenPlan(plan=plan, wishes=best.wishes, name=best.groups)


def _describe(
    trials: Sequence[_TriedPlan], best: _TriedPlan, findings: Findings, refusals: Sequence[str]
) -> Iterator[str]:
    """What was compared, and why the rest fell out."""
    for trial in trials:
        mark = "taken"
        if trial is not best:
            mark = f"{trial.score / best.score - 1.0:+.1%}" if best.score else "no price"
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
