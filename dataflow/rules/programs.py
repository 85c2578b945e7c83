"""Programs: what is wrong, or looks wrong, between the phases of one.

Owns: specs and adapters of Models that phases share, optimizers that go on, Models at a base that
was trained already. Does not own: the rules for each phase's graph (rules/__init__.py), who begins
with whose weights (dataflow/program.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dataflow.adapters import Adapter
from dataflow.errors import Fault, GraphWarning, Origin, nearest
from dataflow.model import Model
from dataflow.program import Program, models_of
from dataflow.regions import find_trained_models
from dataflow.rules.unused_settings import live_nodes

SPEC = ("base", "head", "dtype")
"""The fields of a Model that say which weights fit it; the others say what a phase does with it."""


def program_faults(program: Program) -> Iterator[Fault]:
    """Models of one name that cannot share weights; optimizers that cannot go on."""
    first_uses: dict[str, tuple[int, Model]] = {}
    trained_before: set[str] = set()
    for number, phase in enumerate(program.phases, start=1):
        for model in models_of(phase.graph):
            first_use = first_uses.setdefault(model.name, (number, model))
            yield from _check_spec(program, first_use, number, model)
            yield from _check_adapter(program, number, model)
        trained_now = _written_models(program, number)
        for name in phase.optimizers:
            yield from _check_optimizer(program, number, name, trained_now, trained_before)
        trained_before |= trained_now


def _check_spec(
    program: Program, first_use: tuple[int, Model], number: int, model: Model
) -> Iterator[Fault]:
    first_number, first_model = first_use
    for name in SPEC:
        first, now = getattr(first_model, name), getattr(model, name)
        if first != now:
            expected = f"expected {name}={first!r}, as in {program.label(first_number)}"
            yield Fault(
                rule="program",
                where=f"{program.label(number)}, Model {model.name!r}",
                problem=f"{expected}, since its weights go on, found {now!r}",
                fix=f"{name}={first!r}, or another name for this Model",
                origin=_line(program, number, model),
            )
            return  # the next phases are compared with the first, field by field


def _check_adapter(program: Program, number: int, model: Model) -> Iterator[Fault]:
    """An adapter that was trained before, and is another one or none now, or beside weights that
    were trained before it.
    """
    weights = program.begins[number - 1].get(model.name)
    if weights is None or not weights.is_adapter or model.follows is not None:
        return
    label = program.label(weights.phase)
    earlier_models = models_of(program.phases[weights.phase - 1].graph)
    earlier = next(each.adapter for each in earlier_models if each.name == weights.model)
    base_weights = program.begins[weights.phase - 1].get(weights.model)
    if not _goes_on(earlier, model.adapter):
        problem = f"expected adapter={earlier}, as in {label}, since it goes on"
        problem += f", found {model.adapter or 'none'}"
        fix = f"adapter={earlier}, or another name for this Model"
    elif base_weights is not None and not base_weights.is_adapter:
        trainer = program.label(base_weights.phase)
        problem = f"its adapter of {label} is beside weights that {trainer} trained, and this phase"
        problem += " would begin with those of its base"
        fix = f"a run of its own, whose base is what {trainer} left"
    else:
        return
    yield Fault(
        rule="program",
        where=f"{program.label(number)}, Model {model.name!r}",
        problem=problem,
        fix=fix,
        origin=_line(program, number, model),
    )


def _goes_on(earlier: Adapter, now: Adapter) -> bool:
    """Whether a phase's adapter is that of an earlier phase, wherever that began."""
    if earlier is None or now is None:
        return False
    return replace(now, start=earlier.start) == earlier


def _check_optimizer(
    program: Program, number: int, name: str, trained_now: set[str], trained_before: set[str]
) -> Iterator[Fault]:
    if name in trained_now and name in trained_before:
        return
    why = "no phase before trains it" if name in trained_now else "this phase does not train it"
    problem = f"expected a Model that this phase and one before it train, found {name!r}: {why}"
    possible = sorted(trained_now & trained_before)
    if possible:
        near = nearest(name, possible) or possible[0]
        fix = f"optimizers=({near!r},)"
    else:
        fix = "leave optimizers= out"
    where, origin = f"{program.label(number)}, optimizers", program.phases[number - 1].origin
    yield Fault(rule="program", where=where, problem=problem, fix=fix, origin=origin)


def program_warnings(program: Program) -> Iterator[GraphWarning]:
    """Models that nobody trains, at a base from which an earlier phase trained one."""
    # (base, head) -> the last phase that trained a Model from it, and that Model.
    trained_from: dict[tuple[str, str], tuple[int, Model]] = {}
    for number, phase in enumerate(program.phases, start=1):
        changing, begins = find_trained_models(phase.graph), program.begins[number - 1]
        read = _read_states(program, number)
        for model in models_of(phase.graph):
            trained = trained_from.get((model.base, model.head))
            stays_as_it_is = model.name not in changing and model.copies is None
            is_at_base = model.name in read and model.name not in begins
            if trained and stays_as_it_is and is_at_base:
                yield _base_again(program, number, model, trained)
        written = _written_models(program, number)
        for model in models_of(phase.graph):
            if model.name in written:
                trained_from[model.base, model.head] = number, model


def _base_again(
    program: Program, number: int, model: Model, trained: tuple[int, Model]
) -> GraphWarning:
    earlier, trained_model = trained
    name = trained_model.name
    problem = (
        f"it is at the base {model.base!r}, from which {program.label(earlier)} trained"
        f" {name!r}: a divergence from it counts what was learnt there, too"
    )
    fix = f"Model({name!r}, base), which has the trained weights"
    namesakes = (m for m in models_of(program.phases[number - 1].graph) if m.name == name)
    present_model = next(namesakes, None)
    if present_model is not None and present_model.trainable:
        fix = f"Model({model.name!r}, base, follows={name}, every=0), its copy as it begins"
    return GraphWarning(
        rule="base_again",
        where=f"{program.label(number)}, Model {model.name!r}",
        problem=problem,
        fix=fix,
        origin=_line(program, number, model),
    )


def _written_models(program: Program, number: int) -> set[str]:
    """Names of the States that nodes of a phase write; of a train node, its Model."""
    names: set[str] = set()
    for node in program.phases[number - 1].graph.nodes:
        written = (node.states[param] for param in node.operator.writes if param in node.states)
        names.update(state.name for state in written)
    return names


def _read_states(program: Program, number: int) -> set[str]:
    """Names of what a phase computes with; what only a port of weight 0 reads counts for none."""
    graph = program.phases[number - 1].graph
    live = live_nodes(graph)
    names: set[str] = set()
    for node in graph.nodes:
        if id(node) in live:
            names.update(state.name for state in node.states.values())
    return names


def _line(program: Program, number: int, model: Model) -> Origin | None:
    return model.origin or program.phases[number - 1].origin
