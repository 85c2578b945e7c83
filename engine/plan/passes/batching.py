"""What is batched together: prompts admitted at once, and the chunks of a node's rows.

Owns: cohorts and chunking. Does not own: how many chunks a cohort has (place.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.plan.draft import Draft
from engine.plan.passes.place import above
from engine.plan.plan import PlannedNode


def batching(draft: Draft) -> Draft:
    """Cohorts of a Step's prompts: one is generated while the one before it is trained.

    With a lag, columns that read a generation in another Worker take whatever is ready, to end soon
    after it; elsewhere a chunk is (a part of) a cohort.
    """
    uppers = above(draft.nodes)
    generating = {n.name: set(n.workers) for n in draft.nodes if n.traits.generates}

    def streams(node: PlannedNode) -> bool:
        if not node.lag or node.traits.computes or node.name in draft.placing.chunks:
            return False
        read = generating.keys() & uppers[node.name]
        return any(generating[name].isdisjoint(node.workers) for name in read)

    nodes = tuple(replace(n, chunking="ready", chunks=1) if streams(n) else n for n in draft.nodes)
    sources = tuple(replace(s, cohort=s.batch if s.max_lag else 0) for s in draft.sources)
    return replace(draft, nodes=nodes, sources=sources, notes=(*draft.notes, *_notes(draft, nodes)))


def _notes(draft: Draft, nodes: Sequence[PlannedNode]) -> Iterator[str]:
    """What streams, and what decides the last bits of a node's rows."""
    ready = ", ".join(n.name for n in nodes if n.chunking == "ready")
    if ready:
        why = "so that a Step is full soon after it"
        yield f"{ready}: take rows as they are ready, beside generation, {why}"
    for node in nodes:
        if node.chunking == "cohort" and (node.chunks > 1 or node.layout.replicas > 1):
            yield _bits(node, asked=node.name in draft.placing.chunks)


def _bits(node: PlannedNode, *, asked: bool) -> str:
    replicas = node.layout.replicas
    unit = {"step": "Step", "evaluation": "evaluation"}.get(node.region, "cohort")
    why = f"as it has {replicas} replicas" if replicas > 1 else "as replicas would have"
    why = "as was asked" if asked else why
    same = f"; one replica with chunks={node.chunks} gives the same bits" if replicas > 1 else ""
    return f"{node.name}: {node.chunks} chunk{'s' * (node.chunks != 1)} a {unit}, {why}{same}"
