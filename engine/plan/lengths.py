"""The greatest lengths that the rows of each node of a graph can have, and counted ones.

Owns: how lengths go from node to node. Does not own: their arithmetic
(engine/plan/cost/lengths.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Node
from dataflow.operator import Reduce
from dataflow.rows import Domains, reader_of, row_line
from dataflow.schema import TokenPrompt
from engine.plan.cost.lengths import Lengths, of_demonstration, of_rollout
from engine.plan.cost.models import Shape
from engine.plan.prompt_counts import counted_prompts, counted_rows

Shapes = Mapping[str, Shape | None]
"""Of each Model; None where it is not known."""


def all_lengths(graph: Graph, shapes: Shapes) -> dict[str, Lengths]:
    """By node."""
    found: dict[str, Lengths] = {}
    domains = Domains(graph)
    for node in graph.nodes:
        found[node.name] = _lengths_of(graph, node, found, shapes, domains)
        if node.operator.traits.generates:  # what it is asked is as long as it reads
            lengths = found[node.name]
            for port in row_line(next(iter(node.inputs.values())), domains):
                if port.node.operator.traits.generates:
                    break  # another's rows, of which this one's prompts were made
                answer = found[port.node.name].completion
                found[port.node.name] = replace(lengths, completion=answer)
    return found


def _lengths_of(
    graph: Graph, node: Node, found: Mapping[str, Lengths], shapes: Shapes, domains: Domains
) -> Lengths:
    if node.operator.traits.generates:
        return _generated(node, found, shapes, domains)
    if node.operator.tokenises:
        return _demonstrated(node, graph, shapes)
    if node.operator.work == "source":
        return of_rollout(0, None)
    rows = node.operator.rows
    onto = (node.inputs[rows.to],) if isinstance(rows, Reduce) else node.inputs.values()
    above = [found[p.node.name] for p in onto]
    longest = max(above, key=lambda lengths: (lengths.completion, lengths.prompt))
    if any(issubclass(schema, TokenPrompt) for schema in node.schemas):
        return longest.continued(len(node.params.get("then") or ""))
    return longest


def _demonstrated(node: Node, graph: Graph, shapes: Shapes) -> Lengths:
    """Of rows that are made of the data's texts, for the Model that reads them."""
    lengths, reader = of_demonstration(), reader_of(graph, node)
    models = [] if reader is None else [s for s in reader.states.values() if isinstance(s, Model)]
    counts = counted_rows(node, models[0].base) if models else None
    if counts is None:
        return lengths
    shape = shapes[models[0].name]
    return lengths.demonstrated(counts, shape.context if shape else 0)


def _generated(
    node: Node, found: Mapping[str, Lengths], shapes: Shapes, domains: Domains
) -> Lengths:
    policy = next(s for s in node.states.values() if isinstance(s, Model))
    shape = shapes[policy.name]
    context = shape.context if shape else 0
    lengths = of_rollout(node.params["max_tokens"], node.params.get("max_prompt_tokens"))
    prompt = next(iter(node.inputs.values()))
    if issubclass(prompt.schema, TokenPrompt):
        return lengths.asked(found[prompt.node.name]).clipped(context)
    counts = counted_prompts(node, policy.base, domains)
    drops = node.params.get("overlong_prompt") == "drop"
    return lengths.clipped(context).counted(counts, drops=drops)
