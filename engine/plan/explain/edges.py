"""Edges of an explained plan: which columns move, and how weights get to their readers.

Owns: lines for each edge and each Model. Does not own: routes, which passes/estimate.py
and passes/modules.py decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dataflow.model import Model
from dataflow.shown import shown_bytes
from engine.plan.explain.layout import Line, count, duration, named, side_by_side, widest, wrapped
from engine.plan.plan import Plan, PlannedEdge, PlannedModel, PlannedNode


def edges(plan: Plan) -> Iterator[Line]:
    """What moves along each edge in a Step, and what stays."""
    if not plan.edges:
        return
    shown = [f"{e.producer} -> {e.consumer}" for e in plan.edges]
    width, evaluated = widest(shown, 44), {n.name for n in plan.nodes if n.region == "evaluation"}
    widths = [10, 10, 7, len("inproc")]
    yield side_by_side(["", "moved", "saved", "seconds", "route", "columns"], [width, *widths, 7])
    for name, edge in zip(shown, plan.edges, strict=True):
        moved = [shown_bytes(edge.bytes), shown_bytes(edge.saved), _seconds(edge)]
        moved = ["evaluation", "", ""] if edge.consumer in evaluated else moved
        first = side_by_side([*moved, edge.route], widths)
        first = first.ljust(sum(widths) + 2 * (len(widths) - 1))
        yield from named(name, width, first, tail=", ".join(edge.columns))
    moved, saved = sum(e.bytes for e in plan.edges), sum(e.saved for e in plan.edges)
    yield side_by_side(["all", shown_bytes(moved), shown_bytes(saved)], [width, 10, 10])


def _seconds(edge: PlannedEdge) -> str:
    """Nothing within a Worker, where values are passed as they are."""
    return duration(edge.seconds) if edge.seconds else "-"


def weights(plan: Plan) -> Iterator[Line]:
    """Each Model, and how its versions get from the writer to each reader."""
    width = widest(m.name for m in plan.models)
    for model in plan.models:
        size = "parameters unknown"
        if model.parameters is not None:
            size = count(model.parameters, "parameter")
        yield from named(model.name, width, f"{size}, from {model.base}", tail="")
        for line in _versions(plan, model):
            yield from wrapped(line, indent=width + 2, after=2)


_ROUTES = {"pull": "pulled from", "collective": "sent by collectives from"}


def _versions(plan: Plan, model: PlannedModel) -> Iterator[str]:
    if model.follows:
        way = "a copy of it" if model.rate == 1.0 else f"{model.rate:g} of the way to it"
        yield f"follows {model.follows}: {way}, every {count(model.every, 'Step')}"
    if not model.writer:
        if model.readers:
            yield f"{_frozen(plan, model)}read by {', '.join(model.readers)}"
    elif model.readers:
        writer = plan.node(model.writer)
        yield from (_way(plan, model, plan.node(r), writer) for r in model.readers)
    else:
        followers = [m.name for m in plan.models if m.follows == model.name]
        yield f"written by {model.writer}, {_followed(followers)}"


def _frozen(plan: Plan, model: PlannedModel) -> str:
    """What stays as it is: a Model that nobody trains, or the copy of one as it begins."""
    if model.follows:
        return ""
    states = plan.program.states if plan.program is not None else ()
    leader = next((s.copies for s in states if isinstance(s, Model) and s.name == model.name), None)
    return f"frozen copy of {leader.name} as it begins, " if leader else "frozen, "


def _followed(followers: Sequence[str]) -> str:
    return f"followed by {', '.join(followers)}" if followers else "read by nobody"


def _way(plan: Plan, model: PlannedModel, reader: PlannedNode, writer: PlannedNode) -> str:
    lag = reader.max_lag if reader.region == "stream" else 0
    hosts = {plan.host_of(w) for w in (*reader.workers, *writer.workers)}
    far = model.route == "pull" and len(hosts) > 1
    carried = f"{_carried(model, reader, writer)}{' by zmq' if far else ''}"
    moves = model.seconds is not None and set(reader.workers) - {writer.workers[0]}
    took = f"; {duration(model.seconds)} a version" if moves else ""
    return f"{writer.name} -> {reader.name}: {carried}; lag {lag}{took}"


def _carried(model: PlannedModel, reader: PlannedNode, writer: PlannedNode) -> str:
    """How a version reaches a reader: not at all, within a process, or from one to another."""
    if reader.name in model.aliases:
        return "alias, they take turns with one module"
    if set(reader.workers) <= {writer.workers[0]}:
        return "copy"
    return f"copy in {_among(reader.workers)}, {_ROUTES[model.route]} {writer.workers[0]}"


def _among(workers: Sequence[str]) -> str:
    if len(workers) < 4:
        return ", ".join(workers)
    return f"{workers[0]} ... {workers[-1]} ({len(workers)})"
