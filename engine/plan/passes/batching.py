"""What is batched together: prompts admitted together, and the chunks that a node's rows come in.

Owns: cohorts and chunking. Does not own: into how many chunks a cohort is cut (place.py: as
many as there are replicas, or were asked for).
"""

from __future__ import annotations

from dataclasses import replace

from engine.plan.draft import Draft
from engine.plan.passes.place import MODEL_WORK, above
from engine.plan.plan import PlannedNode


def batching(draft: Draft) -> Draft:
    """Cohorts of a Step's prompts: one is generated while the one before it is trained.

    With a lag, columns below a generation in another Worker take whatever is ready, so that they are done when it is;
    everywhere else a chunk is (a part of) a cohort, decided before it starts.
    """
    lags = {s.name: s.max_lag for s in draft.sources}
    uppers = above(draft.nodes)
    made = {n.name: n for n in draft.nodes}

    def streams(node: PlannedNode) -> bool:
        decodes = [made[name] for name in uppers[node.name] if made[name].work == "decode"]
        beside = any(not set(d.workers) & set(node.workers) for d in decodes)
        lag = lags.get(node.source, 0) if node.region == "stream" else 0
        return bool(lag) and beside and node.work not in MODEL_WORK and node.name not in draft.placing.chunks

    nodes = tuple(replace(n, chunking="ready", chunks=1) if streams(n) else n for n in draft.nodes)
    sources = tuple(replace(s, cohort=s.batch if s.max_lag else 0) for s in draft.sources)
    return replace(draft, nodes=nodes, sources=sources)
