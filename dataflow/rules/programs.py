"""Programs: what is wrong, or looks wrong, between the phases of one.

Owns: specs of Models that phases share, optimizers that go on, Models at a base that was trained
already. Does not own: the rules for each phase's graph (rules/__init__.py), who begins with whose
weights (dataflow/program.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import Fault, GraphWarning, Origin, nearest
from dataflow.model import Model
from dataflow.program import Program, models_of
from dataflow.regions import trained_models
from dataflow.rules.unused_settings import live_nodes

SPEC = ("base", "head", "dtype")
"""The fields of a Model that say which weights fit it; the others say what a phase does with it."""


def program_faults(program: Program) -> Iterator[Fault]:
    """Models of one name that cannot share weights; optimizers that cannot go on."""
    first: dict[str, tuple[int, Model]] = {}
    trained: set[str] = set()
    for number, phase in enumerate(program.phases, start=1):
        for model in models_of(phase.graph):
            yield from _unequal(
                program, first.setdefault(model.name, (number, model)), number, model
            )
        now = _written(program, number)
        for name in phase.optimizers:
            yield from _optimizer(program, number, name, now, trained)
        trained |= now


def _unequal(
    program: Program, first: tuple[int, Model], number: int, model: Model
) -> Iterator[Fault]:
    earlier, known = first
    for name in SPEC:
        was, found = getattr(known, name), getattr(model, name)
        if was != found:
            expected = f"expected {name}={was!r}, as in {program.label(earlier)}"
            yield Fault(
                rule="program",
                where=f"{program.label(number)}, Model {model.name!r}",
                problem=f"{expected}, since its weights go on, found {found!r}",
                fix=f"{name}={was!r}, or another name for this Model",
                origin=_line(program, number, model),
            )
            return  # the next phases are compared with the first, field by field


def _optimizer(
    program: Program, number: int, name: str, now: set[str], trained: set[str]
) -> Iterator[Fault]:
    where = f"{program.label(number)}, optimizers"
    if name in now and name in trained:
        return
    missing = "no phase before trains it" if name in now else "this phase does not train it"
    problem = f"expected a Model that this phase and one before it train, found {name!r}: {missing}"
    both = sorted(now & trained)
    near = nearest(name, both) or (both[0] if both else None)
    fix = f"optimizers=({near!r},)" if near else "leave optimizers= out"
    origin = program.phases[number - 1].origin
    yield Fault(rule="program", where=where, problem=problem, fix=fix, origin=origin)


def program_warnings(program: Program) -> Iterator[GraphWarning]:
    """Models that nobody trains, at a base from which an earlier phase trained one."""
    trained: dict[tuple[str, str], tuple[int, Model]] = {}
    for number, phase in enumerate(program.phases, start=1):
        changing, begins = trained_models(phase.graph), program.begins[number - 1]
        read = _read(program, number)
        for model in models_of(phase.graph):
            before = trained.get((model.base, model.head))
            stays = model.name not in changing and model.copies is None
            if before and stays and model.name in read and model.name not in begins:
                yield _base_again(program, number, model, *before)
        written = _written(program, number)
        trained |= {
            (m.base, m.head): (number, m) for m in models_of(phase.graph) if m.name in written
        }


def _base_again(
    program: Program, number: int, model: Model, earlier: int, trained: Model
) -> GraphWarning:
    problem = (
        f"it is at the base {model.base!r}, from which {program.label(earlier)} trained"
        f" {trained.name!r}: a divergence from it counts what was learnt there, too"
    )
    leaders = [m for m in models_of(program.phases[number - 1].graph) if m.name == trained.name]
    if leaders and leaders[0].trainable:
        fix = f"Model({model.name!r}, base, follows={trained.name}, every=0), its copy as it begins"
    else:
        fix = f"Model({trained.name!r}, base), which has the trained weights"
    return GraphWarning(
        rule="base_again",
        where=f"{program.label(number)}, Model {model.name!r}",
        problem=problem,
        fix=fix,
        origin=_line(program, number, model),
    )


def _written(program: Program, number: int) -> set[str]:
    """The Models that train nodes of a phase write."""
    nodes = program.phases[number - 1].graph.nodes
    return {s.name for n in nodes for p, s in n.states.items() if p in n.operator.writes}


def _read(program: Program, number: int) -> set[str]:
    """The Models that a phase computes with; what only a port of weight 0 reads counts for none."""
    graph = program.phases[number - 1].graph
    live = live_nodes(graph)
    return {s.name for node in graph.nodes if id(node) in live for s in node.states.values()}


def _line(program: Program, number: int, model: Model) -> Origin | None:
    return model.origin or program.phases[number - 1].origin
