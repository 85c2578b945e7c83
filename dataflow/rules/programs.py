"""Programs: what is wrong, or looks wrong, between the phases of one.

Owns: specs of Models that phases share, adapters and optimizers that go on, Models at a base that
was trained already. Does not own: the rules for each phase's graph (rules/__init__.py), who begins
with whose weights (dataflow/program.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import Fault, GraphWarning, Origin, nearest
from dataflow.model import Model
from dataflow.program import Program, models_of
from dataflow.regions import find_trained_models
from dataflow.rules.unused_settings import live_nodes
from dataflow.side_module import Side

SPEC = ("base", "head", "dtype")
"""The fields of a Model that say which weights fit it; the others say what a phase does with it."""


def program_faults(program: Program) -> Iterator[Fault]:
    """Models of one name that cannot share weights; optimizers that cannot go on."""
    first_uses: dict[str, tuple[int, Model]] = {}
    trained_before: set[str] = set()
    last_trained: dict[str, tuple[int, Model]] = {}
    for number, phase in enumerate(program.phases, start=1):
        trained_now = _written_models(program, number)
        for model in models_of(phase.graph):
            first_use = first_uses.setdefault(model.name, (number, model))
            yield from _check_spec(program, first_use, number, model)
            if model.name in last_trained:
                yield from _check_adapter(program, last_trained[model.name], number, model)
            if model.name in trained_now:
                last_trained[model.name] = number, model
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


def _check_adapter(
    program: Program, earlier: tuple[int, Model], number: int, model: Model
) -> Iterator[Fault]:
    """An adapter that goes on is the one that was trained; without one a Model begins merged, and
    has another optimizer.
    """
    trained_number, trained = earlier
    where = f"{program.label(number)}, Model {model.name!r}"
    origin = _line(program, number, model)
    if trained.adapter is None:
        return
    if model.adapter == trained.adapter:
        yield from _check_beside(program, trained_number, number, model)
        return
    instead = "no adapter=, and it begins with that one merged"
    if isinstance(trained.adapter, Side):
        instead = "another name for this Model"
    if model.adapter is not None:
        expected = f"expected {trained.adapter}, which {program.label(trained_number)} trained"
        yield Fault(
            rule="program",
            where=where,
            problem=f"{expected}, since its weights go on, found {model.adapter}",
            fix=f"adapter={trained.adapter}, or {instead}",
            origin=origin,
        )
    elif isinstance(trained.adapter, Side):
        yield Fault(
            rule="program",
            where=where,
            problem=f"it would begin with {trained.adapter} merged, and a side module is no part of"
            " its base's matrices",
            fix=f"adapter={trained.adapter}, or {instead}",
            origin=origin,
        )
    elif model.name in program.phases[number - 1].optimizers:
        yield Fault(
            rule="program",
            where=where,
            problem="it begins with its adapter merged, of whose matrices an optimizer cannot go on"
            " with whole weights",
            fix="leave it out of optimizers=, or the same adapter=",
            origin=origin,
        )


def _check_beside(
    program: Program, trained_number: int, number: int, model: Model
) -> Iterator[Fault]:
    """An adapter that goes on, and was beside weights that a phase before it had trained."""
    beside = program.begins[trained_number - 1].get(model.name)
    if beside is None or beside.is_adapter:
        return
    trainer = program.label(beside.phase)
    problem = (
        f"its adapter of {program.label(trained_number)} is beside weights that {trainer} trained,"
        " and this phase would begin with those of its base"
    )
    yield Fault(
        rule="program",
        where=f"{program.label(number)}, Model {model.name!r}",
        problem=problem,
        fix=f"a run of its own, whose base is what {trainer} left",
        origin=_line(program, number, model),
    )


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
