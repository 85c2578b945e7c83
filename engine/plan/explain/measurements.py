"""What a run measured, beside what its plan had predicted, with the error of each prediction.

Owns: the numbers that can stand beside a plan's, and their tables. Does not own: reading them
from a run folder (engine/keep/run_measurements.py), the predictions (engine/plan/cost).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dataflow.safe_text import shown_bytes
from engine.plan.cost.memory import HOST_PARTS, WIDTHS, lasting, peak
from engine.plan.explain.layout import Line, duration, name_line, side_by_side, widest, wrap_line
from engine.plan.explain.memory import host_bytes, unknown_models
from engine.plan.plan import Plan, PlannedModel, PlannedNode
from engine.plan.worker_index import nodes_by_worker
from engine.plan.worker_peaks import worker_peak

_WIDTHS = (10, 10, 10, 10)
_HEADS = ("predicted", "measured", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWeights:
    """A weight edge to one reader in one Worker. bytes, seconds: of one load."""

    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """What a run, or one phase of it, measured. steps: how many. seconds: by node, of a Step.

    The rest is empty without flows, in a run that kept no `events/`. peaks: by Worker, the most
    bytes resident. grown: the same less what was there before its kernels were opened.
    device_peaks: by `node@worker`, the most bytes on its GPU. edges: by `producer->consumer`, bytes
    of a Step. weights: by `model->reader@worker`.
    """

    steps: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    flows: bool = False
    peaks: Mapping[str, int] = field(default_factory=dict)
    grown: Mapping[str, int] = field(default_factory=dict)
    device_peaks: Mapping[str, int] = field(default_factory=dict)
    edges: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, MeasuredWeights] = field(default_factory=dict)


def error(predicted: float | None, measured: float | None) -> str:
    """The error of a prediction, relative to what was measured: `+40 %`, `-73 %`, and `338 x` for
    so many times as much; `-` where one is unknown, or nothing was measured.
    """
    if predicted is None or not measured:
        return "-"
    if predicted >= 10 * measured:
        return f"{predicted / measured:,.0f} x"
    return f"{predicted / measured - 1:+.0%}".replace("%", " %")


def compare_with_run(plan: Plan, run: MeasuredRun) -> Iterator[Line]:
    """Write tables of nodes, Workers, edges and weight edges: predicted, measured, error."""
    if not run.steps:
        yield "nothing: the run has no Step of this graph"
        return
    yield from _seconds(plan, run)
    if not run.flows:
        text = "bytes and memory: the run kept none, as it has no events/"
        yield from wrap_line(text, after=2)
        return
    yield from _memory(plan, run)
    yield from _edges(plan, run)
    yield from _weights(plan, run)


_Row = tuple[str, Sequence[str]]
"""A name, and the cells beside it."""


def _table(title: str, rows: Sequence[_Row]) -> Iterator[Line]:
    """Write a title over names, and what stands beside each; nothing without rows."""
    if not rows:
        return
    width = widest((title, *(name for name, _ in rows)), 30)
    yield from name_line(title, width, side_by_side(_HEADS, _WIDTHS))
    for name, cells in rows:
        yield from name_line(name, width, side_by_side(cells, _WIDTHS))


def _seconds(plan: Plan, run: MeasuredRun) -> Iterator[Line]:
    rows: list[_Row] = []
    for node in plan.nodes:
        predicted = node.estimate.seconds
        measured = run.seconds.get(node.name)
        cells = [duration(predicted), duration(measured), error(predicted, measured)]
        rows.append((node.name, cells))
    return _table("seconds a Step", rows)


def _memory(plan: Plan, run: MeasuredRun) -> Iterator[Line]:
    rows = [*_worker_rows(plan, run), *_device_rows(plan, run)]
    yield from _table("memory at most", rows)
    if rows:
        yield from wrap_line(_memory_note(plan, run), after=2)


def _worker_rows(plan: Plan, run: MeasuredRun) -> Iterator[_Row]:
    """Host memory of each Worker: of its process where the plan has that, else of its nodes."""
    nodes_of = nodes_by_worker(plan.nodes)
    for worker in plan.workers:
        if worker in run.peaks:
            measured = run.peaks[worker]
            if worker not in plan.processes:
                measured = run.grown.get(worker, measured)
            predicted = _resident(plan, worker, nodes_of[worker])
            yield worker, _byte_cells(predicted, measured)


def _device_rows(plan: Plan, run: MeasuredRun) -> Iterator[_Row]:
    """Memory of each node's GPUs, where the run measured any."""
    nodes_of = nodes_by_worker(plan.nodes)
    for node in plan.nodes:
        for worker in node.workers:
            place = f"{node.name}@{worker}"
            measured = run.device_peaks.get(place)
            if measured:
                predicted = _on_device(plan, node, worker, nodes_of[worker])
                yield f"{place}, GPU", _byte_cells(predicted, measured)


def _memory_note(plan: Plan, run: MeasuredRun) -> str:
    """What of a Worker's process the figures are about."""
    if plan.processes:
        return "a Worker's is that of its whole process"
    if all(worker in run.grown for worker in run.peaks):
        return "a Worker's is what its process has grown by since its kernels were opened"
    libraries = "its libraries, 0.5 GB with torch, are not predicted"
    return f"a Worker's is that of its process; {libraries}"


def _is_on_gpu(plan: Plan, worker: str) -> bool:
    return bool(plan.cluster and plan.cluster.on(plan.host_of(worker)).gpus)


def _resident(plan: Plan, worker: str, nodes: Sequence[PlannedNode]) -> int | None:
    """The most that its nodes need of the host's memory; None if a Model's size is unknown."""
    if _is_on_gpu(plan, worker):
        return host_bytes(nodes)
    return None if unknown_models(plan, nodes) else worker_peak(plan, worker, nodes)


def _on_device(
    plan: Plan, node: PlannedNode, worker: str, nodes: Sequence[PlannedNode]
) -> int | None:
    """The most there is on each GPU of a Worker while one of its nodes computes: what others hold
    there, too.
    """
    if unknown_models(plan, nodes):
        return None
    devices = len(plan.devices.get(worker, (0,)))
    total = 0
    for other in nodes:
        parts = other.estimate.on_each(devices).bytes
        if other.name == node.name:
            total += peak([parts], without=HOST_PARTS)
        else:
            total += lasting(parts, without=HOST_PARTS)
    return total


def _byte_cells(predicted: float | None, measured: float | None) -> list[str]:
    return [_size(predicted), _size(measured), error(predicted, measured)]


def _size(size: float | None) -> str:
    return "-" if size is None else shown_bytes(round(size))


def _edges(plan: Plan, run: MeasuredRun) -> Iterator[Line]:
    evaluated = {node.name for node in plan.nodes if node.region == "evaluation"}
    rows: list[_Row] = []
    for edge in plan.edges:
        if edge.consumer not in evaluated:
            measured = run.edges.get(f"{edge.producer}->{edge.consumer}")
            name = f"{edge.producer} -> {edge.consumer}"
            rows.append((name, _byte_cells(edge.bytes, measured)))
    return _table("bytes a Step", rows)


def _weights(plan: Plan, run: MeasuredRun) -> Iterator[Line]:
    rows: list[_Row] = []
    for model in plan.states:
        for reader in model.readers:
            for worker in plan.node(reader).workers:
                load = run.weights.get(f"{model.name}->{reader}@{worker}")
                if load is not None:
                    predicted = _version_bytes(plan, model, reader, worker)
                    cells = _byte_cells(predicted, load.bytes)
                    cells.append(f"in {duration(load.seconds)}")
                    rows.append((f"{model.name} -> {reader}@{worker}", cells))
    return _table("bytes a version", rows)


def _version_bytes(plan: Plan, model: PlannedModel, reader: str, worker: str) -> float | None:
    """Bytes that a version has to bring to a reader: none where it is in the writer's Worker; None
    if they are unknown.
    """
    leader = next((m for m in plan.models if m.name == model.follows), model)
    writers = plan.node(leader.writer).workers if leader.writer else ()
    if reader in model.aliases or writers == (worker,):
        return 0.0
    if model.version_parameters is None:
        return None
    return float(model.version_parameters * WIDTHS[model.dtype or "float32"])
