"""Prompts: how the prompts of a Step are divided into updates and chunks.

Owns: groups, constant divisors and chunks. Does not own: the division (passes/batching.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.loss_terms import ROWS
from engine.plan.draft import Draft
from engine.plan.refusals import add_fix


def check_groups(draft: Draft) -> Iterator[str]:
    """Every update has a whole group at least, and full Steps the same number of groups in each."""
    batches = {source.name: source.batch for source in draft.sources}
    uneven_sources = _find_uneven_sources(draft)
    for node in draft.nodes:
        if node.work != "train":
            continue
        parts: int = draft.graph.node(node.name).params["minibatches"]
        for source in dict.fromkeys(draft.sources_of(node).values()):
            batch = batches.get(source, parts)
            if batch % parts == 0 or (source in uneven_sources and batch >= parts):
                continue
            prompts = f"{batch} prompts"
            if source != node.source:
                prompts += f" of {source}"
            problem = f"{node.name}: {prompts} in {parts} minibatches of whole groups"
            fix = f"minibatches={_find_divisor(batch, parts)}"
            yield add_fix(problem, fix)


def _find_divisor(batch: int, most: int) -> int:
    """The greatest divisor of a batch up to this."""
    divisor = min(most, batch)
    while batch % divisor:
        divisor -= 1
    return divisor


def _find_uneven_sources(draft: Draft) -> set[str]:
    """Sources behind a selection without refill, which leaves any number of groups."""
    selections = (n for n in draft.nodes if n.relation == "subset" and not n.refill)
    return {n.source for n in selections if n.region != "evaluation"}


def check_constant(draft: Draft) -> Iterator[str]:
    """aggregate="constant" divides by the longest completion, which only a sampler sets."""
    for node in draft.graph.nodes:
        if node.params.get("aggregate") != "constant":
            continue
        params_by_set = {ROWS: node.params} | node.params.get("own_rows", {})
        for name, params in params_by_set.items():
            if not params.get("max_tokens"):
                rows = "its rows" if name == ROWS else name
                problem = f"aggregate='constant' divides by max_tokens, and nothing sampled {rows}"
                yield add_fix(f"{node.name}: {problem}", "aggregate='token_mean'")


def check_chunks(draft: Draft) -> Iterator[str]:
    """A chunk has at least one prompt of its cohort; below the cut, of its Step. Of a prompt whose
    answers are spread it may have one span.
    """
    prompts = {source.name: source.cohort or source.batch for source in draft.sources}
    for node in draft.nodes:
        most = prompts.get(node.source, node.chunks) * node.layout.spread
        if not 1 <= node.chunks <= most:
            units = "prompts" if node.layout.spread == 1 else "spans of prompts"
            problem = f"{node.name}: {node.chunks} chunks of {most} {units}"
            nearest = min(max(node.chunks, 1), most)
            fix = f"chunks: {node.name}={nearest}, or a larger batch"
            yield add_fix(problem, fix)
