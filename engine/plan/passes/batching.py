"""What is batched together: prompts admitted at once, and the chunks of a node's rows.

Owns: how large a cohort is, and of which nodes a chunk is whatever has come. Does not own: into how
many chunks a cohort is cut, which follows from its replicas (place.py), nor which rows each gets
(engine/coordinator/readiness.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dataflow.node import Node
from engine.plan.draft import Draft
from engine.plan.episodes import writes_turns
from engine.plan.passes.place import find_ancestors
from engine.plan.plan import PlannedNode
from engine.plan.planned_source import PlannedSource


def batch_rows(draft: Draft) -> Draft:
    """Cut the prompts of a Step into cohorts: one is generated while the one before it is trained.

    With a lag, a generation takes rows as its slots fall free, and columns that read one in another
    Worker take whatever is ready, to end soon after it; elsewhere a chunk is (a part of) a cohort.
    """
    ready = frozenset(_find_streaming(draft)) | frozenset(_find_late(draft))
    nodes = list(draft.nodes)
    for index, node in enumerate(nodes):
        if node.name in ready:
            waits = _waits_between_turns(draft.graph.node(node.name))
            nodes[index] = replace(node, chunking="ready", chunks=1, waits=waits)
    sources = tuple(map(_set_cohort, draft.sources))
    notes = (*draft.notes, *_describe_chunks(draft, nodes))
    return replace(draft, nodes=tuple(nodes), sources=sources, notes=notes)


def _waits_between_turns(node: Node) -> bool:
    """Whether each row of a node waits for its environment by itself. In rounds all of them wait
    together, and no other row could begin meanwhile.
    """
    return writes_turns(node) and node.params.get("pace") != "rounds"


def _find_late(draft: Draft) -> Iterator[str]:
    """The generations whose rows are bound to a replica as its slots fall free. In a Worker that
    trains, too, decoding that others may join would go on before each Step's training.
    """
    training: set[str] = set()
    for node in draft.nodes:
        if node.work == "train":
            training.update(node.workers)
    for node in draft.nodes:
        if may_bind_late(draft, node) and training.isdisjoint(node.workers):
            yield node.name


def may_bind_late(draft: Draft, node: PlannedNode) -> bool:
    """Whether rows of a generation may be bound as slots fall free, wherever it is."""
    return node.traits.generates and bool(node.lag) and node.name not in draft.placing.chunks


def _find_streaming(draft: Draft) -> Iterator[str]:
    """The columns whose chunks are whatever has come."""
    ancestors = find_ancestors(draft.nodes)
    generations = {n.name: set(n.workers) for n in draft.nodes if n.traits.generates}
    for node in draft.nodes:
        if not node.lag or node.traits.computes or node.name in draft.placing.chunks:
            continue
        read_generations = generations.keys() & ancestors[node.name]
        if any(generations[name].isdisjoint(node.workers) for name in read_generations):
            yield node.name


def _set_cohort(source: PlannedSource) -> PlannedSource:
    """Admit one Step's prompts at a time where there is a lag, else all at once."""
    if source.max_lag:
        return replace(source, cohort=source.batch)
    return replace(source, cohort=0)


def _describe_chunks(draft: Draft, nodes: Sequence[PlannedNode]) -> Iterator[str]:
    """What streams, and what decides the last bits of a node's rows."""
    for node in nodes:
        if node.binds_late:
            slots = f"its {node.layout.slots} slots"
            if node.layout.replicas > 1:
                slots = f"the {node.layout.slots} slots of a replica"
            text = f"{node.name}: rows begin as {slots} fall free, and wait for no others"
            if node.waits:
                text += "; as many more, while rows wait between their turns"
            yield text
    streaming = [n.name for n in nodes if n.chunking == "ready" and not n.binds_late]
    if streaming:
        why = "so that a Step is full soon after it"
        yield f"{', '.join(streaming)}: take rows as they are ready, beside generation, {why}"
    for node in nodes:
        if node.chunking == "cohort" and (node.chunks > 1 or node.layout.replicas > 1):
            yield _describe_bits(node, is_requested=node.name in draft.placing.chunks)


def _describe_bits(node: PlannedNode, *, is_requested: bool) -> str:
    replicas = node.layout.replicas
    unit = {"step": "Step", "evaluation": "evaluation"}.get(node.region, "cohort")
    chunks = "1 chunk" if node.chunks == 1 else f"{node.chunks} chunks"
    if is_requested:
        why = "as was asked"
    elif replicas > 1:
        why = f"as it has {replicas} replicas"
    else:
        why = "as replicas would have"
    if replicas > 1:
        why += f"; one replica with chunks={node.chunks} gives the same bits"
    return f"{node.name}: {chunks} a {unit}, {why}"
