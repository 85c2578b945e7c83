"""Edges of an explained plan: which columns move, and how weights get to their readers.

Owns: lines for each edge, each Model and each Table. Does not own: routes, which passes/estimate.py
and passes/modules.py decide.
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.model import Model
from dataflow.safe_text import shown_bytes
from dataflow.side_module import Side
from engine.plan.alike_workers import name_alike
from engine.plan.base_sharing import count_sharers, name_beginnings
from engine.plan.cost.memory import WIDTHS
from engine.plan.cost.training_memory import OFFLOADED_PART
from engine.plan.explain.layout import (
    Line,
    count,
    duration,
    name_line,
    side_by_side,
    widest,
    wrap_line,
)
from engine.plan.explain.planned_graph import planned_model
from engine.plan.plan import Plan, PlannedModel, PlannedNode
from engine.plan.planned_parts import PlannedEdge

_WIDTHS = (10, 10, 7, len("inproc"))


def edge_lines(plan: Plan) -> Iterator[Line]:
    """What moves along each edge in a Step, and what stays."""
    if not plan.edges:
        return
    names = [f"{edge.producer} -> {edge.consumer}" for edge in plan.edges]
    width = widest(names, 44)
    heads = ["", "moved", "saved", "seconds", "route", "columns"]
    yield side_by_side(heads, [width, *_WIDTHS, len("columns")])
    evaluated = {node.name for node in plan.nodes if node.region == "evaluation"}
    # Padded to all columns, since `side_by_side` strips, and columns' names follow.
    cells_width = sum(_WIDTHS) + 2 * (len(_WIDTHS) - 1)
    for name, edge in zip(names, plan.edges, strict=True):
        cells = ["evaluation", "", ""] if edge.consumer in evaluated else _format_traffic(edge)
        text = side_by_side([*cells, edge.route], _WIDTHS).ljust(cells_width)
        yield from name_line(name, width, text, tail=", ".join(edge.columns))
    moved = sum(edge.bytes for edge in plan.edges)
    saved = sum(edge.saved for edge in plan.edges)
    yield side_by_side(["all", shown_bytes(moved), shown_bytes(saved)], [width, *_WIDTHS[:2]])


def _format_traffic(edge: PlannedEdge) -> list[str]:
    """Format bytes and seconds; no seconds in a Worker, where values are passed as they are."""
    seconds = duration(edge.seconds) if edge.seconds else "-"
    return [shown_bytes(edge.bytes), shown_bytes(edge.saved), seconds]


def weight_lines(plan: Plan) -> Iterator[Line]:
    """Each Model and Table, and how its versions get from the writer to each reader."""
    width = widest(m.name for m in plan.states)
    sharers = _count_sharers(plan)
    for model in plan.states:
        yield from name_line(model.name, width, _describe_state(model), tail="")
        parts = _list_parts(plan, model, sharers.get(model.name, 0))
        yield from wrap_line(", ".join(parts), indent=width + 2, after=2)
        for line in _versions(plan, model):
            yield from wrap_line(line, indent=width + 2, after=2)


def _describe_state(model: PlannedModel) -> str:
    if not model.base:
        return "a Table, 24 bytes for each row of the data that was visited"
    size = "parameters unknown"
    if model.parameters is not None:
        size = count(model.parameters, "parameter")
    dtype = model.dtype or "the dtype of its base"
    return f"{size} in {dtype}, from {model.base}"


def _count_sharers(plan: Plan) -> dict[str, int]:
    """Count the Models that have each Model's base together."""
    models: dict[str, Model] = {}
    for planned in plan.models:
        model = planned_model(plan, planned.name)
        if model is not None:
            models[model.name] = model
    return count_sharers(plan.nodes, name_beginnings(models, plan.phase))


def _list_parts(plan: Plan, planned: PlannedModel, sharers: int) -> Iterator[str]:
    """`base 14.2 GB shared by 2`, `adapter 84 MB`, `optimizer 0.3 GB`: of a Model with a part of
    its own, or one whose base others have too.
    """
    model = planned_model(plan, planned.name)
    if model is None or planned.parameters is None:
        return
    width = WIDTHS[planned.dtype or "float32"]
    base = f"base {shown_bytes(planned.parameters * width)}"
    if sharers > 1:
        yield f"{base} shared by {sharers}"
    elif planned.trained_parameters is not None:
        yield base
    if isinstance(model.adapter, Side):
        # What the user's function makes, no plan calls.
        yield "side module not counted"
    elif planned.trained_parameters is not None:
        yield f"{planned.part} {shown_bytes(planned.trained_parameters * width)}"
    if planned.trained_parameters is not None:
        yield from _list_optimizers(plan, planned)


def _list_optimizers(plan: Plan, planned: PlannedModel) -> Iterator[str]:
    if planned.writer:
        parts = plan.node(planned.writer).estimate.bytes
        size = parts.get("optimizer", 0) + parts.get(OFFLOADED_PART, 0)
        yield f"optimizer {shown_bytes(size)}"


_ROUTES = {
    "pull": "pulled from",
    "collective": "sent by collectives from",
    "ipc": "read by IPC from the memory of",
}


def _versions(plan: Plan, model: PlannedModel) -> Iterator[str]:
    if model.follows:
        distance = f"{model.rate:g} of the way to it"
        if model.rate == 1.0:
            distance = "a copy of it"
        yield f"follows {model.follows}: {distance}, every {count(model.every, 'Step')}"
    if not model.writer:
        if model.readers:
            yield f"{_frozen(plan, model)}read by {', '.join(model.readers)}"
    elif model.readers:
        for reader in model.readers:
            yield _weight_edge(plan, model, plan.node(reader), plan.node(model.writer))
    else:
        followers = [each.name for each in plan.models if each.follows == model.name]
        readers = "read by nobody"
        if followers:
            readers = f"followed by {', '.join(followers)}"
        yield f"written by {model.writer}, {readers}"


def _frozen(plan: Plan, model: PlannedModel) -> str:
    """What stays as it is: a Model that nobody trains, or the copy of one as it begins."""
    if model.follows:
        return ""
    state = planned_model(plan, model.name)
    if state is not None and state.copies:
        return f"frozen copy of {state.copies.name} as it begins, "
    return "frozen, "


def _weight_edge(plan: Plan, model: PlannedModel, reader: PlannedNode, writer: PlannedNode) -> str:
    """`train -> rollout: copy in gen, pulled from train; lag 1; 2.1 s a version`."""
    text = f"{writer.name} -> {reader.name}: {_describe_carrying(model, reader, writer)}"
    hosts = {plan.host_of(worker) for worker in (*reader.workers, *writer.workers)}
    if model.route == "pull" and len(hosts) > 1:
        text = f"{text} by zmq"
    lag = reader.max_lag if reader.region == "stream" else 0
    text = f"{text}; lag {lag}"
    if model.seconds is not None and set(reader.workers) - {writer.workers[0]}:
        text = f"{text}; {duration(model.seconds)} a version"
    return text


def _describe_carrying(model: PlannedModel, reader: PlannedNode, writer: PlannedNode) -> str:
    """Describe how a version reaches a reader: not at all, in a process, or between two."""
    if reader.name in model.aliases:
        return "alias, they take turns with one module"
    if set(reader.workers) <= {writer.workers[0]}:
        return "copy"
    return f"copy in {name_alike(reader.workers)}, {_ROUTES[model.route]} {writer.workers[0]}"
