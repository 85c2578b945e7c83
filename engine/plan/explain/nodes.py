"""Workers and nodes of an explained plan, and where streaming ends.

Owns: a line or more for each. Does not own: edges and weights (edges.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dataflow.kernel import Layout
from dataflow.loss_terms import ROWS
from dataflow.regions import regions
from dataflow.shown import shown_bytes
from engine.plan.explain.layout import Line, count, duration, named, side_by_side, widest, wrapped
from engine.plan.explain.memory import holds, unknown
from engine.plan.explain.summary import program
from engine.plan.plan import Plan, PlannedNode
from engine.plan.worker_index import nodes_by_worker


def workers(plan: Plan) -> Iterator[Line]:
    """Of several Workers: what each does, and what it needs."""
    if len(plan.workers) == 1:
        return
    width, numbers = widest(plan.workers), _numbers(plan)
    for worker, nodes in nodes_by_worker(plan.nodes).items():
        yield from named(worker, width, _tasks(plan, worker, nodes, numbers))
        for text in holds(plan, worker, nodes):
            yield from wrapped(text, indent=width + 2, after=2)
    for group in plan.turns:
        turns = f"{', '.join(group)}: on the same devices, one is awake at a time"
        yield from wrapped(turns, after=2)


def _numbers(plan: Plan) -> dict[tuple[str, str], int]:
    """Which of a node's Workers each is, by node and Worker."""
    places = ((n.name, list(enumerate(n.workers))) for n in plan.nodes)
    return {(name, worker): i for name, workers in places for i, worker in reversed(workers)}


def _tasks(
    plan: Plan,
    worker: str,
    nodes: Sequence[PlannedNode],
    numbers: Mapping[tuple[str, str], int],
) -> str:
    """Its threads, its host where there are several, and all that it does."""
    threads = _threads(max((n.layout for n in nodes), key=lambda each: each.threads * each.inner))
    where = f" on {plan.hosts[worker]}" if plan.hosts else ""
    shares = (_share(n, numbers[n.name, worker]) for n in nodes)
    records = ["the samples"] if worker == plan.recorder else []
    return f"{threads}{where}: {', '.join([*shares, *records])}"


def _threads(layout: Layout) -> str:
    """Of each rank, where a kernel starts several itself."""
    ranks = f"{layout.inner} x " if layout.inner > 1 else ""
    return f"{ranks}{count(layout.threads, 'thread')}"


def _share(node: PlannedNode, number: int) -> str:
    """The part of a node that its Worker of this number has."""
    count = len(node.workers)
    if count == 1:
        return node.name
    return f"{node.name} ({'rank' if node.ranks > 1 else 'replica'} {number} of {count})"


HEADS = ("region", "rows", "on", "peak", "seconds", "bound")
"""What `cells` says of a node."""


def nodes(plan: Plan) -> Iterator[Line]:
    """A table of all nodes."""
    owners = [n for n in plan.nodes if "weights" in n.estimate.bytes]
    name_width = widest(n.name for n in plan.nodes)
    widths = [10, 16, 30, 10, 9, 7]
    yield side_by_side(["", *HEADS], [name_width, *widths])
    for node in plan.nodes:
        yield from named(node.name, name_width, side_by_side(cells(plan, node), widths))
        yield from wrapped(_how(node), indent=name_width + 2)
        yield from wrapped(_parts(node, owners), indent=name_width + 2)


def cells(plan: Plan, node: PlannedNode) -> list[str]:
    """Where a node runs, on which rows, and what that should take."""
    batch = {s.name: s.batch for s in plan.sources}
    size = "unknown" if unknown(plan, [node]) else shown_bytes(node.estimate.total)
    rows = _all_rows(plan, node, batch)
    seconds = duration(node.estimate.seconds)
    return [node.region, rows, _on(node), size, seconds, node.estimate.bound]


def _all_rows(plan: Plan, node: PlannedNode, batch: Mapping[str, int]) -> str:
    """Rows a Step; of a train node, with those that terms of its loss have of their own."""
    shown = [_rows(node, batch.get(node.source))]
    for name, source in plan.sources_of(node).items():
        if name != ROWS:
            each = max(plan.node(i.gate).rows for i in node.row_sets[name])
            shown.append(f"{batch[source] * each:,}")
    return " + ".join(shown)


def _rows(node: PlannedNode, batch: int | None) -> str:
    """Rows a Step of its output; those that it reads, for a sink."""
    rows = node.inner if node.relation == "sink" else node.rows
    if batch is None:
        return "all there are" if rows == 1 else f"all x {rows}"
    return f"{batch:,} x {rows} = {batch * rows:,}" if rows > 1 else f"{batch:,}"


def _on(node: PlannedNode) -> str:
    layout = node.layout
    slots = f", {layout.slots} slots" if node.traits.generates else ""
    where = node.workers[0] if len(node.workers) == 1 else f"x{len(node.workers)}"
    return f"{where}, {_threads(layout)}{slots}"


def _how(node: PlannedNode) -> str:
    """Kernel, replicas and chunking; of a node below the cut the chunk is the Step."""
    kernel = ", ".join([f"{node.operator} by {node.kernel}", *_layout(node)])
    parts = f"{node.chunks} chunks" if node.chunks > 1 else "chunks"
    if node.region == "step":
        step = f"the Step in {parts}" if node.chunks > 1 else "the whole Step at once"
        return f"{kernel}, {step}"
    if node.region == "evaluation":
        return f"{kernel}, at one version of the Model{f', in {parts}' if node.chunks > 1 else ''}"
    if node.chunking == "cohort":
        return f"{kernel}, {parts} of prompts admitted together"
    return f"{kernel}, {parts} of whatever is ready, by {node.scope}"


def _layout(node: PlannedNode) -> Iterator[str]:
    """Replicas, ranks and refilling, where there are any."""
    if node.layout.replicas > 1:
        yield f"{node.layout.replicas} replicas"
    if node.ranks > 1:
        split = f"{node.layout.data} x {node.layout.tensor} ranks (data x tensor)"
        shown = split if node.layout.tensor > 1 else f"{node.ranks} ranks"
        yield f"{shown}{' with a part of the state each' if node.layout.shard else ''}"
    if node.layout.inner > 1:
        yield f"{node.layout.inner} tensor ranks of its own"
    if node.refill:
        yield f"refilled in at most {count(node.max_attempts, 'attempt')}"


def _parts(node: PlannedNode, owners: Sequence[PlannedNode]) -> str:
    parts = [f"{part} {shown_bytes(size)}" for part, size in node.estimate.bytes.items()]
    used = {u.module for u in node.models if u.param != "tokenizer"}
    if used and node.work != "evaluate" and "weights" not in node.estimate.bytes:
        near = (n for n in owners if set(node.workers) & set(n.workers))
        sharing = [n.name for n in near if used & {u.module for u in n.models}]
        parts += [f"weights those of {name}" for name in sharing[:1]]
    return ", ".join(parts)


def cut(plan: Plan) -> Iterator[Line]:
    """What runs at any time, and why the rest waits for the Step."""
    stream = [n.name for n in plan.nodes if n.region == "stream"]
    yield from wrapped(f"stream any time: {', '.join(stream)}", after=2)
    why = regions(program(plan)).why
    for node in (n for n in plan.nodes if n.region == "step"):
        reason = why.get(node.name, "it needs the whole Step")
        yield from wrapped(f"ends at {node.name}: {reason}", after=2)
    for node in (n for n in plan.nodes if n.work == "evaluate"):
        times = f"at the start, after every {count(node.every, 'Step')} and at the end"
        yield f"outside: {node.name}, {times}"
