"""A simulated run in words.

Owns: the sections and their order, 120 columns wide or fewer. Does not own: any figure
(summary.py), several plans beside each other (plan_comparison.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from dataflow.safe_text import one_line, printable, shown_number
from dataflow.width import folded
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
from engine.predict.simulation.critical_path import MESSAGE, WAIT, CriticalSum
from engine.predict.simulation.summary import PredictionSummary, per_event, rates
from engine.predict.simulation.utilisation import DeviceUse, TimeShares

_NOBODY: Mapping[str, str] = {}
_FEW = 8
"""Steps that are said one by one."""
_PARTS = 12
"""Parts of a critical path that are said."""
_HEADS = ("busy", "rows", "weights", "others", "idle")
_CELLS = (7, 7, 7, 7, 7, 7)
_WHY = "busy: the device computes; rows, weights: until these are there; others: other nodes there"


def report(
    found: PredictionSummary, *, told: Mapping[str, str] = _NOBODY, width: int = WIDTH
) -> str:
    """All of it. told: see `summed.rates`."""
    section = partial(_section, width=width)
    when = _when(found)
    sections = [
        section(_title(found), _steps(found)),
        section(f"nodes, {when}: {_WHY}", _nodes(found)),
        section(f"devices, {when}", _devices(found)),
        section("replicas", _replicas(found)),
        section("lag: versions from what made a row to what trained it", _lag(found)),
        section(f"critical path of Step {found.last}: what it waited for", _path(found)),
        section("coordinator", _coordinator(found)),
        section("where rows come from: how many there are, and how long", _origins(found)),
        section("where seconds come from", _rates(found, told)),
    ]
    return printable("\n\n".join("\n".join(lines) for lines in sections if lines) + "\n")


def _section(title: str, lines: Iterable[Line], width: int) -> list[str]:
    """A title and its lines, if there are any."""
    body = [f"  {text}".rstrip() for line in lines for text in lay_out(line, width - 2)]
    return [*folded(title, width).split("\n"), *body] if body else []


def _title(found: PredictionSummary) -> str:
    plan, steps = found.plan, count(len(found.seconds), "simulated Step")
    name, seed = one_line(plan.graph), f"seed {plan.seed}"
    return f"{name}: {steps} on {hardware(plan)}, {count(len(plan.workers), 'Worker')}; {seed}"


def hardware(plan: Plan) -> str:
    """`2 H100, 4 L40S`: the devices that Workers have."""
    kinds: Counter[str] = Counter()
    for host, numbers in _used(plan).items():
        kind = plan.cluster.on(host).kind if plan.cluster is not None else ""
        kinds[kind or "GPU"] += len(numbers)
    told = [f"{number:,} {kind}" for kind, number in kinds.items()]
    if not told:
        return f"{plan.cluster.cores} cores" if plan.cluster is not None else "cores"
    return ", ".join(told)


def _used(plan: Plan) -> dict[str, set[int]]:
    """The numbers of the GPUs of each host that some Worker has."""
    found: dict[str, set[int]] = {}
    for worker, numbers in plan.devices.items():
        found.setdefault(plan.host_of(worker), set()).update(numbers)
    return found


def _when(found: PredictionSummary) -> str:
    first, last = found.first, found.last
    return f"Step {last}" if last == first else f"Steps {first} to {last}"


def _steps(found: PredictionSummary) -> Iterator[Line]:
    """Seconds, speed, cost."""
    first, *rest = found.seconds
    width, each = 7, found.between
    yield from name_line("first", width, f"{exact(first)}, with nothing to overlap with")
    if rest:
        least, most = exact(min(each)), exact(max(each))
        spread = f" ({least} to {most})" if least != most else ""
        yield from name_line("then", width, f"{exact(found.step)} a Step{spread}")
        if 1 < len(rest) <= _FEW:
            yield from name_line("", width, ", ".join(exact(seconds) for seconds in rest))
    yield from name_line("rows", width, f"{found.rows:,.0f} of {found.tokens:,.0f} tokens a Step")
    yield from name_line("speed", width, f"{found.rate:,.0f} tokens/s")
    yield from name_line("cost", width, cost(found))


def exact(seconds: float) -> str:
    """`139 ms`, `8.12 s`, `1,234 s`: three figures."""
    if seconds < 0.0995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:,.0f} s" if seconds >= 999.5 else f"{seconds:.3g} s"


def cost(found: PredictionSummary) -> str:
    """`0.53 a Step: 2 hosts at 196.64 an hour`, or why it is not known."""
    spent = found.cost
    if spent.unpriced:
        names = ", ".join(spent.unpriced[:3]) + (", ..." if len(spent.unpriced) > 3 else "")
        return f"not known: no price an hour of {names} in a cluster file"
    hosts = f"{count(spent.hosts, 'host')} at {spent.hour:,.2f} an hour"
    return f"{shown_number(spent.step)} a Step: {hosts}"


def _nodes(found: PredictionSummary) -> Iterator[Line]:
    if not found.nodes:
        return
    width = widest(use.node for use in found.nodes)
    yield side_by_side(["", _row(["Workers", *_HEADS], _CELLS)], [width, 0])
    for use in found.nodes:
        cells = [_workers(use.workers), *_shares(use.shares)]
        yield from name_line(use.node, width, _row(cells, _CELLS))


def _workers(mean: float) -> str:
    """`3`; `2.4` where replicas have come or gone."""
    return f"{mean:,.0f}" if abs(mean - round(mean)) < 0.05 else f"{mean:,.1f}"


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Numbers end below each other."""
    return "  ".join(cell.rjust(wide) for cell, wide in zip(cells, widths, strict=True))


def _shares(shares: TimeShares) -> list[str]:
    found = (shares.busy, shares.rows, shares.weights, shares.others, shares.idle)
    return [percent(share) for share in found]


def percent(share: float) -> str:
    """`71.3 %`."""
    return f"{100 * share:.1f} %"


def _devices(found: PredictionSummary) -> Iterator[Line]:
    """Those that do the same together, since there may be thousands."""
    groups: dict[tuple[str, tuple[str, ...]], list[DeviceUse]] = {}
    for use in found.devices:
        groups.setdefault((use.kind, use.nodes), []).append(use)
    if not groups:
        return
    width, widths = (
        widest(f"{len(u):,} {kind}" for (kind, _), u in groups.items()),
        (7, 15, 7, 7, 7),
    )
    yield side_by_side(
        ["", _row(["busy", "least to most", "rows", "weights", "idle"], widths)], [width, 0]
    )
    for (kind, nodes), uses in groups.items():
        mean = TimeShares()
        for use in uses:
            mean.plus(use.shares)
        mean = mean.of(len(uses))
        each = [use.shares.busy for use in uses]
        spread = f"{100 * min(each):.1f} to {100 * max(each):.1f} %"
        rest = (percent(mean.rows), percent(mean.weights), percent(mean.idle))
        cells = [percent(mean.busy), spread, *rest]
        yield from name_line(
            f"{len(uses):,} {kind}", width, _row(cells, widths), tail=", ".join(nodes)
        )


def _replicas(found: PredictionSummary) -> Iterator[Line]:
    """How many there were when, of nodes in which they come and go."""
    width = widest(found.replicas)
    for node, counts in found.replicas.items():
        changes = [f"{counts[0]:,}"]
        for step, (before, after) in enumerate(pairwise(counts), 2):
            if after != before:
                changes.append(f"{after:,} at the end of Step {step}")
        planned = found.plan.node(node)
        least, most = least_replicas(found.plan, planned), len(planned.workers)
        text = f"{', '.join(changes)}; {least} to {most} may be"
        yield from name_line(node, width, text)


def _lag(found: PredictionSummary) -> Iterator[Line]:
    width = widest(found.lag)
    for reader, lag in found.lag.items():
        text = f"{lag.mean:.2f} in the mean, {lag.greatest:.2f} in the Step with most"
        yield from name_line(reader, width, text)


def _path(found: PredictionSummary) -> Iterator[Line]:
    whole = sum(part.seconds for part in found.path)
    shown = sorted(found.path, key=lambda part: -part.seconds)[:_PARTS]
    width = widest(map(_part_name, shown))
    for part in (part for part in found.path if part in shown):
        share = percent(part.seconds / whole) if whole else "-"
        text = side_by_side([exact(part.seconds).rjust(8), share.rjust(7)], [8, 7])
        yield from name_line(_part_name(part), width, text, tail=_part_tail(part))
    if len(found.path) > len(shown):
        rest = whole - sum(part.seconds for part in shown)
        yield f"and {count(len(found.path) - len(shown), 'other')}: {exact(rest)}"


def _part_name(part: CriticalSum) -> str:
    """`rollout`; `load rollout` of what is no work on rows."""
    if part.what == WAIT:
        return "nothing known"
    if part.what == MESSAGE:
        return "messages"
    return part.node if part.what in ("chunk", "train") else f"{part.what} {part.node}".strip()


def _part_tail(part: CriticalSum) -> str:
    times = f"{part.count:,} times" if part.count > 1 else ""
    fetched = f"{exact(part.fetch)} of it under way" if part.fetch > 0 else ""
    return ", ".join(filter(None, (times, fetched)))


def _coordinator(found: PredictionSummary) -> Iterator[Line]:
    load = found.coordinator
    share = percent(load.seconds / found.whole) if found.whole else "-"
    each = f"{1e6 * per_event(load):.0f} us an event"
    told = f"{count(load.events, 'event')}, {count(load.instructions, 'instruction')}"
    busy = f"{exact(load.seconds)} of CPU measured here: {each}"
    yield from wrap_line(f"{told}; {busy}, {share} of the simulated time", after=2)


def _origins(found: PredictionSummary) -> Iterator[Line]:
    width = widest(found.origins)
    for node, text in found.origins.items():
        yield from name_line(node, width, text)


def _rates(found: PredictionSummary, told: Mapping[str, str]) -> Iterator[Line]:
    words = {
        "measured": "measured in a run",
        "fitted": "fitted to a profile",
        "catalogue": "the catalogue's rates",
        "given": "given by --seconds",
    }
    width = max(map(len, words.values()))
    for origin, nodes in rates(found.plan, told).items():
        yield from name_line(words[origin], width, "", tail=_names(nodes))
    if not found.load.quiet:
        yield from wrap_line(found.load.note, after=2)


def _names(nodes: Sequence[str]) -> str:
    return ", ".join(map(one_line, nodes))
