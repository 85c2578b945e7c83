"""The search for the layouts among which a run switches (`--relayout auto`).

    point      the best whole plan of a Step whose answers have these lengths
    layout     its wishes, as options that differ from the run's own
    cell       the plan of these options, as the run would have it, priced with other lengths

Owns: the search, its cost and its words. Does not own: points, room and which layouts stay
(engine/plan/searched_table.py), the search of one plan (engine/plan/planner.py).

The plan for answers of assumed lengths, which a run without a table would have, is one of the
layouts; what its price chooses of streamed Steps counts for all, as a run keeps it. It alone is
simulated: at each point prices of whole plans are compared, which take milliseconds. On CPUs
without a profile, and with one device, there is nothing to search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from engine.plan.searched_table import LEAST_GAIN, LivePoints, find_room, list_points, make_table
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


class _LayoutSearch:
    def __init__(self, run: SearchedRun, make: MakePlan) -> None:
        self._run, self._make = run, make
        self._base = self._options = replace(run.options, relayout={})
        self._layouts: list[RunLayout] = []
        self._plans: list[Plan] = []
        self._considered: list[str] = []

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
        for lengths in points.lengths.values():
            chosen = self._run.choose(self._options, lengths)
            try:
                self._add(chosen)
            except PlanError as error:
                problem = str(error).splitlines()[0]
                self._considered.append(f"{chosen.name}: no such plan: {problem}")
        grid = self._price(points)
        table = make_table(
            self._layouts, grid, switch_seconds=self._find_start(), begins=points.begins
        )
        return SearchedLayouts(table=table, considered=tuple(self._describe(table, grid)))

    def _add(self, chosen: ChosenPlan) -> None:
        """Add a layout, unless it is there; as the plan that the run would have of its options.
        Raises PlanError where there is none.
        """
        if any(layout.text == chosen.name for layout in self._layouts):
            return
        options = write_wishes(self._options, chosen.wishes)
        (plan,) = self._make(options).phases
        room = find_room(plan, plan_costs(plan, self._run.profile))
        changes = find_changes(self._base, options)
        self._layouts.append(RunLayout(changes=changes, text=chosen.name, most=room))
        self._plans.append(plan)

    def _price(self, points: LivePoints) -> dict[int, tuple[float, ...]]:
        """Seconds of a Step of each layout at each point."""
        grid: dict[int, tuple[float, ...]] = {}
        for live, lengths in points.lengths.items():
            grid[live] = tuple(self._time(plan, lengths) for plan in self._plans)
        return grid

    def _time(self, plan: Plan, lengths: StepLengths) -> float:
        """Seconds of a Step; infinite where a cache cannot hold a row."""
        try:
            return price_step(plan, lengths, profile=self._run.profile).seconds()
        except PlanError as error:
            self._considered.append(str(error).splitlines()[0])
            return math.inf

    def _find_start(self) -> float:
        """Seconds until the Workers of the slowest layout are open, which is most of a switch."""
        starts = [0.0]
        for plan in self._plans:
            costs = plan_costs(plan, self._run.profile)
            starts += map(costs.start, plan.workers)
        return max(starts)

    def _describe(self, table: LayoutTable, grid: Mapping[int, Sequence[float]]) -> Iterator[str]:
        """What was compared, at each point."""
        names = [str(layout) for layout in table.layouts]
        for layout in self._layouts:
            place = f"left out, as others are within {LEAST_GAIN:.0%}"
            if layout.text in names:
                place = f"layout {names.index(layout.text)}"
            room = f"; room for {layout.most:,.0f} {LIVE_TOKENS}" if layout.most < math.inf else ""
            yield f"{layout} ({place}{room})"
        for live, seconds in grid.items():
            times = ", ".join(f"{time:.3g}" for time in seconds)
            yield f"{live:,} {LIVE_TOKENS}: {times} s a Step in these, by price"
        yield from dict.fromkeys(self._considered)
