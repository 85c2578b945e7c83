"""The search for the layouts among which a run switches (`--relayout auto`).

    point      the best whole plan of a Step whose answers have these lengths
    layout     its wishes, as options that differ from the run's own
    cell       the plan of these options, as the run would have it, simulated with other lengths

Owns: the search, its cost and its words. Does not own: points, room and which layouts stay
(engine/plan/searched_table.py), the search of one plan (engine/plan/planner.py).

The plan for answers of assumed lengths, which a run without a table would have, is one of the
layouts; what its price chooses of streamed Steps counts for all, as a run keeps it. At each point
prices of whole plans are compared, which take milliseconds; only the few layouts that are left by
these are simulated. On CPUs without a profile, and with one device, there is nothing to search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from dataflow.check import AnyChecked, CheckedGraph
from dataflow.errors import PlanError
from engine.plan.cluster import Cluster
from engine.plan.cost.profile import Profile
from engine.plan.costs import plan_costs
from engine.plan.layout_choice import ChosenPlan, TimeStep
from engine.plan.layout_table import LIVE_TOKENS, LayoutTable, RunLayout
from engine.plan.options import RunOptions, keep_choice, write_wishes
from engine.plan.placement import Placing
from engine.plan.plan import Plan
from engine.plan.planner import choose_plan
from engine.plan.priced_work import ASSUMED, StepLengths
from engine.plan.program_plan import AnyPlan
from engine.plan.relayout_option import find_changes, require_generation, require_searchable
from engine.plan.searched_table import LivePoints, find_room, list_points, make_table
from engine.plan.step_price import price_step
from engine.simulation.step_seconds import simulate_step

MakePlan = Callable[[RunOptions], AnyPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedLayouts:
    """table: None where nothing was searched, and why. considered: what was compared, in words."""

    table: LayoutTable | None = None
    why: str = ""
    considered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedRun:
    """What a run is planned of, before any plan."""

    checked: CheckedGraph
    options: RunOptions
    placing: Placing
    cluster: Cluster | None
    profile: Profile | None
    plans: dict[str, Plan] = field(default_factory=dict)
    """Those that were made, by their wishes."""

    def choose(
        self, options: RunOptions, lengths: StepLengths, time_step: TimeStep | None = None
    ) -> ChosenPlan:
        """The best whole plan for answers of these lengths. time_step: None for the price."""
        return choose_plan(
            self.checked,
            seed=options.seed,
            threads=options.threads,
            placing=replace(self.placing, stream=options.stream, part_tokens=options.part_tokens),
            cluster=self.cluster,
            profile=self.profile,
            time_step=time_step,
            lengths=lengths,
            plans=self.plans,
        )


def search_layouts(
    checked: AnyChecked,
    options: RunOptions,
    placing: Placing,
    cluster: Cluster | None,
    profile: Profile | None,
    make: MakePlan,
) -> SearchedLayouts:
    """Search the layouts of a run. placing: its wishes; make: plans options that leave nothing to a
    search. Raises PlanError for what cannot be searched, and where there is no plan.
    """
    require_searchable(options)
    if not isinstance(checked, CheckedGraph):
        problem = "expected one graph, found a Program, whose phases have lengths of their own"
        raise PlanError(
            f"relayout: auto: {problem}. Fix: 16384=replicas.rollout=2, or leave it out."
        )
    run = SearchedRun(
        checked=checked, options=options, placing=placing, cluster=cluster, profile=profile
    )
    return _LayoutSearch(run, make).run()


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A layout, with the plan that a run has of its options."""

    layout: RunLayout
    plan: Plan


_TimePlan = Callable[[Plan, StepLengths], float]
_Grid = dict[int, tuple[float, ...]]
"""Live tokens -> seconds of a Step of each candidate."""


class _LayoutSearch:
    def __init__(self, run: SearchedRun, make: MakePlan) -> None:
        self._run, self._make = run, make
        self._base = self._options = replace(run.options, relayout={})
        self._candidates: list[_Candidate] = []
        self._problems: list[str] = []

    def run(self) -> SearchedLayouts:
        time_step = partial(simulate_step, profile=self._run.profile)
        begun = self._run.choose(self._options, ASSUMED, time_step)
        if begun.why_not:
            return SearchedLayouts(why=begun.why_not)
        require_generation(begun.plan)
        self._options = keep_choice(self._options, [begun.plan])
        points = list_points(begun.plan)
        assert points is not None
        self._add(begun)
        self._find(points)
        grid = self._fill(points, self._candidates, self._price)
        considered = [*self._describe_rooms(), *_describe(self._candidates, grid, "by price")]
        few = make_table([each.layout for each in self._candidates], grid).layouts
        names = {layout.text for layout in few} | {begun.name}
        finalists = [each for each in self._candidates if each.layout.text in names]
        if len(self._candidates) > 1:
            grid = self._fill(points, finalists, self._simulate)
            considered += _describe(finalists, grid, "simulated")
        table = make_table(
            [each.layout for each in finalists],
            grid,
            switch_seconds=max(map(self._find_start, finalists)),
            begins=points.begins,
        )
        considered += dict.fromkeys(self._problems)
        return SearchedLayouts(table=table, considered=tuple(considered))

    def _describe_rooms(self) -> Iterator[str]:
        for each in self._candidates:
            if each.layout.most < math.inf:
                yield f"room for {each.layout.most:,.0f} {LIVE_TOKENS}: {each.layout}"

    def _find(self, points: LivePoints) -> None:
        """Add the best layout of each point."""
        for lengths in points.lengths.values():
            chosen = self._run.choose(self._options, lengths)
            try:
                self._add(chosen)
            except PlanError as error:
                self._note(f"{chosen.name}: no such plan: ", error)

    def _note(self, what: str, error: PlanError) -> None:
        self._problems.append(what + str(error).splitlines()[0])

    def _add(self, chosen: ChosenPlan) -> None:
        """Add a layout, unless it is there; as the plan that the run would have of its options.
        Raises PlanError where there is none.
        """
        if any(each.layout.text == chosen.name for each in self._candidates):
            return
        options = write_wishes(self._options, chosen.wishes)
        (plan,) = self._make(options).phases
        room = find_room(plan, plan_costs(plan, self._run.profile))
        changes = find_changes(self._base, options)
        layout = RunLayout(changes=changes, text=chosen.name, most=room)
        self._candidates.append(_Candidate(layout, plan))

    def _fill(self, points: LivePoints, candidates: Sequence[_Candidate], time: _TimePlan) -> _Grid:
        """Time a Step of each at each point; infinite where a cache cannot hold a row."""
        grid: _Grid = {}
        for live, lengths in points.lengths.items():
            seconds: list[float] = []
            for each in candidates:
                try:
                    seconds.append(time(each.plan, lengths))
                except PlanError as error:
                    self._note(f"{each.layout}, {live:,} {LIVE_TOKENS}: ", error)
                    seconds.append(math.inf)
            grid[live] = tuple(seconds)
        return grid

    def _price(self, plan: Plan, lengths: StepLengths) -> float:
        return price_step(plan, lengths, profile=self._run.profile).seconds()

    def _simulate(self, plan: Plan, lengths: StepLengths) -> float:
        return simulate_step(plan, self._run.profile, lengths)

    def _find_start(self, candidate: _Candidate) -> float:
        """Seconds until all Workers are open, which is most of a switch."""
        costs = plan_costs(candidate.plan, self._run.profile)
        return max(map(costs.start, candidate.plan.workers))


def _describe(candidates: Sequence[_Candidate], grid: _Grid, how: str) -> Iterator[str]:
    """What was compared, at each point."""
    names = [each.layout.text for each in candidates]
    for live, seconds in grid.items():
        for name, time in zip(names, seconds, strict=True):
            yield f"{live:,} {LIVE_TOKENS}: {time:.3g} s a Step {how}: {name}"
