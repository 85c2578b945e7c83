"""A plan in words: what runs where, what it should cost, and why.

Owns: the text, ASCII and at most 120 columns wide. Does not own: any number (passes/,
engine/cost), drawings (dataflow/draw).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dataflow.node import Node
from dataflow.regions import regions
from dataflow.rows import Domains
from dataflow.shown import printable, shown_bytes
from engine.cost.memory import HOST_PARTS, LASTING, host_peak, peak
from engine.plan.cluster import Cluster
from engine.plan.plan import Plan, PlannedEdge, PlannedModel, PlannedNode, PlannedSource
from engine.plan.warnings import step_seconds

WIDTH = 120
_OF_MODELS = ("decode", "forward", "train")
_NAME = 24
"""Widest name that shares its line with what is said of it."""


def explain(plan: Plan, *, measured: Mapping[str, float] | None = None) -> str:
    """The plan as text. measured: node -> seconds a Step, shown beside what was predicted."""
    sections = [
        _header(plan),
        _section("warnings (errors with --strict)", _warnings(plan)),
        _section("workers, each a process that does one thing after another", _workers(plan)),
        _section("nodes, in the order in which they can run", _nodes(plan, measured)),
        _section("where streaming ends", _cut(plan)),
        _section(
            "edges: bytes a Step at the greatest lengths; saved: of columns that stay, nobody there"
            " reads them",
            _edges(plan),
        ),
        _section("weights", _weights(plan)),
        _section("conventions that peers do not share", _dialects(plan)),
        _section("recorded of each Step", _recorded(plan)),
        _section("notes", _notes(plan)),
    ]
    return printable("\n\n".join("\n".join(lines) for lines in sections if lines) + "\n")


def _section(title: str, lines: Iterable[str]) -> list[str]:
    """A title and its lines, nothing at all where there are none."""
    body = [f"  {line}".rstrip() for line in lines]
    return [title, *body] if body else []


# --- header ---------------------------------------------------------------------------------------


def _header(plan: Plan) -> list[str]:
    where = f" on {_machines(plan)}" if plan.cluster else ""
    lines = [f"{plan.graph}{where}; seed {plan.seed}; graph {plan.digest[:8]}"]
    said = [*_steps(plan), *_staleness(plan), *_memory(plan), *_time(plan)]
    return lines + [f"  {line}" for text in said for line in _wrapped(text, after=2)]


def _machines(plan: Plan) -> str:
    assert plan.cluster is not None
    names = dict.fromkeys(plan.hosts.values())
    return (
        "; ".join(f"{n}: {plan.cluster.on(n).describe()}" for n in names) or plan.cluster.describe()
    )


def _steps(plan: Plan) -> Iterator[str]:
    """`64 prompts x 8 = 512 completions a Step, 4 updates of 128 (train_policy)`."""
    nodes = _program(plan)
    domains = Domains(plan.program) if plan.program else None
    for source in plan.sources:
        line = [n for n in plan.nodes if n.source == source.name]
        loose = any(
            n.relation == "subset" and not (n.refill and _keeps_groups(nodes, n)) for n in line
        )
        limit = "at most " if loose else ""
        for train in (n for n in line if n.work == "train"):
            domain = domains.of_node(nodes[train.name]) if domains else None
            group = domain.group_size if domain else train.inner
            rows = source.batch * group
            grouped = f"{_count(source.batch, 'prompt')} x {group} = {_count(rows, 'completion')}"
            shown = grouped if group > 1 else _count(rows, "row")
            yield f"{limit}{shown} a Step{_updates(nodes.get(train.name), rows)} ({train.name})"


def _keeps_groups(nodes: Mapping[str, Node], select: PlannedNode) -> bool:
    node = nodes.get(select.name)
    return node is not None and node.inputs["where"].node.operator.keeps in ("groups", "pairs")


def _updates(train: Node | None, rows: int) -> str:
    if train is None:
        return ""
    epochs, parts = train.params["epochs"], train.params["minibatches"]
    return f", {_count(epochs * parts, 'update')} of {rows // parts:,}"


def _staleness(plan: Plan) -> Iterator[str]:
    for source in plan.sources:
        line = [n for n in plan.nodes if n.source == source.name and n.region == "stream"]
        if not any(u.trained and u.param != "tokenizer" for n in line for u in n.models):
            yield f"{source.name}: no row depends on a Model that is trained"
        elif not source.max_lag:
            yield f"{source.name}: synchronous, each row is trained by the version that made it"
        else:
            yield f"{source.name}: {_bound(source)}"


def _bound(source: PlannedSource) -> str:
    versions = _count(source.max_lag, "version")
    if source.intake == "admission":
        return (
            f"up to {versions} ahead at admission; a row that took long may be older"
            " (intake=admission)"
        )
    how = (
        "the oldest finished rows train first"
        if source.intake == "exact"
        else "older rows are dropped and made anew"
    )
    return f"no row is more than {versions} old when it is trained; {how} (intake={source.intake})"


def _memory(plan: Plan) -> Iterator[str]:
    """Totals against the memory that there is; of several Workers each has a line in its section."""
    if len(plan.workers) == 1:
        yield from (f"{plan.workers[0]}: {text}" for text in _holds(plan, plan.workers[0]))
        return
    if unknown := _unknown(plan, plan.nodes):
        yield f"all workers: memory unknown, since the parameters of {', '.join(unknown)} are"
    elif plan.cluster:
        for host in dict.fromkeys(plan.hosts.get(w, "") for w in plan.workers):
            yield from _host_memory(plan, plan.cluster.on(host), host)


def _host_memory(plan: Plan, cluster: Cluster, host: str) -> Iterator[str]:
    """What the Workers of one host need together."""
    if cluster.gpus:
        return
    workers = [w for w in plan.workers if plan.hosts.get(w, "") == host]
    parts = {w: [n.estimate.bytes for n in plan.nodes if w in n.workers] for w in workers}
    most = (
        "at most"
        f" {shown_bytes(host_peak(parts, [lease for lease in plan.leases if lease[0] in workers]))}"
    )
    told = f"{host}: {', '.join(workers)}, {most}" if host else f"all workers: {most} on this host"
    yield f"{told}, of {shown_bytes(cluster.memory)}"


def _holds(plan: Plan, worker: str) -> Iterator[str]:
    """What a Worker needs at most."""
    nodes = [n for n in plan.nodes if worker in n.workers]
    parts = [n.estimate.bytes for n in nodes]
    host = plan.hosts.get(worker, "")
    if unknown := _unknown(plan, nodes):
        without = shown_bytes(peak(parts))
        yield (
            f"memory unknown, since the parameters of {', '.join(unknown)} are; without them"
            f" {without}"
        )
    elif plan.cluster and (cluster := plan.cluster.on(host)).gpus:
        index = plan.devices.get(worker, 0)
        gpu = "the GPU" if len(cluster.gpus) == 1 else f"GPU {index}"
        yield f"{_peak(nodes, HOST_PARTS)}, of {shown_bytes(cluster.gpus[index])} on {gpu}"
        held = sum(size for p in parts for part, size in p.items() if part in HOST_PARTS)
        yield (
            f"{shown_bytes(held)} of rows, of {shown_bytes(cluster.memory)} on"
            f" {host or 'this host'}"
        )
    else:
        room = (
            f", of {shown_bytes(plan.cluster.memory)}"
            if plan.cluster and len(plan.workers) == 1
            else ""
        )
        yield f"{_peak(nodes, ())}{room}"


def _unknown(plan: Plan, nodes: Sequence[PlannedNode]) -> list[str]:
    """Names of the Models of some nodes whose parameters nobody knows."""
    unknown = {m.name for m in plan.models if m.parameters is None}
    used = (u.model for n in nodes if n.work in _OF_MODELS for u in n.models)
    return [name for name in dict.fromkeys(used) if name in unknown]


def _peak(nodes: Sequence[PlannedNode], without: tuple[str, ...]) -> str:
    total = peak((n.estimate.bytes for n in nodes), without=without)
    last = peak(
        ({p: s for p, s in n.estimate.bytes.items() if p in LASTING} for n in nodes),
        without=without,
    )
    most = max(nodes, key=_passing)
    if total == last:
        return f"at most {shown_bytes(total)}, always"
    more = f"{shown_bytes(total - last)} more while {most.name} runs"
    return f"at most {shown_bytes(total)}: {shown_bytes(last)} always, {more}"


def _passing(node: PlannedNode) -> int:
    return sum(size for part, size in node.estimate.bytes.items() if part not in LASTING)


def _time(plan: Plan) -> Iterator[str]:
    found = step_seconds(plan)
    if found is None:
        return
    seconds, slowest = found
    rates = "by rough rates, good for comparing nodes; users' functions not counted"
    if slowest:
        yield (
            f"at most about {_duration(seconds)} a Step, those of {slowest} while others overlap,"
            f" {rates}"
        )
    else:
        yield f"at most about {_duration(seconds)} a Step {rates}"


# --- workers --------------------------------------------------------------------------------------


def _workers(plan: Plan) -> Iterator[str]:
    """Of several Workers: what each does, and what it needs."""
    if len(plan.workers) == 1:
        return
    width = _width(plan.workers)
    for worker in plan.workers:
        nodes = [n for n in plan.nodes if worker in n.workers]
        threads = _count(max(n.layout.threads for n in nodes), "thread")
        threads += f" on {plan.hosts[worker]}" if plan.hosts else ""
        records = ["the samples"] if worker == plan.recorder else []
        yield from _named(
            worker,
            width,
            f"{threads}: {', '.join([*(_share(n, worker) for n in nodes), *records])}",
        )
        for text in _holds(plan, worker):
            yield from _wrapped(text, indent=width + 2, after=2)
    for lease in plan.leases:
        yield from _wrapped(
            f"{', '.join(lease)}: on the same devices, one is awake at a time", after=2
        )


def _share(node: PlannedNode, worker: str) -> str:
    at, count = node.workers.index(worker), len(node.workers)
    if count == 1:
        return node.name
    return f"{node.name} ({'rank' if node.ranks > 1 else 'replica'} {at} of {count})"


# --- nodes ----------------------------------------------------------------------------------------


def _nodes(plan: Plan, measured: Mapping[str, float] | None) -> Iterator[str]:
    batch = {s.name: s.batch for s in plan.sources}
    owners = [n for n in plan.nodes if "weights" in n.estimate.bytes]
    name_width = _width(n.name for n in plan.nodes)
    heads = [
        "region",
        "rows",
        "on",
        "peak",
        "seconds",
        *(["measured"] if measured is not None else []),
    ]
    widths = [10, 16, 30, 10, 9, 9]
    yield _columns(["", *heads], [name_width, *widths])
    for node in plan.nodes:
        size = "unknown" if _unknown(plan, [node]) else shown_bytes(node.estimate.total)
        cells = [node.region, _rows(node, batch.get(node.source)), _on(node), size]
        cells.append(_duration(node.estimate.seconds))
        if measured is not None:
            cells.append(_duration(measured.get(node.name)))
        yield from _named(node.name, name_width, _columns(cells, widths))
        yield from _wrapped(_how(node), indent=name_width + 2)
        yield from _wrapped(_parts(node, owners), indent=name_width + 2)


def _rows(node: PlannedNode, batch: int | None) -> str:
    """Rows a Step of its output; those that it reads, for a sink."""
    rows = node.inner if node.relation == "sink" else node.rows
    if batch is None:
        return "all there are" if rows == 1 else f"all x {rows}"
    return f"{batch:,} x {rows} = {batch * rows:,}" if rows > 1 else f"{batch:,}"


def _on(node: PlannedNode) -> str:
    layout = node.layout
    slots = f", {layout.slots} slots" if node.work == "decode" else ""
    where = node.workers[0] if len(node.workers) == 1 else f"x{len(node.workers)}"
    return f"{where}, {_count(layout.threads, 'thread')}{slots}"


def _how(node: PlannedNode) -> str:
    """Kernel, replicas and chunking; of a node below the cut the chunk is the Step."""
    kernel = f"{node.operator} by {node.kernel}"
    if node.layout.replicas > 1:
        kernel += f", {node.layout.replicas} replicas"
    if node.ranks > 1:
        split = f"{node.layout.data} x {node.layout.tensor} ranks (data x tensor)"
        kernel += f", {split if node.layout.tensor > 1 else f'{node.ranks} ranks'}"
        kernel += " with a part of the state each" if node.layout.shard else ""
    if node.refill:
        kernel += f", refilled in at most {_count(node.max_attempts, 'attempt')}"
    parts = f"{node.chunks} chunks" if node.chunks > 1 else "chunks"
    if node.region == "step":
        return (
            f"{kernel}, the Step in {parts}"
            if node.chunks > 1
            else f"{kernel}, the whole Step at once"
        )
    if node.region == "evaluation":
        return f"{kernel}, at one version of the Model{f', in {parts}' if node.chunks > 1 else ''}"
    together = (
        "prompts admitted together"
        if node.chunking == "cohort"
        else f"whatever is ready, by {node.scope}"
    )
    return f"{kernel}, {parts} of {together}"


def _parts(node: PlannedNode, owners: Sequence[PlannedNode]) -> str:
    parts = [f"{part} {shown_bytes(size)}" for part, size in node.estimate.bytes.items()]
    used = {u.module for u in node.models if u.param != "tokenizer" and node.work != "evaluate"}
    if used and "weights" not in node.estimate.bytes:
        held = (
            n
            for n in owners
            if set(node.workers) & set(n.workers) and used & {u.module for u in n.models}
        )
        parts += [f"weights those of {owner.name}" for owner in list(held)[:1]]
    return ", ".join(parts)


# --- the cut, edges, weights ----------------------------------------------------------------------


def _cut(plan: Plan) -> Iterator[str]:
    stream = [n.name for n in plan.nodes if n.region == "stream"]
    yield from _wrapped(f"stream any time: {', '.join(stream)}", after=2)
    why = regions(plan.program).why if plan.program else {}
    below = [n for n in plan.nodes if n.region == "step"]
    for node in below:
        yield from _wrapped(
            f"ends at {node.name}: {why.get(node.name, 'it needs the whole Step')}", after=2
        )
    for node in (n for n in plan.nodes if n.work == "evaluate"):
        yield (
            f"outside: {node.name}, at the start, after every {_count(node.every, 'Step')} and at"
            " the end"
        )


def _edges(plan: Plan) -> Iterator[str]:
    if not plan.edges:
        return
    shown = [f"{e.producer} -> {e.consumer}" for e in plan.edges]
    width, evaluated = _width(shown, 44), {n.name for n in plan.nodes if n.region == "evaluation"}
    widths = [10, 10, len("inproc")]
    yield _columns(["", "moved", "saved", "route", "columns"], [width, *widths, 7])
    for name, edge in zip(shown, plan.edges, strict=True):
        moved = (
            ["evaluation", ""]
            if edge.consumer in evaluated
            else [shown_bytes(edge.bytes), shown_bytes(edge.saved)]
        )
        first = _columns([*moved, edge.route], widths)
        first = first.ljust(sum(widths) + 2 * (len(widths) - 1))
        yield from _named(name, width, first, tail=", ".join(edge.columns))
    yield _columns(["all", *_totals(plan.edges)], [width, 10, 10])


def _totals(edges: Iterable[PlannedEdge]) -> list[str]:
    moved, saved = zip(*((e.bytes, e.saved) for e in edges), strict=True)
    return [shown_bytes(sum(moved)), shown_bytes(sum(saved))]


def _weights(plan: Plan) -> Iterator[str]:
    nodes = {n.name: n for n in plan.nodes}
    width = _width(m.name for m in plan.models)
    for model in plan.models:
        size = (
            "parameters unknown"
            if model.parameters is None
            else f"{_count(model.parameters, 'parameter')}"
        )
        yield from _named(model.name, width, f"{size}, from {model.base}", tail="")
        followers = [m.name for m in plan.models if m.follows == model.name]
        for line in _versions(plan, model, nodes, followers):
            yield from _wrapped(line, indent=width + 2, after=2)


def _apart(plan: Plan, one: PlannedNode, other: PlannedNode) -> bool:
    """Whether their Workers are on several hosts."""
    return len({plan.hosts[w] for w in (*one.workers, *other.workers)}) > 1


def _versions(
    plan: Plan, model: PlannedModel, nodes: Mapping[str, PlannedNode], followers: Sequence[str]
) -> Iterator[str]:
    """How its versions get from the writer to each reader."""
    if model.follows:
        way = "a copy of it" if model.rate == 1.0 else f"{model.rate:g} of the way to it"
        yield f"follows {model.follows}: {way}, every {_count(model.every, 'Step')}"
    if not model.writer:
        if model.readers:
            yield f"{'' if model.follows else 'frozen, '}read by {', '.join(model.readers)}"
        return
    for reader in model.readers:
        node = nodes[reader]
        lag = node.max_lag if node.region == "stream" else 0
        carried = _carried(model, node, nodes[model.writer])
        far = plan.hosts and model.route == "pull" and _apart(plan, node, nodes[model.writer])
        yield f"{model.writer} -> {reader}: {carried}{' by zmq' if far else ''}; lag {lag}"
    if not model.readers:
        yield (
            f"written by {model.writer},"
            f" {'followed by ' + ', '.join(followers) if followers else 'read by nobody'}"
        )


def _carried(model: PlannedModel, reader: PlannedNode, writer: PlannedNode) -> str:
    """How a version reaches a reader: not at all, within a process, or from one to another."""
    if reader.name in model.aliases:
        return "alias, they take turns with one module"
    if set(reader.workers) <= {writer.workers[0]}:
        return "copy"
    return f"copy in {_among(reader.workers)}, {_ROUTES[model.route]} {writer.workers[0]}"


_ROUTES = {"pull": "pulled from", "collective": "sent by collectives from"}


def _among(workers: Sequence[str]) -> str:
    return (
        ", ".join(workers)
        if len(workers) < 4
        else f"{workers[0]} ... {workers[-1]} ({len(workers)})"
    )


# --- the rest -------------------------------------------------------------------------------------


def _dialects(plan: Plan) -> Iterator[str]:
    for name, node in _program(plan).items():
        if "dialect" in node.params:
            dialect = node.params["dialect"]
            yield from _wrapped(
                f"{name}: {node.operator.name} as {dialect} does it (dialect={dialect!r})", after=2
            )


def _recorded(plan: Plan) -> Iterator[str]:
    for i in plan.recorded:
        if len(plan.recorded) > 1:
            yield f"{i.name}:"
        for fetch in i.fetches:
            yield from _wrapped(f"{fetch.producer}: {', '.join(fetch.columns)}", after=2)


def _notes(plan: Plan) -> Iterator[str]:
    for note in plan.notes:
        yield from _wrapped(note, after=2)


def _warnings(plan: Plan) -> Iterator[str]:
    for warning in plan.warnings:
        yield from _wrapped(str(warning), after=2)


def _program(plan: Plan) -> dict[str, Node]:
    return {n.name: n for n in plan.program.nodes} if plan.program else {}


# --- text -----------------------------------------------------------------------------------------


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _duration(seconds: float | None) -> str:
    """`21 s`, `1.3 s`, `4 ms`; `-` where nothing is known."""
    if seconds is None:
        return "-"
    if seconds < 0.0995:
        return f"{seconds * 1e3:.1f} ms" if seconds < 0.00995 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:,.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"


def _width(names: Iterable[str], limit: int = _NAME) -> int:
    return min(limit, max((len(name) for name in names), default=0))


def _columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Cells side by side, two blanks between them; one that is too wide pushes the rest along."""
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)).rstrip()


def _named(name: str, width: int, text: str, *, tail: str = "") -> Iterator[str]:
    """A name and what is said of it; a name that is too long has its own line. The tail wraps
    behind the text.
    """
    if len(name) > width:
        yield from textwrap.wrap(name, WIDTH - 2, subsequent_indent="  ")
    start = f"{name.ljust(width) if len(name) <= width else ' ' * width}  {text}"
    indent = min(len(start) if tail else width, 3 * WIDTH // 4)
    yield from textwrap.wrap(
        f"{start}  {tail}".rstrip(),
        WIDTH - 2,
        subsequent_indent=" " * (indent + 2),
        break_on_hyphens=False,
    )


def _wrapped(text: str, *, indent: int = 0, after: int = 0) -> Iterator[str]:
    """Text in lines that fit; continuation lines are indented by `after` more."""
    first = " " * indent
    yield from textwrap.wrap(
        text,
        WIDTH - 2,
        initial_indent=first,
        subsequent_indent=first + " " * after,
        break_long_words=False,
        break_on_hyphens=False,
    )
