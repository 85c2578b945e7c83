"""Workers and nodes of an explained plan, and where streaming ends.

Owns: a line or more for each. Does not own: edges and weights (edges.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dataflow.attention_paths import describe_attention_paths
from dataflow.kernel import Layout
from dataflow.loss_terms import ROWS
from dataflow.regions import regions
from dataflow.safe_text import shown_bytes
from engine.plan.alike_workers import group_alike_workers, name_alike
from engine.plan.explain.layout import (
    Line,
    count,
    duration,
    name_line,
    side_by_side,
    widest,
    wrap_line,
)
from engine.plan.explain.memory import unknown_models, worker_memory_lines
from engine.plan.explain.planned_graph import planned_graph
from engine.plan.plan import Plan, PlannedNode
from engine.plan.worker_index import nodes_by_worker


def worker_lines(plan: Plan) -> Iterator[Line]:
    """What each of several Workers does, and what it needs; nothing of one alone."""
    if len(plan.workers) == 1:
        return
    width = widest(plan.workers)
    numbers = _worker_numbers(plan)
    nodes_on = nodes_by_worker(plan.nodes)
    if len(plan.workers) > _MOST_WORKERS:
        yield from _alike_lines(plan, nodes_on)
        return
    for worker, nodes in nodes_on.items():
        yield from name_line(worker, width, _tasks(plan, worker, nodes, numbers))
        for text in worker_memory_lines(plan, worker, nodes):
            yield from wrap_line(text, indent=width + 2, after=2)
    for group in plan.turns:
        turns = f"{', '.join(group)}: on the same devices, one is awake at a time"
        yield from wrap_line(turns, after=2)


def _alike_lines(plan: Plan, nodes_on: Mapping[str, Sequence[PlannedNode]]) -> Iterator[Line]:
    """What Workers do of which many are alike: of each class once, with the memory of its first."""
    for workers in group_alike_workers(plan, nodes_on):
        nodes = nodes_on[workers[0]]
        layouts = [node.layout for node in nodes]
        where = _threads(max(layouts, key=lambda layout: layout.threads * layout.inner))
        hosts = {plan.host_of(worker) for worker in workers}
        if plan.hosts:
            where += f" on {hosts.pop() if len(hosts) == 1 else count(len(hosts), 'host')}"
        tasks = [_describe_part(node) for node in nodes]
        if plan.recorder in workers:
            tasks.append("the samples")
        each = "each " * (len(workers) > 1)
        yield from wrap_line(f"{name_alike(workers)}: {each}{where}: {', '.join(tasks)}", after=2)
        for text in worker_memory_lines(plan, workers[0], nodes):
            yield from wrap_line(text, indent=2, after=2)
    if plan.turns:
        turns = f"{count(len(plan.turns), 'group')} of Workers are on the same devices by turns"
        yield f"{turns}, one of each is awake at a time"


def _describe_part(node: PlannedNode) -> str:
    """What each of several Workers has of a node."""
    if len(node.workers) == 1:
        return node.name
    part = "rank" if node.ranks > 1 else "replica"
    return f"{node.name} (a {part} of {len(node.workers)})"


def _worker_numbers(plan: Plan) -> dict[tuple[str, str], int]:
    """Which of a node's Workers each is, by node and Worker."""
    numbers: dict[tuple[str, str], int] = {}
    for node in plan.nodes:
        for number, worker in enumerate(node.workers):
            numbers.setdefault((node.name, worker), number)  # the first, if it is there twice
    return numbers


def _tasks(
    plan: Plan,
    worker: str,
    nodes: Sequence[PlannedNode],
    numbers: Mapping[tuple[str, str], int],
) -> str:
    """Its threads, its host where there are several, and all that it does."""
    layouts = [node.layout for node in nodes]
    where = _threads(max(layouts, key=lambda layout: layout.threads * layout.inner))
    if plan.hosts:
        where = f"{where} on {plan.hosts[worker]}"
    tasks = [_share(node, numbers[node.name, worker]) for node in nodes]
    if worker == plan.recorder:
        tasks.append("the samples")
    return f"{where}: {', '.join(tasks)}"


def _threads(layout: Layout) -> str:
    """Threads of a node; those of each rank, where its kernel starts several itself."""
    threads = count(layout.threads, "thread")
    return f"{layout.inner} x {threads}" if layout.inner > 1 else threads


def _share(node: PlannedNode, number: int) -> str:
    """The part of a node that its Worker of this number has."""
    if len(node.workers) == 1:
        return node.name
    part = "rank" if node.ranks > 1 else "replica"
    return f"{node.name} ({part} {number} of {len(node.workers)})"


_MOST_WORKERS = 256
"""Workers that have lines of their own; of more, those that are alike have some together."""
HEADS = ("region", "rows", "on", "peak", "seconds", "bound")
"""What `cells` holds of a node."""


def node_lines(plan: Plan) -> Iterator[Line]:
    """A table of all nodes."""
    owners = [node for node in plan.nodes if "weights" in node.estimate.bytes]
    name_width = widest(node.name for node in plan.nodes)
    widths = [10, 16, 30, 10, 9, 7]
    yield side_by_side(["", *HEADS], [name_width, *widths])
    for node in plan.nodes:
        text = side_by_side(cells(plan, node), widths)
        yield from name_line(node.name, name_width, text)
        yield from wrap_line(_how(node), indent=name_width + 2)
        yield from wrap_line(_describe_attention(plan, node), indent=name_width + 2)
        yield from wrap_line(_describe_tokens(plan, node), indent=name_width + 2)
        yield from wrap_line(_parts(node, owners), indent=name_width + 2)


def cells(plan: Plan, node: PlannedNode) -> list[str]:
    """Where a node runs, on which rows, and what that should take."""
    estimate = node.estimate
    size = shown_bytes(estimate.total)
    if unknown_models(plan, [node]):
        size = "unknown"
    rows, where = _all_rows(plan, node), _where(node)
    return [node.region, rows, where, size, duration(estimate.seconds), estimate.bound]


def _all_rows(plan: Plan, node: PlannedNode) -> str:
    """Rows a Step; of a train node, with those that terms of its loss have of their own."""
    batches = {source.name: source.batch for source in plan.sources}
    counts = [_rows(node, batches.get(node.source))]
    for name, source in plan.sources_of(node).items():
        if name != ROWS:
            rows = max(plan.node(intake.gate).rows for intake in node.row_sets[name])
            counts.append(f"{batches[source] * rows:,}")
    return " + ".join(counts)


def _rows(node: PlannedNode, batch: int | None) -> str:
    """Rows a Step of its output; those that it reads, for a sink."""
    rows = node.inner if node.relation == "sink" else node.rows
    if batch is None:
        return "all there are" if rows == 1 else f"all x {rows}"
    if rows <= 1:
        return f"{batch:,}"
    return f"{batch:,} x {rows} = {batch * rows:,}"


def _where(node: PlannedNode) -> str:
    """Its Worker, or their number; threads; the slots of a generation."""
    parts = [f"x{len(node.workers)}", _threads(node.layout)]
    if len(node.workers) == 1:
        parts[0] = node.workers[0]
    if node.traits.generates:
        parts.append(f"{node.layout.slots} slots")
    return ", ".join(parts)


def _how(node: PlannedNode) -> str:
    """Kernel, replicas and chunking."""
    parts = [f"{node.operator} by {node.kernel}", *_layout(node), *_chunking(node)]
    return ", ".join(parts)


def _describe_attention(plan: Plan, node: PlannedNode) -> str:
    """Which paths compute the attention of a node on a GPU; on a CPU there is only one."""
    paths = node.estimate.attention
    if not paths or not plan.is_on_gpus(node):
        return ""
    return f"attention: {describe_attention_paths(paths)}"


def _chunking(node: PlannedNode) -> Iterator[str]:
    """What its chunks are; of a node below the cut the chunk is the Step."""
    chunks = f"{node.chunks} chunks" if node.chunks > 1 else "chunks"
    if node.region == "step" and node.chunks > 1:
        yield f"the Step in {chunks}"
    elif node.region == "step":
        yield "the whole Step at once"
    elif node.region == "evaluation":
        yield "at one version of the Model"
        if node.chunks > 1:
            yield f"in {chunks}"
    elif node.chunking == "cohort":
        yield f"{chunks} of prompts admitted together"
    elif node.binds_late:
        yield "rows as slots fall free"
    else:
        yield f"{chunks} of whatever is ready"
        yield f"by {node.scope}"


def _layout(node: PlannedNode) -> Iterator[str]:
    """Replicas, ranks, refilling, and what spares memory or time, where there is any."""
    yield from _dispatch(node)
    if node.ranks > 1:
        ranks = f"{node.ranks} ranks"
        if node.work != "train":
            kind = "context" if node.layout.context > 1 else "tensor"
            ranks = f"{node.ranks} {kind} ranks{' each' * (node.layout.replicas > 1)}"
        elif node.layout.alike > 1:
            ways = _list_ways(node.layout)
            counts = " x ".join(map(str, ways.values()))
            ranks = f"{counts} ranks ({' x '.join(ways)})"
        if node.layout.shard:
            ranks = f"{ranks} with a part of the state each"
        yield ranks
    if node.layout.inner > 1:
        yield f"{node.layout.inner} tensor ranks of its own"
    if node.layout.recompute != "none":
        yield f"recompute: {node.layout.recompute}"
    if node.layout.offload != "none":
        yield f"offload: {node.layout.offload}"
    if node.layout.compiled:
        yield "compiled: layers"
    if node.refill:
        yield f"refilled in at most {count(node.max_attempts, 'attempt')}"


def _list_ways(layout: Layout) -> dict[str, int]:
    """What the ranks of a train node divide, and into how many parts."""
    ways = {"data": layout.data}
    if layout.context > 1:
        ways["context"] = layout.context
    if layout.tensor > 1:
        ways["tensor"] = layout.tensor
    return ways


def _describe_tokens(plan: Plan, node: PlannedNode) -> str:
    """What a context rank receives: the rows of its share, which all of these have, and the others'
    queries, keys and values.
    """
    layout = node.layout
    if layout.context == 1:
        return ""
    row_bytes = sum(edge.bytes for edge in plan.edges if edge.consumer == node.name)
    each = f"each context rank computes 1 of {layout.context} tokens"
    shares = layout.data * layout.replicas
    rows = f"receives rows of {shown_bytes(-(-row_bytes // shares))} a Step"
    heads = f"{shown_bytes(node.estimate.exchanged)} of heads in its largest pass"
    return f"{each}, {rows}, and {heads}"


def _dispatch(node: PlannedNode) -> Iterator[str]:
    """Replicas, and which answers go to one, if not whole prompts in their order."""
    if node.layout.replicas > 1:
        yield f"{node.layout.replicas} replicas"
    if node.loads:
        yield f"{' + '.join(map(str, node.loads))} prompts"
    if node.layout.spread > 1:
        yield f"a prompt's answers in {node.layout.spread} spans"
    if node.tail:
        chunks = f" in {count(node.tail_chunks, 'chunk')}" if node.tail_chunks else ""
        yield f"the {node.tail:.0%} of most weight apart{chunks}"


def _parts(node: PlannedNode, owners: Sequence[PlannedNode]) -> str:
    """Bytes of each part; weights that another node in its Worker has for both. owners: nodes with
    weights of their own.
    """
    parts = [f"{part} {shown_bytes(size)}" for part, size in node.estimate.bytes.items()]
    modules = {use.module for use in node.models if use.param != "tokenizer"}
    if modules and node.work != "evaluate" and "weights" not in node.estimate.bytes:
        for owner in owners:
            shared = modules & {use.module for use in owner.models}
            if shared and set(node.workers) & set(owner.workers):
                parts.append(f"weights those of {owner.name}")
                break
    return ", ".join(parts)


def cut_lines(plan: Plan) -> Iterator[Line]:
    """What runs at any time, and why the rest waits for the Step."""
    stream = [node.name for node in plan.nodes if node.region == "stream"]
    yield from wrap_line(f"stream any time: {', '.join(stream)}", after=2)
    why = regions(planned_graph(plan)).why
    for node in plan.nodes:
        if node.region == "step":
            reason = why.get(node.name, "it needs the whole Step")
            yield from wrap_line(f"ends at {node.name}: {reason}", after=2)
    for node in plan.nodes:
        if node.work == "evaluate":
            times = f"at the start, after every {count(node.every, 'Step')} and at the end"
            yield f"outside: {node.name}, {times}"
