"""A profile of the plan of a graph, measured here.

Owns: the order of measurements, what becomes of each, and what is repeated until others leave the
machine alone. Does not own: any of them, the file, what counts as too busy
(engine/plan/cost/machine_load.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dataflow.errors import DataError, KernelError
from dataflow.program import AnyGraph
from engine.plan.cost.devices import Device, Kind
from engine.plan.cost.machine import this_installation, this_machine
from engine.plan.cost.machine_load import QUIET, MachineLoad
from engine.plan.cost.process_memory import ProcessMemory
from engine.plan.cost.profile import PassKey, Profile, ProfiledNode, model_key
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.predict.profile.child import ChildResult, in_child
from engine.predict.profile.fitting import fitted, kinds_of, peak_correction
from engine.predict.profile.grid import SkippedNode, works
from engine.predict.profile.imports import PLAIN, WITH_TORCH, imported
from engine.predict.profile.kernel_timing import measure
from engine.predict.profile.machine_rates import measured_rates
from engine.predict.profile.other_load import (
    Others,
    core_waits,
    disturbs,
    refuse_worthless,
    share_of,
)
from engine.predict.profile.predictions import MeasuredCell, ProfiledWork
from engine.predict.profile.run_slowdown import compared, with_functions
from engine.predict.profile.short_run import ShortRun, short_runs
from engine.predict.profile.side_by_side import MeasuredWork, beside

Say = Callable[[str], None]

_TRIES = 3
"""Of what is measured as a whole, until others do not disturb it: rates, and the short run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """How much is measured. repeats: of each cell; longest: seconds that one may take; steps: of
    the short run, 0 for no run. accept_busy: keep seconds that others have made worthless.
    """

    quick: bool = False
    repeats: int = 5
    longest: float = 5.0
    steps: int = 3
    accept_busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeProfile:
    """skipped: nodes that were not measured. compared: whether a run was compared with what is
    predicted of it; not if others used the machine meanwhile.
    """

    profile: Profile
    skipped: tuple[SkippedNode, ...] = ()
    compared: bool = True


@dataclass(slots=True)
class _Found:
    """accept: see ProfileRequest. share: the greatest so far of the cores that something wanted."""

    accept: bool = False
    nodes: list[ProfiledNode] = field(default_factory=list)
    works: list[MeasuredWork] = field(default_factory=list)
    skipped: list[SkippedNode] = field(default_factory=list)
    share: float = 0.0

    def disturbed(self, what: str, share: float, *, by_cpu: bool = False) -> None:
        """Others had such a share of the cores that `what` wanted. Raises RunError where that
        makes its seconds worthless.
        """
        refuse_worthless(what, share, by_cpu=by_cpu, accept=self.accept)
        self.share = max(self.share, share)


def profiled(
    graph: AnyGraph,
    plans: Sequence[Plan],
    options: RunOptions,
    request: ProfileRequest,
    say: Say,
) -> MadeProfile:
    """Measure and fit. plans: of the graph, or of each phase. say: is told what is measured next.
    Raises RunError for a process that fails and for a machine that others use too much, and what a
    run of the graph raises.
    """
    cores = len(os.sched_getaffinity(0))
    others = Others()
    found = _Found(accept=request.accept_busy)
    say("rates of the machine")
    device = _rates_when_quiet(cores, found)
    wanted, skipped = works(plans, device, quick=request.quick, longest=request.longest)
    found.skipped += skipped
    for work in wanted:
        threads = f"{work.cores} thread{'s' * (work.cores != 1)}"
        say(f"{work.node}: {work.kind}, {len(work.cells)} sizes, {threads}")
        _measured(plans[work.of], work, device, request.repeats, found)
    if not device.is_gpu:
        say("the same beside busy cores")
        _crowded(found, cores, quick=request.quick)
    say("what the processes of Workers take")
    profile = Profile(
        machine=this_machine(),
        installation=this_installation(),
        device=device,
        process=_process(),
        nodes=tuple(found.nodes),
    )
    quiet = True
    if request.steps:
        say(f"a run of {request.steps} Steps")
        profile, quiet = _with_runs(profile, graph, options, plans, request.steps, found)
    load = MachineLoad(cores=others.cores(), all_cores=os.cpu_count() or 1, share=found.share)
    whole = replace(profile, load=load)
    return MadeProfile(profile=whole, skipped=tuple(found.skipped), compared=quiet)


def _rates_when_quiet(cores: int, found: _Found) -> Device:
    """The rates of the least disturbed of some tries, the first that nobody disturbs."""
    tries: list[tuple[float, Device]] = []
    while len(tries) < _TRIES and not (tries and tries[-1][0] <= QUIET):
        tries.append(_child(_rates, cores, threads=cores, title="rates").told[0])
    share, device = min(tries, key=lambda each: each[0])
    found.disturbed("rates of the machine", share)
    return device


def _rates(cores: int) -> Iterator[tuple[float, Device]]:
    before = core_waits()
    device = measured_rates(cores)
    yield core_waits().since(before).share, device


def _process() -> ProcessMemory:
    plain, torch = (
        _child(imported, modules, threads=1, title="imports").told[0]
        for modules in (PLAIN, WITH_TORCH)
    )
    return ProcessMemory(plain=plain, torch=torch)


def _with_runs(
    profile: Profile,
    graph: AnyGraph,
    options: RunOptions,
    plans: Sequence[Plan],
    steps: int,
    found: _Found,
) -> tuple[Profile, bool]:
    """With what a run of each phase tells, and whether nobody disturbed it: else what others took
    would be taken for the Model's.
    """
    task = (short_runs, graph, options, plans, steps)
    cores = len(os.sched_getaffinity(0))
    tries: list[tuple[float, Sequence[ShortRun]]] = []
    while len(tries) < _TRIES and not (tries and not disturbs(tries[-1][0])):
        others = Others()
        runs: Sequence[ShortRun] = _child(*task, threads=cores, title="a short run").told
        tries.append((others.cores(), runs))
    used, runs = min(tries, key=lambda each: each[0])
    wanted = min(cores, max(map(_wanted_cores, plans)))
    found.disturbed("a short run", share_of(used, wanted))
    timed = replace(with_functions(profile, plans, runs), message=runs[0].message)
    quiet = not disturbs(used)
    return (compared(timed, plans, runs) if quiet else timed), quiet


def _wanted_cores(plan: Plan) -> int:
    """Of all Workers at the same time."""
    threads = dict.fromkeys(plan.workers, 1)
    for node in plan.nodes:
        for worker in node.workers:
            threads[worker] = max(threads[worker], node.layout.threads)
    return sum(threads.values())


def _child(
    task: Callable[..., Iterator[Any]], *given: Any, threads: int, title: str, **named: Any
) -> ChildResult:
    needed = named.pop("needed", {})
    return in_child(partial(task, *given, **named), threads=threads, needed=needed, title=title)


def _measured(
    plan: Plan,
    work: ProfiledWork,
    of: Device,
    repeats: int,
    found: _Found,
) -> None:
    """Measure a node and add what is known of it."""
    needed = plan.environments.get(plan.node(work.node).workers[0], {})
    try:
        result = _child(
            measure, plan, work,
            repeats=repeats, threads=work.cores, title=work.node, needed=needed,
        )  # fmt: skip
    except (KernelError, DataError) as error:
        found.skipped.append(SkippedNode(node=work.node, why=str(error)))
        return
    cells: list[MeasuredCell] = list(result.told)
    lost = work.cells[len(cells) :] if result.short else ()
    cells += [MeasuredCell(cell=replace(cell, cores=work.cores)) for cell in lost]
    found.works.append(MeasuredWork(plan=plan, work=work, cells=tuple(cells), needed=needed))
    worst = max((each.cell for each in cells), key=lambda cell: cell.others)
    found.disturbed(work.node, worst.others, by_cpu=worst.by_cpu)
    how, said = fitted(work, of, cells)
    kept = tuple(c.kept(s) for c, s in zip(cells, said, strict=True))
    correction = peak_correction(cells)
    kinds: list[Kind] = list(kinds_of(work.kind))
    for kind in kinds:
        found.nodes.append(
            ProfiledNode(
                model=model_key(work.model),
                kind=kind,
                kernel=work.kernel,
                samples=work.samples,
                cores=1 if of.is_gpu else work.cores,
                node=work.node,
                coefficients=how[kind],
                peak=correction,
                opening=max((cell.opening for cell in cells), default=0.0),
                cells=kept if kind == work.kind else (),
            )
        )


def _crowded(found: _Found, cores: int, *, quick: bool) -> None:
    """Add to each node how much longer it takes beside busy cores."""
    factors: dict[tuple[PassKey, int], float] = {}
    for work, crowding in zip(found.works, beside(found.works, cores, quick=quick), strict=True):
        what = f"{work.work.node} beside busy cores"
        found.disturbed(what, crowding.others, by_cpu=crowding.by_cpu)
        for kind in kinds_of(work.work.kind):
            factors[replace(work.work.key, kind=kind), work.work.cores] = crowding.slower
    found.nodes = [replace(n, beside=factors[n.key, n.cores]) for n in found.nodes]
