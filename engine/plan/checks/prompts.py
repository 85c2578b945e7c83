"""Prompts: how the prompts of a Step are divided into updates and chunks.

Owns: groups, constant divisors and chunks. Does not own: the division (passes/batching.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.loss_terms import ROWS
from engine.plan.draft import Draft


def groups(draft: Draft) -> Iterator[str]:
    """Every update has a whole group at least, and full Steps the same number of groups in each."""
    batches = {s.name: s.batch for s in draft.sources}
    loose = _of_any_size(draft)
    for node in (n for n in draft.nodes if n.work == "train"):
        parts: int = draft.graph.node(node.name).params["minibatches"]
        for source in dict.fromkeys(draft.sources_of(node).values()):
            batch = batches.get(source, parts)
            if batch % parts == 0 or (source in loose and batch >= parts):
                continue
            of = f" of {source}" if source != node.source else ""
            problem = f"{node.name}: {batch} prompts{of} in {parts} minibatches of whole groups"
            yield f"{problem}. Fix: minibatches={_divisor(batch, parts)}."


def _divisor(batch: int, most: int) -> int:
    """The greatest divisor of a batch up to this."""
    return max(d for d in range(1, min(most, batch) + 1) if batch % d == 0)


def _of_any_size(draft: Draft) -> set[str]:
    """Sources behind a selection without refill, which leaves any number of groups."""
    selections = (n for n in draft.nodes if n.relation == "subset" and not n.refill)
    return {n.source for n in selections if n.region != "evaluation"}


def constant(draft: Draft) -> Iterator[str]:
    """aggregate="constant" divides by the longest completion, which only a sampler sets."""
    for node in draft.graph.nodes:
        params = node.params
        if params.get("aggregate") != "constant":
            continue
        for name, of in ({ROWS: params} | params.get("own_rows", {})).items():
            if not of.get("max_tokens"):
                rows = "its rows" if name == ROWS else name
                problem = f"aggregate='constant' divides by max_tokens, and nothing sampled {rows}"
                yield f"{node.name}: {problem}. Fix: aggregate='token_mean'."


def chunks(draft: Draft) -> Iterator[str]:
    """A chunk has at least one prompt of its cohort; below the cut, of its Step."""
    batches = {s.name: s.cohort or s.batch for s in draft.sources}
    for node in draft.nodes:
        most = batches.get(node.source, node.chunks)
        if not 1 <= node.chunks <= most:
            problem = f"{node.name}: {node.chunks} chunks of {most} prompts"
            near = min(max(node.chunks, 1), most)
            yield f"{problem}. Fix: chunks: {node.name}={near}, or a larger batch."
