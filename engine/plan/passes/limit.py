"""What nodes take at once whose memory ran out earlier in the run.

Owns: that, and the note of it. Does not own: by how much limits were lowered
(engine/coordinator/memory_limits.py), the margin of the estimates (correct.py).
"""

from __future__ import annotations

from dataclasses import replace

from engine.plan.draft import Draft
from engine.plan.memory_margins import describe_stand
from engine.plan.plan import PlannedNode


def limit_short_nodes(draft: Draft) -> Draft:
    """Lower the layouts of nodes whose memory ran out, where they stand as they stood then."""
    notes = list(draft.notes)
    nodes = list(draft.nodes)
    for index, node in enumerate(nodes):
        memory = draft.memory.get(node.name)
        if memory is None:
            continue
        what = f"counted {memory.margin:.2f} times"
        if memory.stand == describe_stand(draft, node):
            nodes[index] = limited = _limit(draft, node)
            layout = limited.layout
            what += f", {layout.slots} rows and {layout.tokens} tokens at once"
        notes.append(f"{node.name}: {what}, as its memory ran out in this run")
    margins = {name: memory.margin for name, memory in draft.memory.items() if memory.margin > 1}
    return replace(draft, nodes=tuple(nodes), notes=tuple(notes), margins=margins)


def _limit(draft: Draft, node: PlannedNode) -> PlannedNode:
    layout, limits = node.layout, draft.memory[node.name].limits
    recompute = layout.recompute
    if limits.recompute == "layers":
        recompute = "layers"
    lowered = replace(
        layout,
        slots=min(layout.slots, limits.slots),
        tokens=min(layout.tokens, limits.tokens),
        recompute=recompute,
    )
    return replace(node, layout=lowered)
