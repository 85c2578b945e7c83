"""What a run measured, beside what its plan had predicted, with the error of each prediction.

Owns: the numbers that can be shown beside a plan's, and their tables. Does not own: reading them
from a run folder (engine/keep/run_measurements.py), the predictions (engine/plan/cost).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dataflow.model import Model
from dataflow.shown import shown_bytes
from engine.plan.cost.memory import HOST_PARTS, WIDTHS, lasting, peak
from engine.plan.explain.layout import Line, duration, named, side_by_side, widest, wrapped
from engine.plan.explain.memory import unknown
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


def error(predicted: float | None, found: float | None) -> str:
    """Of a prediction, relative to what was measured: `+40 %`, `-73 %`, and `338 x` for so many
    times as much; `-` where one is unknown, or nothing was measured.
    """
    if predicted is None or not found:
        return "-"
    if predicted >= 10 * found:
        return f"{predicted / found:,.0f} x"
    return f"{predicted / found - 1:+.0%}".replace("%", " %")


def compared(plan: Plan, found: MeasuredRun) -> Iterator[Line]:
    """Tables of nodes, Workers, edges and weight edges."""
    if not found.steps:
        yield "nothing: the run has no Step of this graph"
        return
    yield from _seconds(plan, found)
    if not found.flows:
        text = "bytes and memory: the run kept none, as it has no events/"
        yield from wrapped(text, after=2)
        return
    yield from _memory(plan, found)
    yield from _edges(plan, found)
    yield from _weights(plan, found)


def _table(title: str, rows: Sequence[tuple[str, Sequence[str]]]) -> Iterator[Line]:
    """A title over names, and what stands beside each."""
    if not rows:
        return
    width = widest((title, *(name for name, _ in rows)), 30)
    yield from named(title, width, side_by_side(_HEADS, _WIDTHS))
    for name, cells in rows:
        yield from named(name, width, side_by_side(cells, _WIDTHS))


def _seconds(plan: Plan, found: MeasuredRun) -> Iterator[Line]:
    rows = []
    for node in plan.nodes:
        took, predicted = found.seconds.get(node.name), node.estimate.seconds
        rows.append((node.name, [duration(predicted), duration(took), error(predicted, took)]))
    return _table("seconds a Step", rows)


def _memory(plan: Plan, found: MeasuredRun) -> Iterator[Line]:
    rows, on = [], nodes_by_worker(plan.nodes)
    for worker in (w for w in plan.workers if w in found.peaks):
        predicted = _resident(plan, worker, on[worker])
        took = found.peaks[worker]
        if worker not in plan.processes:
            took = found.grown.get(worker, took)
        rows.append((worker, _bytes(predicted, took)))
    for node in plan.nodes:
        for worker in node.workers:
            if took := found.device_peaks.get(f"{node.name}@{worker}"):
                predicted = _on_device(plan, node, worker, on[worker])
                rows.append((f"{node.name}@{worker}, GPU", _bytes(predicted, took)))
    yield from _table("memory at most", rows)
    if rows and plan.processes:
        yield from wrapped("a Worker's is that of its whole process", after=2)
    elif rows and all(worker in found.grown for worker in found.peaks):
        text = "a Worker's is what its process has grown by since its kernels were opened"
        yield from wrapped(text, after=2)
    elif rows:
        text = (
            "a Worker's is that of its process; its libraries, 0.5 GB with torch, are not predicted"
        )
        yield from wrapped(text, after=2)


def _on_gpu(plan: Plan, worker: str) -> bool:
    return bool(plan.cluster and plan.cluster.on(plan.host_of(worker)).gpus)


def _resident(plan: Plan, worker: str, nodes: Sequence[PlannedNode]) -> int | None:
    """The most that its nodes need of the host's memory; None if a Model's size is unknown."""
    if _on_gpu(plan, worker):
        return sum(n.estimate.bytes.get(part, 0) for n in nodes for part in HOST_PARTS)
    return None if unknown(plan, nodes) else worker_peak(plan, worker, nodes)


def _on_device(
    plan: Plan, node: PlannedNode, worker: str, nodes: Sequence[PlannedNode]
) -> int | None:
    """The most there is on each GPU of a Worker while one of its nodes computes: what others hold
    there, too.
    """
    if unknown(plan, nodes):
        return None
    devices = len(plan.devices.get(worker, (0,)))
    parts = [replace(n, estimate=n.estimate.on_each(devices)) for n in nodes]
    held = sum(lasting(n.estimate.bytes, without=HOST_PARTS) for n in parts if n.name != node.name)
    own = [n.estimate.bytes for n in parts if n.name == node.name]
    return held + peak(own, without=HOST_PARTS)


def _bytes(predicted: float | None, found: float | None) -> list[str]:
    shown = ["-" if size is None else shown_bytes(round(size)) for size in (predicted, found)]
    return [*shown, error(predicted, found)]


def _edges(plan: Plan, found: MeasuredRun) -> Iterator[Line]:
    outside = {n.name for n in plan.nodes if n.region == "evaluation"}
    rows = []
    for edge in (e for e in plan.edges if e.consumer not in outside):
        moved = found.edges.get(f"{edge.producer}->{edge.consumer}")
        rows.append((f"{edge.producer} -> {edge.consumer}", _bytes(edge.bytes, moved)))
    return _table("bytes a Step", rows)


def _weights(plan: Plan, found: MeasuredRun) -> Iterator[Line]:
    rows = []
    for model in plan.models:
        for reader in model.readers:
            for worker in plan.node(reader).workers:
                one = found.weights.get(f"{model.name}->{reader}@{worker}")
                if one is not None:
                    cells = _bytes(_version_bytes(plan, model, reader, worker), one.bytes)
                    place = f"{model.name} -> {reader}@{worker}"
                    rows.append((place, [*cells, f"in {duration(one.seconds)}"]))
    return _table("bytes a version", rows)


def _version_bytes(plan: Plan, model: PlannedModel, reader: str, worker: str) -> float | None:
    """What a version has to bring to a reader: nothing where it is in the writer's Worker."""
    leader = next((m for m in plan.models if m.name == model.follows), model)
    writers = plan.node(leader.writer).workers if leader.writer else ()
    if reader in model.aliases or writers == (worker,):
        return 0.0
    if model.parameters is None:
        return None
    states = plan.program.states if plan.program is not None else ()
    dtype = next((s.dtype for s in states if isinstance(s, Model) and s.name == model.name), "")
    return float(model.parameters * WIDTHS.get(dtype, WIDTHS["float32"]))
