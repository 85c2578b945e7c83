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
from engine.plan.cost.profile import (
    PassKey,
    Profile,
    ProfileCell,
    ProfiledNode,
    model_key,
)
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.predict.profile.child import ChildResult, run_in_child
from engine.predict.profile.fitting import fit_coefficients, fit_peaks, kinds_of
from engine.predict.profile.grid import SkippedNode, choose_works
from engine.predict.profile.imports import PLAIN, WITH_TORCH, measure_imports
from engine.predict.profile.kernel_timing import measure
from engine.predict.profile.machine_rates import measure_rates
from engine.predict.profile.other_load import (
    Others,
    disturbs,
    read_core_waits,
    refuse_worthless,
    taken_share,
)
from engine.predict.profile.predictions import MeasuredCell, ProfiledWork
from engine.predict.profile.run_slowdown import add_functions, compare_with_runs
from engine.predict.profile.short_run import ShortRun, measure_short_runs
from engine.predict.profile.side_by_side import MeasuredWork, measure_crowding
from engine.simulation.worker_sets import runs_ahead

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
class _Measurements:
    """What is known so far. accept: see ProfileRequest. share: the greatest that others had of the
    cores that something wanted.
    """

    accept: bool = False
    nodes: list[ProfiledNode] = field(default_factory=list)
    works: list[MeasuredWork] = field(default_factory=list)
    skipped: list[SkippedNode] = field(default_factory=list)
    share: float = 0.0

    def note_share(self, what: str, share: float, *, by_cpu: bool = False) -> None:
        """Note the share that others had of the cores that `what` wanted. Raises RunError where it
        makes the seconds worthless.
        """
        refuse_worthless(what, share, by_cpu=by_cpu, accept=self.accept)
        self.share = max(self.share, share)


def measure_profile(
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
    measurements = _Measurements(accept=request.accept_busy)
    # Rates first: what is measured of nodes depends on how long it should take with them.
    say("rates of the machine")
    device = _find_quiet_rates(cores, measurements)
    works, skipped = choose_works(plans, device, quick=request.quick, longest=request.longest)
    measurements.skipped += skipped
    for work in works:
        threads = f"{work.cores} thread{'s' * (work.cores != 1)}"
        say(f"{work.node}: {work.kind}, {len(work.cells)} sizes, {threads}")
        _measure_node(plans[work.of], work, device, request.repeats, measurements)
    if not device.is_gpu:
        say("the same beside busy cores")
        mixed = any(runs_ahead(plan) for plan in plans)
        _add_crowding(measurements, cores, quick=request.quick, mixed=mixed)
    say("what the processes of Workers take")
    profile = Profile(
        machine=this_machine(),
        installation=this_installation(),
        device=device,
        process=_measure_processes(),
        nodes=tuple(measurements.nodes),
    )
    is_quiet = True
    if request.steps:
        # Last: the run is compared with what the profile so far predicts of it.
        say(f"a run of {request.steps} Steps")
        runs, is_quiet = _find_quiet_runs(graph, options, plans, request.steps, measurements)
        profile = _add_runs(profile, plans, runs, compare=is_quiet)
    all_cores = os.cpu_count() or 1
    load = MachineLoad(cores=others.cores(), all_cores=all_cores, share=measurements.share)
    profile = replace(profile, load=load)
    skipped_nodes = tuple(measurements.skipped)
    return MadeProfile(profile=profile, skipped=skipped_nodes, compared=is_quiet)


def _find_quiet_rates(cores: int, measurements: _Measurements) -> Device:
    """The rates of the least disturbed of some tries, the first that nobody disturbs."""
    tries: list[tuple[float, Device]] = []
    for _ in range(_TRIES):
        task = partial(_try_rates, cores)
        share, device = _run(task, threads=cores, title="rates").outputs[0]
        tries.append((share, device))
        if share <= QUIET:
            break
    share, device = min(tries, key=lambda each: each[0])
    measurements.note_share("rates of the machine", share)
    return device


def _try_rates(cores: int) -> Iterator[tuple[float, Device]]:
    """(share of the cores that others had, the rates)."""
    before = read_core_waits()
    device = measure_rates(cores)
    yield read_core_waits().since(before).share, device


def _measure_processes() -> ProcessMemory:
    """Each set of imports in a process of its own."""
    (plain,) = _run(partial(measure_imports, PLAIN), threads=1, title="imports").outputs
    (torch,) = _run(partial(measure_imports, WITH_TORCH), threads=1, title="imports").outputs
    return ProcessMemory(plain=plain, torch=torch)


def _find_quiet_runs(
    graph: AnyGraph,
    options: RunOptions,
    plans: Sequence[Plan],
    steps: int,
    measurements: _Measurements,
) -> tuple[Sequence[ShortRun], bool]:
    """A run of each phase, and whether nobody disturbed them."""
    task = partial(measure_short_runs, graph, options, plans, steps)
    cores = len(os.sched_getaffinity(0))
    tries: list[tuple[float, Sequence[ShortRun]]] = []
    for _ in range(_TRIES):
        others = Others()
        runs: Sequence[ShortRun] = _run(task, threads=cores, title="a short run").outputs
        used = others.cores()
        tries.append((used, runs))
        if not disturbs(used):
            break
    used, runs = min(tries, key=lambda each: each[0])
    wanted = min(cores, max(map(_count_wanted_cores, plans)))
    measurements.note_share("a short run", taken_share(used, wanted))
    return runs, not disturbs(used)


def _add_runs(
    profile: Profile, plans: Sequence[Plan], runs: Sequence[ShortRun], *, compare: bool
) -> Profile:
    """Add what runs tell. compare: also how much longer passes took in them. Where others disturbed
    the runs, what they took would be taken for the Model's.
    """
    profile = replace(add_functions(profile, plans, runs), message=runs[0].message)
    if not compare:
        return profile
    return compare_with_runs(profile, plans, runs)


def _count_wanted_cores(plan: Plan) -> int:
    """Threads of all Workers of a plan together."""
    threads = dict.fromkeys(plan.workers, 1)
    for node in plan.nodes:
        for worker in node.workers:
            threads[worker] = max(threads[worker], node.layout.threads)
    return sum(threads.values())


def _run(task: Callable[[], Iterator[Any]], *, threads: int, title: str) -> ChildResult:
    """In a child that needs nothing of its environment."""
    return run_in_child(task, threads=threads, needed={}, title=title)


def _measure_node(
    plan: Plan,
    work: ProfiledWork,
    device: Device,
    repeats: int,
    measurements: _Measurements,
) -> None:
    """Measure a node and add what is known of it."""
    needed = plan.environments.get(plan.node(work.node).workers[0], {})
    task = partial(measure, plan, work, repeats=repeats)
    try:
        child = run_in_child(task, threads=work.cores, needed=needed, title=work.node)
    except (KernelError, DataError) as error:
        measurements.skipped.append(SkippedNode(node=work.node, why=str(error)))
        return
    cells: list[MeasuredCell] = list(child.outputs)
    # Cells ascend in what they need: those after the last that was told had too little memory.
    if child.out_of_memory:
        for cell in work.cells[len(cells) :]:
            cells.append(MeasuredCell(cell=replace(cell, cores=work.cores)))
    measured = MeasuredWork(plan=plan, work=work, cells=tuple(cells), needed=needed)
    measurements.works.append(measured)
    worst = max((each.cell for each in cells), key=lambda cell: cell.others)
    measurements.note_share(work.node, worst.others, by_cpu=worst.by_cpu)
    measurements.nodes += _fit_node(measured, device)


def _fit_node(measured: MeasuredWork, device: Device) -> Iterator[ProfiledNode]:
    """An entry for each kind of pass whose coefficients follow; the node's own has the cells."""
    work, cells = measured.work, measured.cells
    coefficients, fitted_seconds = fit_coefficients(work, device, cells)
    correction = fit_peaks(cells)
    fitted_cells: list[ProfileCell] = []
    for cell, seconds in zip(cells, fitted_seconds, strict=True):
        fitted_cells.append(cell.with_fit(seconds))
    kinds: Sequence[Kind] = kinds_of(work.kind)
    for kind in kinds:
        yield ProfiledNode(
            model=model_key(work.model),
            kind=kind,
            kernel=work.kernel,
            samples=work.samples,
            cores=1 if device.is_gpu else work.cores,
            node=work.node,
            coefficients=coefficients[kind],
            peak=correction,
            opening=max((cell.opening for cell in cells), default=0.0),
            cells=tuple(fitted_cells) if kind == work.kind else (),
        )


def _add_crowding(measurements: _Measurements, cores: int, *, quick: bool, mixed: bool) -> None:
    """Add to each node how much longer it takes beside busy cores."""
    factors: dict[tuple[PassKey, int], float] = {}
    crowdings = measure_crowding(measurements.works, cores, quick=quick, mixed=mixed)
    for measured, crowding in zip(measurements.works, crowdings, strict=True):
        work = measured.work
        what = f"{work.node} beside busy cores"
        measurements.note_share(what, crowding.others, by_cpu=crowding.by_cpu)
        for kind in kinds_of(work.kind):
            factors[replace(work.key, kind=kind), work.cores] = crowding.slower
    nodes = measurements.nodes
    measurements.nodes = [replace(node, beside=factors[node.key, node.cores]) for node in nodes]
