"""The text of `dataflow top`: a run's head, who waits for whom, and its tables.

Owns: the sections, their order and words. Does not own: figures (engine/keep), the tables of edges,
weights, the cut and Workers (flow_tables.py), widths (table.py), which run is shown
(engine/cli/top.py).

A node's time is a bar of letters, since colours alone tell nothing to many: `#` busy, `r` waiting
for rows, `w` for weights, `t` for its turn, `m` for room, `o` for something outside of the run, as
environments, `.` idle.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.text import Text

from dataflow.safe_text import one_line, shown_bytes, shown_number
from dataflow.width import pack_parts
from engine.keep.flow.records import Flow, ReplicaFlow
from engine.keep.metrics.metric_lines import finite
from engine.session.figures import figures
from engine.watch.top.flow_tables import cut_table, edge_table, weight_table, worker_table
from engine.watch.top.part_tables import pool_table, stream_table
from engine.watch.top.run_view import SeenRun
from engine.watch.top.table import TableColumn, shorten_line, table_lines

_STATES = (
    ("busy", "#", "green", "busy"),
    ("for_rows", "r", "yellow", "rows"),
    ("for_weights", "w", "magenta", "weights"),
    ("for_turn", "t", "cyan", "turn"),
    ("for_room", "m", "blue", "room"),
    ("for_outside", "o", "bright_black", "outside"),
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
    yield from _section(f"nodes in {seen.stretch}", _nodes(seen, seen.flow, width, replicas))
    yield from _section("edges", edge_table(seen.plan, seen.flow, width))
    yield from _section("weights", weight_table(seen.flow, width))
    yield from _section("the next Step", cut_table(seen.flow, width))
    yield from _section("parts of a Step", stream_table(seen.flow, width))
    yield from _section("rows for slots", pool_table(seen.flow, width))
    yield from _section("workers", worker_table(seen.plan, seen.flow, width))


def _section(title: str, content: Iterable[Text]) -> Iterator[Text]:
    """A title and its lines; nothing without lines."""
    lines = list(content)
    if lines:
        yield Text()
        yield Text(title, style="bold")
        yield from lines


def _head(seen: SeenRun, width: int) -> Iterator[Text]:
    """The run, its state, its Step, and the figures of the last one."""
    run = seen.run
    parts = [one_line(run.name)]
    if seen.title:
        parts.append(one_line(seen.title))
    parts.append(run.state)
    if run.phase:
        parts.append(f"phase {run.phase}")
    step = f"Step {run.step}"
    if run.steps is not None:
        step += f"/{run.steps}"
    parts.append(step)
    for number, line in enumerate(_pack_lines(parts, width)):
        yield Text(line, style="" if number else "bold")
    if run.reason:
        for line in textwrap.wrap(one_line(run.reason), width, max_lines=2, placeholder=" ..."):
            yield Text(line)
    lag = any(source.get("max_lag") for source in seen.plan.get("sources", ()))
    shown_figures = figures(_finite_metrics(seen), lag=lag)
    parts = [f"{label} {text}" for label, text in shown_figures]
    yield from map(Text, _pack_lines(parts, width))


def _finite_metrics(seen: SeenRun) -> dict[str, float]:
    """The last row's metrics but for those that were not finite."""
    metrics: dict[str, float] = {}
    for name, metric in seen.row.items():
        number = finite(metric)
        if number is not None:
            metrics[name] = number
    return metrics


def _pack_lines(parts: Sequence[str], width: int) -> list[str]:
    """Pack parts side by side, in lines."""
    short = [shorten_line(part, width - 2) for part in parts]
    if short:
        return list(pack_parts(short, width, indent="  "))
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
    rows = list(_rows_of(seen, flow, replicas))
    groups = [group for _, group in rows]
    names = [_name_group(name, group) for name, group in rows]
    bar_width = max(8, min(24, width // 6))
    bars = [_bar(group, bar_width) for group in groups]
    busy = [_share(group, "busy") for group in groups]
    waits = [_wait(group) for group in groups]
    blamed = [_find_blamed(group) for group in groups]
    row_rates = [_rate(group, "rows", seconds) for group in groups]
    token_rates = [_rate(group, "tokens", seconds) for group in groups]
    in_flight = [_in_flight(group) for group in groups]
    versions = [_versions(group) for group in groups]
    gpu_peaks = [_device(group) for group in groups]
    name_column = TableColumn(title="", cells=names)
    time_column = TableColumn(title="time", cells=bars, right=False)
    busy_column = TableColumn(title="busy", cells=busy, rank=6)
    waits_column = TableColumn(title="waits", cells=waits, right=False, rank=1)
    blame_column = TableColumn(title="for", cells=blamed, right=False, rank=7)
    rows_column = TableColumn(title="rows/s", cells=row_rates, rank=2)
    tokens_column = TableColumn(title="tok/s", cells=token_rates, rank=3)
    flight_column = TableColumn(title="in flight", cells=in_flight, rank=4)
    version_column = TableColumn(title="version", cells=versions, rank=4)
    gpu_peak_column = TableColumn(title="GPU peak", cells=gpu_peaks, rank=5)
    columns = [
        name_column,
        time_column,
        busy_column,
        waits_column,
        blame_column,
        rows_column,
        tokens_column,
        flight_column,
        version_column,
        gpu_peak_column,
    ]
    yield from table_lines(columns, width)
    if flow.nodes:
        legend = list(_legend(groups))
        yield from (Text(line, style="dim") for line in _pack_lines(legend, width))


def _legend(groups: Sequence[list[ReplicaFlow]]) -> Iterator[str]:
    """`# busy`; few nodes wait for something outside of the run, whose letter may be left out."""
    for state, letter, _, word in _STATES:
        if state != "for_outside" or any(_seconds(group, state) for group in groups):
            yield f"{letter} {word}"


def _rows_of(seen: SeenRun, flow: Flow, replicas: bool) -> Iterator[tuple[str, list[ReplicaFlow]]]:
    """A name, and who counts for it: in the order of the plan."""
    by_node: dict[str, dict[str, ReplicaFlow]] = defaultdict(dict)
    for key, replica in flow.nodes.items():
        node, _, _ = key.partition("@")
        by_node[node][key] = replica
    planned_nodes = seen.plan.get("nodes", ())
    places = {node["name"]: place for place, node in enumerate(planned_nodes)}
    for node in sorted(by_node, key=lambda name: places.get(name, len(places))):
        group = by_node[node]
        if replicas and len(group) > 1:
            for key, replica in sorted(group.items()):
                yield key, [replica]
        else:
            yield node, list(group.values())


def _name_group(name: str, replicas: Sequence[ReplicaFlow]) -> str:
    if len(replicas) > 1:
        return f"{one_line(name)} x{len(replicas)}"
    return one_line(name)


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
    bar = Text()
    whole = _whole(replicas)
    if whole <= 0:
        return bar
    end, drawn = 0.0, 0
    for state, letter, style, _ in _STATES:
        end += _seconds(replicas, state) / whole * width
        bar.append(letter * (round(end) - drawn), style=style)
        drawn = round(end)
    return bar


def _share(replicas: Sequence[ReplicaFlow], state: str) -> str:
    whole = _whole(replicas)
    if whole > 0:
        return f"{_seconds(replicas, state) / whole:.0%}"
    return ""


def _wait(replicas: Sequence[ReplicaFlow]) -> str:
    """What it waits for longest."""
    waits: dict[str, float] = {}
    for state, _, _, word in _STATES[1:-1]:
        waits[word] = _seconds(replicas, state)
    word = max(waits, key=lambda each: waits[each])
    whole = _whole(replicas)
    if whole <= 0 or waits[word] < 0.005 * whole:
        return ""
    return f"{word} {waits[word] / whole:.0%}"


def _find_blamed(replicas: Sequence[ReplicaFlow]) -> str:
    """Find whom it waits for longest."""
    blames: dict[str, float] = defaultdict(float)
    for each in replicas:
        for name, seconds in (*each.blames.items(), *each.outside.items()):
            blames[name] += seconds
    if blames:
        return one_line(max(blames, key=lambda name: blames[name]))
    return ""


def _rate(replicas: Sequence[ReplicaFlow], what: str, seconds: float) -> str:
    count = _seconds(replicas, what)
    if count and seconds > 0:
        return shown_number(count / seconds)
    return ""


def _in_flight(replicas: Sequence[ReplicaFlow]) -> str:
    count = sum(replica.in_flight for replica in replicas)
    if count:
        return f"{count:,}"
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
    metrics = _finite_metrics(seen)
    step_seconds = metrics.get("time/step", 0.0)
    bar_width = max(8, width // 6)
    names: list[str] = []
    bars: list[Text] = []
    shares: list[str] = []
    seconds: list[str] = []
    for node in seen.plan.get("nodes", ()):
        node_seconds = metrics.get(f"time/{node['name']}")
        if node_seconds is None:
            continue
        replicas = node.get("layout", {}).get("replicas", 1)
        share = min(1.0, node_seconds / step_seconds / replicas) if step_seconds else 0.0
        names.append(one_line(node["name"]))
        bars.append(_bar([ReplicaFlow(busy=share, idle=1.0 - share)], bar_width))
        shares.append(f"{share:.0%}")
        seconds.append(shown_number(node_seconds))
    name_column = TableColumn(title="", cells=names)
    time_column = TableColumn(title="time", cells=bars, right=False)
    busy_column = TableColumn(title="busy", cells=shares)
    seconds_column = TableColumn(title="seconds", cells=seconds)
    columns = [name_column, time_column, busy_column, seconds_column]
    yield from _section(f"nodes in Step {seen.run.step}", table_lines(columns, width))
    worker_lines = _pack_lines(_worker_shares(metrics), width)
    yield from _section("workers, busy", map(Text, worker_lines))
    yield Text()
    notice = "waits, edges and memory: this run kept none, as it has no events/"
    yield from (Text(line, style="dim") for line in textwrap.wrap(notice, width))


def _worker_shares(metrics: Mapping[str, float]) -> list[str]:
    """`train 54%` of each Worker."""
    shares: dict[str, float] = {}
    for metric, share in metrics.items():
        if metric.startswith("worker/"):
            shares[metric.split("/")[1]] = share
    return [f"{one_line(worker)} {share:.0%}" for worker, share in shares.items()]
