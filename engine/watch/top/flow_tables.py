"""The tables of `dataflow top` below that of nodes: edges, weights, the cut and Workers.

Owns: their columns and cells. Does not own: the other sections (page.py), widths (table.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from dataflow.safe_text import one_line, shown_bytes
from engine.keep.flow.records import CutFlow, EdgeFlow, Flow, WeightFlow, WorkerFlow
from engine.plan.cost.memory import HOST_PARTS, peak
from engine.plan.explain.layout import duration
from engine.watch.top.table import TableColumn, table_lines
from engine.watch.waits import LONG


def edge_table(plan: Mapping[str, Any], flow: Flow, width: int) -> Iterator[Text]:
    """What waits on each data edge, and what it carries."""
    seconds = flow.end - flow.start
    route_by_edge: dict[str, str] = {}
    for planned_edge in plan.get("edges", ()):
        key = f"{planned_edge['producer']}->{planned_edge['consumer']}"
        route_by_edge[key] = planned_edge["route"]
    edges: list[EdgeFlow] = list(flow.edges.values())
    names = [_edge_name(key) for key in flow.edges]
    queues = [_queue(edge) for edge in edges]
    ages = [_age(edge) for edge in edges]
    rates = [_per_second(edge, seconds) for edge in edges]
    routes = [route_by_edge.get(key, "") for key in flow.edges]
    name_column = TableColumn(title="", cells=names)
    waiting_column = TableColumn(title="waiting", cells=queues)
    age_column = TableColumn(title="age", cells=ages, rank=2)
    bytes_column = TableColumn(title="bytes/s", cells=rates, rank=1)
    route_column = TableColumn(title="route", cells=routes, right=False, rank=3)
    columns = [name_column, waiting_column, age_column, bytes_column, route_column]
    return table_lines(columns, width)


def _edge_name(key: str) -> str:
    return one_line(key.replace("->", " -> "))


def _queue(edge: EdgeFlow) -> str:
    if not edge.waiting_rows:
        return "-"
    rows = "1 row" if edge.waiting_rows == 1 else f"{edge.waiting_rows:,} rows"
    if edge.waiting_bytes:
        return f"{rows}, {shown_bytes(edge.waiting_bytes)}"
    return rows


def _age(edge: EdgeFlow) -> str:
    if edge.waiting_rows:
        return duration(edge.age)
    return ""


def _per_second(edge: EdgeFlow, seconds: float) -> str:
    if edge.bytes and seconds > 0:
        return shown_bytes(round(edge.bytes / seconds))
    return "-"


def weight_table(flow: Flow, width: int) -> Iterator[Text]:
    """The versions that readers have, and what a load takes."""
    weights: list[WeightFlow] = list(flow.weights.values())
    names = [_edge_name(key) for key in flow.weights]
    offered = [str(reader.offered) for reader in weights]
    loaded = [str(reader.loaded) for reader in weights]
    lags = [str(max(0, reader.offered - reader.loaded)) for reader in weights]
    loads = [_mean_load(reader) for reader in weights]
    sizes = [_mean_size(reader) for reader in weights]
    name_column = TableColumn(title="", cells=names)
    offered_column = TableColumn(title="offered", cells=offered, rank=1)
    loaded_column = TableColumn(title="loaded", cells=loaded)
    lag_column = TableColumn(title="lag", cells=lags)
    load_column = TableColumn(title="a load", cells=loads, rank=2)
    bytes_column = TableColumn(title="bytes", cells=sizes, rank=3)
    columns = [name_column, offered_column, loaded_column, lag_column, load_column, bytes_column]
    return table_lines(columns, width)


def _mean_load(weights: WeightFlow) -> str:
    if weights.loads:
        return duration(weights.seconds / weights.loads)
    return "-"


def _mean_size(weights: WeightFlow) -> str:
    if weights.loads:
        return shown_bytes(weights.bytes // weights.loads)
    return "-"


def cut_table(flow: Flow, width: int) -> Iterator[Text]:
    """How much of the next Step each source has."""
    cuts: list[CutFlow] = list(flow.cuts.values())
    sources = [one_line(source) for source in flow.cuts]
    ready = [f"{cut.ready}/{cut.wanted}" for cut in cuts]
    outstanding = [f"{cut.outstanding}/{cut.room}" for cut in cuts]
    lags = [_lags(cut) for cut in cuts]
    name_column = TableColumn(title="", cells=sources)
    ready_column = TableColumn(title="ready", cells=ready)
    outstanding_column = TableColumn(title="out", cells=outstanding, rank=1)
    lag_column = TableColumn(title="rows by lag", cells=lags, right=False, rank=2)
    columns = [name_column, ready_column, outstanding_column, lag_column]
    return table_lines(columns, width)


def _lags(cut: CutFlow) -> str:
    """`0: 56, 1: 8`."""
    parts = [f"{lag}: {rows:,}" for lag, rows in enumerate(cut.lags) if rows]
    return ", ".join(parts)


def worker_table(plan: Mapping[str, Any], flow: Flow, width: int) -> Iterator[Text]:
    """The memory of each Worker, and what it does."""
    workers = list(flow.workers.values())
    names = [one_line(name) for name in flow.workers]
    memory = [shown_bytes(worker.memory) for worker in workers]
    peaks = [shown_bytes(worker.peak) for worker in workers]
    outboxes = [shown_bytes(worker.outbox) for worker in workers]
    gpu_memory = [_some(worker.device) for worker in workers]
    gpu_peaks = [_some(worker.device_peak) for worker in workers]
    host_plans: list[str] = []
    gpu_plans: list[str] = []
    for name, worker in flow.workers.items():
        host, device = _planned_memory(plan, name)
        host_plans.append(host)
        gpu_plans.append(device if worker.device_peak else "")
    doing = [_does(worker) for worker in workers]
    name_column = TableColumn(title="", cells=names)
    memory_column = TableColumn(title="memory", cells=memory)
    peak_column = TableColumn(title="peak", cells=peaks, rank=3)
    planned_column = TableColumn(title="planned", cells=host_plans, rank=2)
    outbox_column = TableColumn(title="outbox", cells=outboxes, rank=4)
    gpu_column = TableColumn(title="GPU", cells=gpu_memory, rank=1)
    gpu_peak_column = TableColumn(title="GPU peak", cells=gpu_peaks, rank=3)
    gpu_planned_column = TableColumn(title="GPU planned", cells=gpu_plans, rank=2)
    doing_column = TableColumn(title="does", cells=doing, right=False, rank=1)
    columns = [
        name_column,
        memory_column,
        peak_column,
        planned_column,
        outbox_column,
        gpu_column,
        gpu_peak_column,
        gpu_planned_column,
        doing_column,
    ]
    return table_lines(columns, width)


def _does(worker: WorkerFlow) -> str:
    """`score, 25 s`; the node alone where it has not computed for long. A node that waits for
    something outside of the run says so: `rollout, for environments`.
    """
    does = one_line(worker.doing) or "-"
    if worker.waits_for:
        does += f", for {one_line(worker.waits_for)}"
    if worker.doing_for < LONG:
        return does
    return f"{does}, {duration(worker.doing_for)}"


def _some(size: int) -> str:
    if size:
        return shown_bytes(size)
    return ""


def _planned_memory(plan: Mapping[str, Any], worker: str) -> tuple[str, str]:
    """The most that a Worker should need: of the host and of its GPU; of the host alone without."""
    parts = [n["estimate"]["bytes"] for n in plan.get("nodes", ()) if worker in n["workers"]]
    if not parts:
        return "", ""
    if plan.get("devices", {}).get(worker):
        held = 0
        for sizes in parts:
            held += sum(sizes.get(part, 0) for part in HOST_PARTS)
        return shown_bytes(held), shown_bytes(peak(parts, without=HOST_PARTS))
    return shown_bytes(peak(parts)), ""
