"""The text of `dataflow top`: a run's head, who waits for whom, and its tables.

Owns: the sections, their order and words. Does not own: figures (engine/keep), widths
(table.py), which run is shown (engine/cli/top.py).

A node's time is a bar of letters, since colours alone tell nothing to many: `#` busy, `r` waiting
for rows, `w` for weights, `t` for its turn, `m` for room, `.` idle.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from dataflow.safe_text import one_line, shown_bytes, shown_number
from dataflow.width import packed
from engine.keep.flow.records import CutFlow, EdgeFlow, Flow, ReplicaFlow, WeightFlow, WorkerFlow
from engine.keep.metrics.metric_lines import finite
from engine.plan.cost.memory import HOST_PARTS, peak
from engine.plan.explain.layout import duration
from engine.session.figures import figures
from engine.watch.top.run_view import SeenRun
from engine.watch.top.table import TableColumn, shortened, table_lines
from engine.watch.waits import LONG

_STATES = (
    ("busy", "#", "green", "busy"),
    ("for_rows", "r", "yellow", "rows"),
    ("for_weights", "w", "magenta", "weights"),
    ("for_turn", "t", "cyan", "turn"),
    ("for_room", "m", "blue", "room"),
    ("idle", ".", "dim", "idle"),
)
"""Field of ReplicaFlow, letter, style, word."""
_SENTENCES = 3
_NO_WAIT = "Nothing waits for long."
"""As the page says it."""


def page_lines(seen: SeenRun, *, width: int, replicas: bool = False) -> Iterator[Text]:
    """Lines of at most `width` columns, from 60 on. replicas: each has a line of its own."""
    yield from _head(seen, width)
    if seen.flow is None:
        yield from _of_metrics(seen, width)
        return
    yield from _sentences(seen, width)
    for title, lines in (
        (f"nodes in {seen.stretch}", _nodes(seen, seen.flow, width, replicas)),
        ("edges", _edges(seen, seen.flow, width)),
        ("weights", _weights(seen.flow, width)),
        ("the next Step", _cuts(seen.flow, width)),
        ("workers", _workers(seen, seen.flow, width)),
    ):
        yield from _section(title, list(lines))


def _section(title: str, lines: Sequence[Text]) -> Iterator[Text]:
    if lines:
        yield Text()
        yield Text(title, style="bold")
        yield from lines


def _head(seen: SeenRun, width: int) -> Iterator[Text]:
    """The run, its state, its Step, and the figures of the last one."""
    run = seen.run
    if run.steps is not None:
        of = f"/{run.steps}"
    else:
        of = ""
    if run.phase:
        phase = [f"phase {run.phase}"]
    else:
        phase = []
    if seen.title:
        graph = [one_line(seen.title)]
    else:
        graph = []
    parts = [one_line(run.name), *graph, run.state, *phase, f"Step {run.step}{of}"]
    for number, line in enumerate(_packed(parts, width)):
        yield Text(line, style="" if number else "bold")
    if run.reason:
        for line in textwrap.wrap(one_line(run.reason), width, max_lines=2, placeholder=" ..."):
            yield Text(line)
    lag = any(source.get("max_lag") for source in seen.plan.get("sources", ()))
    row = {n: v for n, metric in seen.row.items() if (v := finite(metric)) is not None}
    shown = [f"{label} {text}" for label, text in figures(row, lag=lag)]
    yield from map(Text, _packed(shown, width))


def _packed(parts: Sequence[str], width: int) -> list[str]:
    """Lines of these parts side by side."""
    short = [shortened(part, width - 2) for part in parts]
    if short:
        return list(packed(short, width, indent="  "))
    return []


def _sentences(seen: SeenRun, width: int) -> Iterator[Text]:
    if not (seen.waits or seen.plan):  # nobody knows without a plan
        return
    yield Text()
    for number, sentence in enumerate(seen.waits[:_SENTENCES] or [_NO_WAIT]):
        for line in textwrap.wrap(one_line(sentence), width, subsequent_indent="  "):
            yield Text(line, style="" if number else "bold")


# --- nodes ----------------------------------------------------------------------------------------


def _nodes(seen: SeenRun, flow: Flow, width: int, replicas: bool) -> Iterator[Text]:
    seconds = flow.end - flow.start
    names, many = zip(*_rows_of(seen, flow, replicas), strict=True) if flow.nodes else ((), ())
    bar = max(8, min(24, width // 6))
    name_column = TableColumn(
        title="", cells=[_named(name, some) for name, some in zip(names, many, strict=True)]
    )
    time_column = TableColumn(title="time", cells=[_bar(some, bar) for some in many], right=False)
    busy_column = TableColumn(title="busy", cells=[_share(some, "busy") for some in many], rank=6)
    waits_column = TableColumn(
        title="waits", cells=[_wait(some) for some in many], right=False, rank=1
    )
    blame_column = TableColumn(
        title="for", cells=[_blamed(some) for some in many], right=False, rank=7
    )
    rows_column = TableColumn(
        title="rows/s", cells=[_rate(some, "rows", seconds) for some in many], rank=2
    )
    tokens_column = TableColumn(
        title="tok/s", cells=[_rate(some, "tokens", seconds) for some in many], rank=3
    )
    version_column = TableColumn(title="version", cells=[_versions(some) for some in many], rank=4)
    gpu_peak_column = TableColumn(title="GPU peak", cells=[_device(some) for some in many], rank=5)
    columns = [
        name_column,
        time_column,
        busy_column,
        waits_column,
        blame_column,
        rows_column,
        tokens_column,
        version_column,
        gpu_peak_column,
    ]
    yield from table_lines(columns, width)
    if flow.nodes:
        legend = [f"{letter} {word}" for _, letter, _, word in _STATES]
        yield from (Text(line, style="dim") for line in _packed(legend, width))


def _rows_of(seen: SeenRun, flow: Flow, replicas: bool) -> Iterator[tuple[str, list[ReplicaFlow]]]:
    """A name, and who counts for it: in the order of the plan."""
    by_node: dict[str, dict[str, ReplicaFlow]] = defaultdict(dict)
    for key, replica in flow.nodes.items():
        by_node[key.partition("@")[0]][key] = replica
    order = [node["name"] for node in seen.plan.get("nodes", ())]
    for node in sorted(by_node, key=lambda n: order.index(n) if n in order else len(order)):
        if replicas and len(by_node[node]) > 1:
            yield from ((key, [one]) for key, one in sorted(by_node[node].items()))
        else:
            yield node, list(by_node[node].values())


def _named(name: str, replicas: Sequence[ReplicaFlow]) -> str:
    if len(replicas) > 1:
        several = f" x{len(replicas)}"
    else:
        several = ""
    return f"{one_line(name)}{several}"


def _seconds(replicas: Sequence[ReplicaFlow], *states: str) -> float:
    seconds = 0.0
    for replica in replicas:
        for state in states:
            seconds += getattr(replica, state)
    return seconds


def _whole(replicas: Sequence[ReplicaFlow]) -> float:
    return _seconds(replicas, *(state for state, *_ in _STATES))


def _bar(replicas: Sequence[ReplicaFlow], width: int) -> Text:
    """Its time by letters; the shares are rounded so that they fill the bar."""
    whole, bar = _whole(replicas), Text()
    if whole <= 0:
        return bar
    before, shown = 0.0, 0
    for state, letter, style, _ in _STATES:
        before += _seconds(replicas, state) / whole * width
        bar.append(letter * (round(before) - shown), style=style)
        shown = round(before)
    return bar


def _share(replicas: Sequence[ReplicaFlow], state: str) -> str:
    whole = _whole(replicas)
    if whole > 0:
        return f"{_seconds(replicas, state) / whole:.0%}"
    return ""


def _wait(replicas: Sequence[ReplicaFlow]) -> str:
    """What it waits for longest."""
    waits = {word: _seconds(replicas, state) for state, _, _, word in _STATES[1:-1]}
    word = max(waits, key=lambda each: waits[each])
    whole = _whole(replicas)
    if whole <= 0 or waits[word] < 0.005 * whole:
        return ""
    return f"{word} {waits[word] / whole:.0%}"


def _blamed(replicas: Sequence[ReplicaFlow]) -> str:
    """Whom it waits for longest."""
    blames: dict[str, float] = defaultdict(float)
    for each in replicas:
        for name, seconds in each.blames.items():
            blames[name] += seconds
    if blames:
        return one_line(max(blames, key=lambda name: blames[name]))
    return ""


def _rate(replicas: Sequence[ReplicaFlow], what: str, seconds: float) -> str:
    count = _seconds(replicas, what)
    if count and seconds > 0:
        return shown_number(count / seconds)
    return ""


def _versions(replicas: Sequence[ReplicaFlow]) -> str:
    versions = sorted({each.version for each in replicas if each.version >= 0})
    if not versions:
        return ""
    oldest, newest = versions[0], versions[-1]
    if oldest == newest:
        return str(newest)
    return f"{oldest}-{newest}"


def _device(replicas: Sequence[ReplicaFlow]) -> str:
    most = max(each.device_peak for each in replicas)
    if most:
        return shown_bytes(most)
    return ""


def _of_metrics(seen: SeenRun, width: int) -> Iterator[Text]:
    """Of a run without events: what its last row says of nodes and Workers."""
    row = {n: v for n, metric in seen.row.items() if (v := finite(metric)) is not None}
    step = row.get("time/step", 0.0)
    nodes = [n for n in seen.plan.get("nodes", ()) if f"time/{n['name']}" in row]
    taken = [row[f"time/{node['name']}"] for node in nodes]
    shares: list[float] = []
    for node, seconds in zip(nodes, taken, strict=True):
        replicas = node.get("layout", {}).get("replicas", 1)
        share = min(1.0, seconds / step / replicas) if step else 0.0
        shares.append(share)
    busy = [ReplicaFlow(busy=share, idle=1.0 - share) for share in shares]
    name_column = TableColumn(title="", cells=[one_line(node["name"]) for node in nodes])
    bar = max(8, width // 6)
    time_column = TableColumn(title="time", cells=[_bar([each], bar) for each in busy], right=False)
    busy_column = TableColumn(title="busy", cells=[f"{share:.0%}" for share in shares])
    seconds_column = TableColumn(
        title="seconds", cells=[shown_number(seconds) for seconds in taken]
    )
    columns = [name_column, time_column, busy_column, seconds_column]
    lines = table_lines(columns, width)
    yield from _section(f"nodes in Step {seen.run.step}", list(lines))
    workers = {n.split("/")[1]: v for n, v in row.items() if n.startswith("worker/")}
    shown = [f"{one_line(name)} {share:.0%}" for name, share in workers.items()]
    yield from _section("workers, busy", [Text(line) for line in _packed(shown, width)])
    yield Text()
    notice = "waits, edges and memory: this run kept none, as it has no events/"
    yield from (Text(line, style="dim") for line in textwrap.wrap(notice, width))


# --- edges, weights, the cut, Workers -------------------------------------------------------------


def _edges(seen: SeenRun, flow: Flow, width: int) -> Iterator[Text]:
    seconds = flow.end - flow.start
    routes = {f"{e['producer']}->{e['consumer']}": e["route"] for e in seen.plan.get("edges", ())}
    edges: list[tuple[str, EdgeFlow]] = list(flow.edges.items())
    name_column = TableColumn(title="", cells=[_edge_name(key) for key, _ in edges])
    waiting_column = TableColumn(title="waiting", cells=[_queue(edge) for _, edge in edges])
    age_column = TableColumn(title="age", cells=[_age(edge) for _, edge in edges], rank=2)
    bytes_column = TableColumn(
        title="bytes/s", cells=[_per_second(edge, seconds) for _, edge in edges], rank=1
    )
    route_column = TableColumn(
        title="route", cells=[routes.get(key, "") for key, _ in edges], right=False, rank=3
    )
    columns = [name_column, waiting_column, age_column, bytes_column, route_column]
    return table_lines(columns, width)


def _edge_name(key: str) -> str:
    return one_line(key.replace("->", " -> "))


def _queue(edge: EdgeFlow) -> str:
    if not edge.waiting_rows:
        return "-"
    if edge.waiting_bytes:
        size = f", {shown_bytes(edge.waiting_bytes)}"
    else:
        size = ""
    return f"{edge.waiting_rows:,} row{'s' * (edge.waiting_rows != 1)}{size}"


def _age(edge: EdgeFlow) -> str:
    if edge.waiting_rows:
        return duration(edge.age)
    return ""


def _per_second(edge: EdgeFlow, seconds: float) -> str:
    if edge.bytes and seconds > 0:
        return shown_bytes(round(edge.bytes / seconds))
    return "-"


def _weights(flow: Flow, width: int) -> Iterator[Text]:
    weights: list[tuple[str, WeightFlow]] = list(flow.weights.items())
    name_column = TableColumn(title="", cells=[_edge_name(key) for key, _ in weights])
    offered_column = TableColumn(
        title="offered", cells=[str(w.offered) for _, w in weights], rank=1
    )
    loaded_column = TableColumn(title="loaded", cells=[str(w.loaded) for _, w in weights])
    lag_column = TableColumn(
        title="lag", cells=[str(max(0, w.offered - w.loaded)) for _, w in weights]
    )
    load_column = TableColumn(
        title="a load",
        cells=[duration(w.seconds / w.loads) if w.loads else "-" for _, w in weights],
        rank=2,
    )
    bytes_column = TableColumn(
        title="bytes",
        cells=[shown_bytes(w.bytes // w.loads) if w.loads else "-" for _, w in weights],
        rank=3,
    )
    columns = [name_column, offered_column, loaded_column, lag_column, load_column, bytes_column]
    return table_lines(columns, width)


def _cuts(flow: Flow, width: int) -> Iterator[Text]:
    cuts: list[tuple[str, CutFlow]] = list(flow.cuts.items())
    name_column = TableColumn(title="", cells=[one_line(source) for source, _ in cuts])
    ready_column = TableColumn(
        title="ready", cells=[f"{cut.ready}/{cut.wanted}" for _, cut in cuts]
    )
    outstanding_column = TableColumn(
        title="out", cells=[f"{cut.outstanding}/{cut.room}" for _, cut in cuts], rank=1
    )
    lag_column = TableColumn(
        title="rows by lag", cells=[_lags(cut) for _, cut in cuts], right=False, rank=2
    )
    columns = [name_column, ready_column, outstanding_column, lag_column]
    return table_lines(columns, width)


def _lags(cut: CutFlow) -> str:
    """`0: 56, 1: 8`."""
    return ", ".join(f"{lag}: {rows:,}" for lag, rows in enumerate(cut.lags) if rows)


def _workers(seen: SeenRun, flow: Flow, width: int) -> Iterator[Text]:
    workers = list(flow.workers.items())
    planned = [_planned(seen.plan, name) for name, _ in workers]
    name_column = TableColumn(title="", cells=[one_line(name) for name, _ in workers])
    memory_column = TableColumn(title="memory", cells=[shown_bytes(w.memory) for _, w in workers])
    peak_column = TableColumn(title="peak", cells=[shown_bytes(w.peak) for _, w in workers], rank=3)
    planned_column = TableColumn(title="planned", cells=[host for host, _ in planned], rank=2)
    outbox_column = TableColumn(
        title="outbox", cells=[shown_bytes(w.outbox) for _, w in workers], rank=4
    )
    gpu_column = TableColumn(title="GPU", cells=[_some(w.device) for _, w in workers], rank=1)
    gpu_peak_column = TableColumn(
        title="GPU peak", cells=[_some(w.device_peak) for _, w in workers], rank=3
    )
    gpu_planned_column = TableColumn(
        title="GPU planned",
        cells=[
            device if w.device_peak else ""
            for (_, device), (_, w) in zip(planned, workers, strict=True)
        ],
        rank=2,
    )
    doing_column = TableColumn(
        title="does",
        cells=[_does(w) for _, w in workers],
        right=False,
        rank=1,
    )
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
    """`score, 25 s`; the node alone where it has not computed for long."""
    if worker.doing_for < LONG:
        return one_line(worker.doing) or "-"
    return f"{one_line(worker.doing)}, {duration(worker.doing_for)}"


def _some(size: int) -> str:
    if size:
        return shown_bytes(size)
    return ""


def _planned(plan: Mapping[str, Any], worker: str) -> tuple[str, str]:
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
