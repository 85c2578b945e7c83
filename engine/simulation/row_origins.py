"""Where the number and the lengths of a simulated run's rows come from, in words.

Owns: these words. Does not own: the lengths (lengths.py), the numbers (prediction_run.py), what
selections keep (selections.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.plan.cost.distribution import LengthDistribution
from engine.plan.plan import Plan, PlannedNode
from engine.plan.source_rows import rows_in_data
from engine.simulation.lengths import DrawnLengths


def describe_row_origins(
    plan: Plan, lengths: DrawnLengths, rows: Mapping[str, int]
) -> dict[str, str]:
    """Say it of each source and generation, in the plan's order. rows: of each source."""
    trained = {source.name for source in plan.sources}
    origins: dict[str, str] = {}
    for node in plan.nodes:
        if node.work == "source":
            words = _describe_prompts(lengths, node.name)
            # Of a training source the number is the batch, which the plan says.
            if node.name not in trained:
                words = f"{_describe_number(plan, node, rows[node.name])}; {words}"
            origins[node.name] = words
        elif node.traits.generates:
            origins[node.name] = _describe_answers(lengths, node.name)
    return origins


def _describe_number(plan: Plan, node: PlannedNode, rows: int) -> str:
    """How many rows the source of an evaluation has."""
    assert plan.program is not None
    if rows_in_data(plan.program.node(node.name)) is None:
        return f"{rows:,} rows assumed, as many as have slots"
    return f"{rows:,} rows"


def _describe_prompts(lengths: DrawnLengths, source: str) -> str:
    greatest = lengths.greatest(source)
    distribution = lengths.distribution_of_prompts(source)
    if distribution is not None:
        cut = "" if greatest.limit is None else f", at most {greatest.limit:,}"
        span = _describe_span(distribution)
        return f"prompts of {span}{cut}, as --prompts or --lengths says"
    if greatest.counts is not None:
        return f"prompts of {greatest.counts}"
    why = f" ({greatest.uncounted})" if greatest.uncounted else ""
    if greatest.bound:
        return f"prompts of {greatest.prompt:,} tokens assumed{why}: --prompts says others"
    return f"prompts of {greatest.prompt:,} tokens, the most that the graph allows{why}"


def _describe_answers(lengths: DrawnLengths, node: str) -> str:
    most = lengths.greatest(node).completion
    distribution = lengths.distributions.answers
    if distribution is None:
        return f"answers of {most:,} tokens, the most that it may write: --lengths says others"
    return f"answers of {_describe_span(distribution)}, at most {most:,}, as --lengths says"


def _describe_span(distribution: LengthDistribution) -> str:
    """`512 tokens`; `16 to 512 tokens` where they differ."""
    least, most = int(distribution.lengths[0]), distribution.longest
    if least == most:
        return f"{most:,} tokens"
    return f"{least:,} to {most:,} tokens"
