"""Where the number and the lengths of a simulated run's rows come from, in words.

Owns: these words. Does not own: the lengths (lengths.py), the numbers (prediction_run.py), what
selections keep (selections.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.plan.cost.distribution import LengthDistribution
from engine.plan.plan import Plan, PlannedNode
from engine.plan.source_rows import rows_in_data
from engine.predict.simulation.lengths import DrawnLengths


def row_origins(plan: Plan, drawn: DrawnLengths, rows: Mapping[str, int]) -> dict[str, str]:
    """By source and generation, in the plan's order. rows: of each source."""
    origins: dict[str, str] = {}
    for node in plan.nodes:
        parts: list[str] = []
        if node.work == "source":
            parts = [*_count(plan, node, rows[node.name]), _prompts(drawn, node.name)]
        elif node.traits.generates:
            parts = [_answers(drawn, node.name)]
        if parts:
            origins[node.name] = "; ".join(parts)
    return origins


def _count(plan: Plan, node: PlannedNode, rows: int) -> Iterator[str]:
    """Of an evaluation's source: those of a training source are the batch."""
    assert plan.program is not None
    if any(source.name == node.name for source in plan.sources):
        return
    known = rows_in_data(plan.program.node(node.name)) is not None
    yield f"{rows:,} rows" if known else f"{rows:,} rows assumed, as many as have slots"


def _prompts(drawn: DrawnLengths, source: str) -> str:
    greatest, given = drawn.greatest(source), drawn.given_prompts(source)
    if given is not None:
        cut = "" if greatest.limit is None else f", at most {greatest.limit:,}"
        return f"prompts of {_span(given)}{cut}, as --prompts or --lengths says"
    if greatest.counts is not None:
        return f"prompts of {greatest.counts}"
    why = f" ({greatest.uncounted})" if greatest.uncounted else ""
    if greatest.bound:
        return f"prompts of {greatest.prompt:,} tokens assumed{why}: --prompts says others"
    return f"prompts of {greatest.prompt:,} tokens, the most that the graph allows{why}"


def _answers(drawn: DrawnLengths, node: str) -> str:
    most, given = drawn.greatest(node).completion, drawn.given.answers
    if given is None:
        return f"answers of {most:,} tokens, the most that it may write: --lengths says others"
    return f"answers of {_span(given)}, at most {most:,}, as --lengths says"


def _span(of: LengthDistribution) -> str:
    least, most = int(of.lengths[0]), of.longest
    return f"{most:,} tokens" if least == most else f"{least:,} to {most:,} tokens"
