"""A profile of the plan of a graph, measured here.

Owns: the order of measurements, and what becomes of each. Does not own: any of them, the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dataflow.errors import DataError, KernelError
from dataflow.graph import Graph
from dataflow.program import Program
from engine.cost.devices import Device, Kind
from engine.cost.machine import this_installation, this_machine
from engine.cost.profile import Profile, ProfiledNode, model_key
from engine.options import RunOptions
from engine.plan.plan import Plan
from engine.profile.child import ChildResult, in_child
from engine.profile.fitting import fitted, kinds_of, peak_correction
from engine.profile.grid import SkippedNode, works
from engine.profile.in_run import compared, with_functions
from engine.profile.measuring import measure
from engine.profile.others import Others, disturbs
from engine.profile.predicting import MeasuredCell, ProfiledWork
from engine.profile.rates import measured_rates
from engine.profile.short_run import ShortRun, short_runs
from engine.profile.side_by_side import MeasuredWork, beside

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """How much is measured. repeats: of each cell; longest: seconds that one may take; steps: of
    the short run, 0 for no run.
    """

    quick: bool = False
    repeats: int = 5
    longest: float = 5.0
    steps: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeProfile:
    """skipped: nodes that were not measured. others: cores that other processes used at the begin.
    busy: whether CPU seconds were taken for kernels with one thread.
    """

    profile: Profile
    skipped: tuple[SkippedNode, ...] = ()
    others: float = 0.0
    busy: bool = False


@dataclass(slots=True)
class _Found:
    nodes: list[ProfiledNode] = field(default_factory=list)
    works: list[MeasuredWork] = field(default_factory=list)
    skipped: list[SkippedNode] = field(default_factory=list)


def profiled(
    graph: Graph | Program,
    plans: Sequence[Plan],
    options: RunOptions,
    request: ProfileRequest,
    say: Say,
) -> MadeProfile:
    """Measure and fit. plans: of the graph, or of each phase. say: is told what is measured next.
    Raises RunError for a process that fails, and what a run of the graph raises.
    """
    cores = len(os.sched_getaffinity(0))
    say("rates of the machine")
    others = Others()
    device: Device = _only(_child(_rates, cores, threads=cores, title="rates"))
    used = others.cores()
    busy = disturbs(used)
    found = _Found()
    wanted, skipped = works(plans, device, quick=request.quick, longest=request.longest)
    found.skipped += skipped
    for work in wanted:
        threads = f"{work.cores} thread{'s' * (work.cores != 1)}"
        say(f"{work.node}: {work.kind}, {len(work.cells)} sizes, {threads}")
        _measured(plans[work.of], work, device, request.repeats, found, busy=busy)
    if not device.is_gpu:
        say("the same beside busy cores")
        _crowded(found, cores, quick=request.quick)
    profile = Profile(
        machine=this_machine(),
        installation=this_installation(),
        device=device,
        nodes=tuple(found.nodes),
    )
    if request.steps:
        say(f"a run of {request.steps} Steps")
        profile = _with_runs(profile, graph, options, plans, request.steps, busy=busy)
    return MadeProfile(profile=profile, skipped=tuple(found.skipped), others=used, busy=busy)


def _with_runs(
    profile: Profile,
    graph: Graph | Program,
    options: RunOptions,
    plans: Sequence[Plan],
    steps: int,
    *,
    busy: bool,
) -> Profile:
    """With what a run of each phase tells. busy: others use the machine, and what they take is not
    the Model's.
    """
    task = (short_runs, graph, options, plans, steps)
    cores = len(os.sched_getaffinity(0))
    runs: Sequence[ShortRun] = _child(*task, threads=cores, title="a short run").told
    timed = replace(with_functions(profile, plans, runs), message=runs[0].message)
    return timed if busy else compared(timed, plans, runs)


def _rates(cores: int) -> Iterator[Device]:
    yield measured_rates(cores)


def _child(
    task: Callable[..., Iterator[Any]], *given: Any, threads: int, title: str, **named: Any
) -> ChildResult:
    needed = named.pop("needed", {})
    return in_child(partial(task, *given, **named), threads=threads, needed=needed, title=title)


def _only(result: ChildResult) -> Any:
    return result.told[0]


def _measured(
    plan: Plan,
    work: ProfiledWork,
    of: Device,
    repeats: int,
    found: _Found,
    *,
    busy: bool,
) -> None:
    """Measure a node and add what is known of it."""
    needed = plan.environments.get(plan.node(work.node).workers[0], {})
    try:
        result = _child(
            measure, plan, work,
            repeats=repeats, busy=busy, threads=work.cores, title=work.node,
            needed=needed,
        )  # fmt: skip
    except (KernelError, DataError) as error:
        found.skipped.append(SkippedNode(node=work.node, why=str(error)))
        return
    cells: list[MeasuredCell] = list(result.told)
    lost = work.cells[len(cells) :] if result.short else ()
    cells += [MeasuredCell(cell=replace(cell, cores=work.cores)) for cell in lost]
    found.works.append(MeasuredWork(plan=plan, work=work, cells=tuple(cells), needed=needed))
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
    slower = beside(found.works, cores, quick=quick)
    of = {
        (model_key(w.work.model), kind, w.work.kernel, w.work.cores): factor
        for w, factor in zip(found.works, slower, strict=True)
        for kind in kinds_of(w.work.kind)
    }
    found.nodes = [replace(n, beside=of[n.model, n.kind, n.kernel, n.cores]) for n in found.nodes]
