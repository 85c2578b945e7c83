"""The plan of a Program: one of each phase, all made before anything runs.

Owns: the phases' plans, their seeds, which phase a wish for places is for. Does not own: a phase's
plan (planner.py), running one (engine/session/phases.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from dataflow.carried_weights import Carried
from dataflow.check import CheckedGraph, CheckedProgram, add_phase_label
from dataflow.display import Displayed
from dataflow.errors import GraphWarning, PlanError
from dataflow.program import Lineage, Program
from dataflow.randomness import stream_seed
from engine.plan.cluster import Cluster, detect
from engine.plan.cost.profile import Profile
from engine.plan.layout_choice import TimeStep
from engine.plan.memory_margins import RunMemory
from engine.plan.placement import Placing
from engine.plan.plan import Plan
from engine.plan.planned_phase import PlannedPhase
from engine.plan.planner import make_plan, workers_of

FORMAT = 1
V1 = TypeVar("V1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPlan(Displayed):
    """Everything decided about a Program. left: for each phase, the weights that Models were left
    with when it begins, also those that it does not use.
    """

    program: Program
    seed: int
    phases: tuple[Plan, ...]
    left: tuple[Mapping[str, Carried], ...]
    program_warnings: tuple[GraphWarning, ...] = ()
    """Warnings of no single phase."""
    _page = "engine.session.notebook_pages:plan_page"

    def __repr__(self) -> str:
        return f"ProgramPlan({self.graph!r}, {len(self.phases)} phases)"

    @property
    def graph(self) -> str:
        """Its name, as a graph's."""
        return self.program.name

    def with_phases(self, phases: Sequence[Plan]) -> ProgramPlan:
        """The same with other plans of its phases."""
        return replace(self, phases=tuple(phases))

    @property
    def warnings(self) -> tuple[GraphWarning, ...]:
        """Of all phases, and of what they are to each other."""
        warnings: list[GraphWarning] = []
        for plan in self.phases:
            warnings += plan.warnings
        return (*warnings, *self.program_warnings)

    def to_json(self) -> str:
        """The phases' plans as JSON."""
        phases = [json.loads(plan.to_json()) for plan in self.phases]
        document = {
            "format": FORMAT,
            "program": self.program.name,
            "seed": self.seed,
            "phases": phases,
        }
        return json.dumps(document, indent=1)


AnyPlan = Plan | ProgramPlan
"""What explain, draw and run take. Both have `graph`, `seed`, `program`, `phases`, `left`,
`warnings`, `with_phases` and `to_json`.
"""


def make_program_plan(
    checked: CheckedProgram,
    *,
    seed: int,
    threads: int | None = None,
    placing: Placing | None = None,
    cluster: Cluster | None = None,
    profile: Profile | None = None,
    time_step: TimeStep | None = None,
    memory: RunMemory | None = None,
) -> ProgramPlan:
    """Plan every phase for one machine. A wish for places counts in the phases that have its nodes.
    Raises PlanError, which names the phase.
    """
    program, machine, lineage = checked.program, cluster or detect(), Lineage()
    plans: list[Plan] = []
    left: list[Mapping[str, Carried]] = [{}]
    wishes = _Wishes(program, placing or Placing(workers="one"))
    for number, graph in enumerate(checked.phases, start=1):
        phase = PlannedPhase(
            program=program.name,
            number=number,
            count=len(checked.phases),
            title=program.title(number),
            carried=lineage.begin(graph.graph),
        )
        try:
            plan = make_plan(
                graph,
                seed=phase_seed(seed, number),
                threads=threads,
                placing=wishes.of(number, graph, machine),
                cluster=machine,
                phase=phase,
                profile=profile,
                time_step=time_step,
                memory=memory,
            )
        except PlanError as error:
            raise PlanError(f"{program.label(number)}: {error}") from error
        written = program.phases[number - 1]
        warnings = tuple(add_phase_label(number, written, warning) for warning in plan.warnings)
        plans.append(replace(plan, warnings=warnings))
        assert plan.program is not None
        left.append(lineage.end(number, plan.program))
    return ProgramPlan(
        program=program,
        seed=seed,
        phases=tuple(plans),
        # What the last phase leaves is the run's, and no phase begins with it.
        left=tuple(left[:-1]),
        program_warnings=checked.own,
    )


class _Wishes:
    """What was asked for, phase by phase. A wish that fits no phase is left to the last one, whose
    planner refuses it.
    """

    def __init__(self, program: Program, placing: Placing) -> None:
        self._nodes = [{node.name for node in phase.graph.nodes} for phase in program.phases]
        self._placing = placing
        self._turns = set(placing.turns)
        """Groups that have been in no phase so far."""

    def of(self, number: int, checked: CheckedGraph, cluster: Cluster) -> Placing:
        """The wishes for a phase. Asked once for each, in order."""
        wished, groups = self._of_nodes(number), self._placing.turns
        if not groups:
            return wished
        workers = set(workers_of(checked, wished, cluster))
        turns = [group for group in groups if workers.issuperset(group)]
        self._turns -= set(turns)
        if number == len(self._nodes):
            # Those that were in no phase, which its planner refuses.
            turns += [group for group in groups if group in self._turns]
        return replace(wished, turns=tuple(turns))

    def _of_nodes(self, number: int) -> Placing:
        """Without what is about nodes of other phases only, and without turns."""
        placing, phase_nodes = self._placing, self._nodes[number - 1]
        is_last, program_nodes = number == len(self._nodes), set().union(*self._nodes)

        def counts(name: str) -> bool:
            return name in phase_nodes or (is_last and name not in program_nodes)

        def pick(wishes: Mapping[str, V1]) -> dict[str, V1]:
            return {name: wish for name, wish in wishes.items() if counts(name)}

        pin = pick(placing.pin)
        pinned_workers = set(chain.from_iterable(pin.values()))
        hosts = {worker: host for worker, host in placing.hosts.items() if worker in pinned_workers}
        groups = [tuple(filter(counts, group)) for group in placing.together]
        together = tuple(group for group in groups if len(group) > 1)
        return replace(
            placing,
            kernel=pick(placing.kernel),
            pin=pin,
            together=together,
            replicas=pick(placing.replicas),
            least=pick(placing.least),
            chunks=pick(placing.chunks),
            spread=pick(placing.spread),
            tail=pick(placing.tail),
            ranks=pick(placing.ranks),
            tensor=pick(placing.tensor),
            context=pick(placing.context),
            recompute=pick(placing.recompute),
            offload=pick(placing.offload),
            microbatch=pick(placing.microbatch),
            slots=pick(placing.slots),
            hosts=hosts,
            turns=(),
        )


def phase_seed(seed: int, number: int) -> int:
    """The seed of a phase: the run's own in the first; later another, as its nodes may have the
    same names and would draw the same numbers again.
    """
    if number == 1:
        return seed
    return int(stream_seed(seed, f"phase {number}") >> 1)
