"""Weights: who may share a module with its writer, and by which route versions go.

Owns: aliases and routes. Does not own: the choice of both (passes/modules.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.plan.draft import Draft
from engine.plan.plan import ModelUse, PlannedNode


def aliases(draft: Draft) -> Iterator[str]:
    """Only the writer's Workers share its module, unsharded, and above the cut only at lag 0."""
    writers = {u.module: n for n in draft.nodes for u in n.models if u.access == "write"}
    for node in draft.nodes:
        for use in node.models:
            if what := _why_not_shared(node, use, writers):
                problem = f"{node.name} shares the weights of {use.model!r} {what}"
                yield f"{problem}. Fix: weights of its own."


def _why_not_shared(node: PlannedNode, use: ModelUse, writers: Mapping[str, PlannedNode]) -> str:
    """Empty if sharing is safe, or if nobody else writes this module while the node computes."""
    writer = writers.get(use.module)
    if writer is None or node is writer or node.work == "evaluate" or use.param == "tokenizer":
        return ""
    if not set(node.workers) <= set(writer.workers):
        return "from another worker"
    if node.lag:
        return f"at lag {node.lag}"
    return "of which its rank has a part" if writer.layout.partial else ""


def routes(draft: Draft) -> Iterator[str]:
    """Weights go by collectives between Workers of one host that do not take turns."""
    for model in (m for m in draft.models if m.writer and m.route != "pull"):
        writer = draft.node(model.writer).workers[0]
        for reader in draft.remote_readers(model):
            here, there = draft.host_of(writer), draft.host_of(reader)
            turns = draft.turns_of(writer)
            if here != there:
                places = f"from {writer} on {here} and {reader} on {there}"
                problem = f"{places}, and collectives stay on one host"
                yield f"weights of {model.name!r} {problem}. Fix: weights=pull."
            elif reader in turns:
                both = f"between {writer} and {reader}, which take turns with their devices"
                yield f"weights of {model.name!r} {both} ({','.join(turns)}). Fix: weights=pull."
