"""A simulated run in words.

Owns: the sections and their order, 120 columns wide or fewer. Does not own: any figure
(summary.py), several plans beside each other (plan_comparison.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from dataflow.safe_text import one_line, printable, shown_number
from dataflow.width import fold_lines
from engine.plan.explain.layout import (
    WIDTH,
    Line,
    count,
    lay_out,
    name_line,
    side_by_side,
    widest,
    wrap_line,
)
from engine.plan.plan import Plan
from engine.plan.replica_ranges import least_replicas
from engine.simulation.critical_path import MESSAGE, WAIT, CriticalSum
from engine.simulation.summary import PredictionSummary, group_by_origin, seconds_per_event
from engine.simulation.utilisation import DeviceUse, TimeShares

_NO_ORIGINS: Mapping[str, str] = {}
_FEW = 8
"""Steps that are said one by one."""
_PARTS = 12
"""Parts of a critical path that are said."""
_HEADS = ("busy", "rows", "weights", "others", "idle")
_CELLS = (7, 7, 7, 7, 7, 7)
_DEVICE_HEADS = ("busy", "least to most", "rows", "weights", "idle")
_DEVICE_CELLS = (7, 15, 7, 7, 7)
_WHY = "busy: the device computes; rows, weights: until these are there; others: other nodes there"
_ORIGIN_WORDS = {
    "measured": "measured in a run",
    "fitted": "fitted to a profile",
    "catalogue": "the catalogue's rates",
    "given": "given by --seconds",
}


def report(
    summary: PredictionSummary,
    *,
    seconds_origins: Mapping[str, str] = _NO_ORIGINS,
    width: int = WIDTH,
) -> str:
    """Write all sections that have lines. seconds_origins: see `summary.group_by_origin`."""
    when = _counted_steps(summary)
    sections: list[tuple[str, Iterable[Line]]] = [
        (_title(summary), _step_lines(summary)),
        (f"nodes, {when}: {_WHY}", _node_lines(summary)),
        (f"devices, {when}", _device_lines(summary)),
        ("replicas", _replica_lines(summary)),
        ("lag: versions from what made a row to what trained it", _lag_lines(summary)),
        (f"critical path of Step {summary.last}: what it waited for", _path_lines(summary)),
        ("coordinator", _coordinator_lines(summary)),
        ("where rows come from: how many there are, and how long", _row_lines(summary)),
        ("where seconds come from", _rate_lines(summary, seconds_origins)),
    ]
    texts: list[str] = []
    for title, lines in sections:
        body: list[str] = []
        for line in lines:
            body += (f"  {text}".rstrip() for text in lay_out(line, width - 2))
        if body:
            texts.append("\n".join([fold_lines(title, width), *body]))
    return printable("\n\n".join(texts) + "\n")


def _title(summary: PredictionSummary) -> str:
    plan = summary.plan
    steps = count(len(summary.seconds), "simulated Step")
    workers = count(len(plan.workers), "Worker")
    name = one_line(plan.graph)
    return f"{name}: {steps} on {_describe_hardware(plan)}, {workers}; seed {plan.seed}"


def _describe_hardware(plan: Plan) -> str:
    """`2 H100, 4 L40S`: the devices that Workers have; without any the cores, `16 cores`."""
    counts: Counter[str] = Counter()
    for host, gpus in _used_gpus(plan).items():
        kind = plan.cluster.on(host).kind if plan.cluster is not None else ""
        counts[kind or "GPU"] += len(gpus)
    if counts:
        return ", ".join(f"{number:,} {kind}" for kind, number in counts.items())
    if plan.cluster is None:
        return "cores"
    return f"{plan.cluster.cores} cores"


def _used_gpus(plan: Plan) -> dict[str, set[int]]:
    """The numbers of the GPUs of each host that some Worker has; Workers may share them."""
    gpus_by_host: dict[str, set[int]] = {}
    for worker, numbers in plan.devices.items():
        gpus_by_host.setdefault(plan.host_of(worker), set()).update(numbers)
    return gpus_by_host


def _counted_steps(summary: PredictionSummary) -> str:
    """`Steps 2 to 4`: those that means and shares are of."""
    first, last = summary.first, summary.last
    if last == first:
        return f"Step {last}"
    return f"Steps {first} to {last}"


def _step_lines(summary: PredictionSummary) -> Iterator[Line]:
    """Seconds, speed, cost."""
    first, *rest = summary.seconds
    width = 7
    yield from name_line("first", width, f"{format_seconds(first)}, with nothing to overlap with")
    if rest:
        least, most = format_seconds(min(summary.between)), format_seconds(max(summary.between))
        spread = f" ({least} to {most})" if least != most else ""
        yield from name_line("then", width, f"{format_seconds(summary.step)} a Step{spread}")
        if 1 < len(rest) <= _FEW:
            yield from name_line("", width, ", ".join(map(format_seconds, rest)))
    rows = f"{summary.rows:,.0f} of {summary.tokens:,.0f} tokens a Step"
    yield from name_line("rows", width, rows)
    yield from name_line("speed", width, f"{summary.rate:,.0f} tokens/s")
    yield from name_line("cost", width, _describe_cost(summary))


def format_seconds(seconds: float) -> str:
    """`139 ms`, `8.12 s`, `1,234 s`: three figures."""
    if seconds < 0.0995:
        return f"{seconds * 1e3:.3g} ms"
    # From here on `.3g` would write an exponent.
    if seconds < 999.5:
        return f"{seconds:.3g} s"
    return f"{seconds:,.0f} s"


def _describe_cost(summary: PredictionSummary) -> str:
    """`0.53 a Step: 2 hosts at 196.64 an hour`, or why it is not known."""
    cost = summary.cost
    if cost.unpriced:
        names = ", ".join(cost.unpriced[:3])
        if len(cost.unpriced) > 3:
            names += ", ..."
        return f"not known: no price an hour of {names} in a cluster file"
    hosts = f"{count(cost.hosts, 'host')} at {cost.hour:,.2f} an hour"
    return f"{shown_number(cost.step)} a Step: {hosts}"


def _node_lines(summary: PredictionSummary) -> Iterator[Line]:
    if not summary.nodes:
        return
    width = widest(use.node for use in summary.nodes)
    heads = _align(["Workers", *_HEADS], _CELLS)
    yield side_by_side(["", heads], [width, 0])
    for use in summary.nodes:
        cells = [_write_mean(use.workers), *_write_shares(use.shares)]
        yield from name_line(use.node, width, _align(cells, _CELLS))


def _write_mean(workers: float) -> str:
    """`3`; `2.4` where replicas have come or gone."""
    if abs(workers - round(workers)) < 0.05:
        return f"{workers:,.0f}"
    return f"{workers:,.1f}"


def _align(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Numbers end below each other."""
    return "  ".join(cell.rjust(wide) for cell, wide in zip(cells, widths, strict=True))


def _write_shares(shares: TimeShares) -> list[str]:
    """In the order of _HEADS."""
    columns = (shares.busy, shares.rows, shares.weights, shares.others, shares.idle)
    return [format_percent(share) for share in columns]


def format_percent(share: float) -> str:
    """`71.3 %`."""
    return f"{100 * share:.1f} %"


def _device_lines(summary: PredictionSummary) -> Iterator[Line]:
    """Those that do the same together, since there may be thousands."""
    groups: dict[tuple[str, tuple[str, ...]], list[DeviceUse]] = {}
    for use in summary.devices:
        groups.setdefault((use.kind, use.nodes), []).append(use)
    if not groups:
        return
    width = widest(f"{len(uses):,} {kind}" for (kind, _), uses in groups.items())
    heads = _align(_DEVICE_HEADS, _DEVICE_CELLS)
    yield side_by_side(["", heads], [width, 0])
    for (kind, nodes), uses in groups.items():
        cells = _align(_device_cells(uses), _DEVICE_CELLS)
        yield from name_line(f"{len(uses):,} {kind}", width, cells, tail=", ".join(nodes))


def _device_cells(uses: Sequence[DeviceUse]) -> list[str]:
    """In the order of _DEVICE_HEADS: means, and the least and the most busy one."""
    total = TimeShares()
    for use in uses:
        total.add(use.shares)
    mean = total.divide(len(uses))
    busy = [use.shares.busy for use in uses]
    spread = f"{100 * min(busy):.1f} to {100 * max(busy):.1f} %"
    return [
        format_percent(mean.busy),
        spread,
        format_percent(mean.rows),
        format_percent(mean.weights),
        format_percent(mean.idle),
    ]


def _replica_lines(summary: PredictionSummary) -> Iterator[Line]:
    """How many there were when, of nodes in which they come and go."""
    width = widest(summary.replicas)
    for node, counts in summary.replicas.items():
        changes = [f"{counts[0]:,}"]
        for step, (before, after) in enumerate(pairwise(counts), 2):
            if after != before:
                changes.append(f"{after:,} at the end of Step {step}")
        planned = summary.plan.node(node)
        least, most = least_replicas(summary.plan, planned), len(planned.workers)
        text = f"{', '.join(changes)}; {least} to {most} may be"
        yield from name_line(node, width, text)


def _lag_lines(summary: PredictionSummary) -> Iterator[Line]:
    width = widest(summary.lag)
    for reader, lag in summary.lag.items():
        text = f"{lag.mean:.2f} in the mean, {lag.greatest:.2f} in the Step with most"
        yield from name_line(reader, width, text)


def _path_lines(summary: PredictionSummary) -> Iterator[Line]:
    """The longest parts, in the order of the path, and the sum of the others."""
    whole = sum(part.seconds for part in summary.path)
    longest = sorted(summary.path, key=lambda part: -part.seconds)[:_PARTS]
    width = widest(map(_part_name, longest))
    for part in summary.path:
        if part in longest:
            share = format_percent(part.seconds / whole) if whole else "-"
            text = side_by_side([format_seconds(part.seconds).rjust(8), share.rjust(7)], [8, 7])
            yield from name_line(_part_name(part), width, text, tail=_part_tail(part))
    others = len(summary.path) - len(longest)
    if others:
        rest = whole - sum(part.seconds for part in longest)
        yield f"and {count(others, 'other')}: {format_seconds(rest)}"


def _part_name(part: CriticalSum) -> str:
    """`rollout`; `load rollout` of what is no work on rows."""
    if part.what == WAIT:
        return "nothing known"
    if part.what == MESSAGE:
        return "messages"
    if part.what in ("chunk", "train"):
        return part.node
    return f"{part.what} {part.node}".strip()


def _part_tail(part: CriticalSum) -> str:
    remarks: list[str] = []
    if part.count > 1:
        remarks.append(f"{part.count:,} times")
    if part.fetch > 0:
        remarks.append(f"{format_seconds(part.fetch)} of it under way")
    return ", ".join(remarks)


def _coordinator_lines(summary: PredictionSummary) -> Iterator[Line]:
    load = summary.coordinator
    share = format_percent(load.seconds / summary.whole) if summary.whole else "-"
    each = f"{1e6 * seconds_per_event(load):.0f} us an event"
    messages = f"{count(load.events, 'event')}, {count(load.instructions, 'instruction')}"
    busy = f"{format_seconds(load.seconds)} of CPU measured here: {each}"
    yield from wrap_line(f"{messages}; {busy}, {share} of the simulated time", after=2)


def _row_lines(summary: PredictionSummary) -> Iterator[Line]:
    width = widest(summary.origins)
    for node, text in summary.origins.items():
        yield from name_line(node, width, text)


def _rate_lines(summary: PredictionSummary, seconds_origins: Mapping[str, str]) -> Iterator[Line]:
    width = max(map(len, _ORIGIN_WORDS.values()))
    for origin, nodes in group_by_origin(summary.plan, seconds_origins).items():
        names = ", ".join(map(one_line, nodes))
        yield from name_line(_ORIGIN_WORDS[origin], width, "", tail=names)
    if not summary.load.quiet:
        yield from wrap_line(summary.load.note, after=2)
