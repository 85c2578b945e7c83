"""The greatest lengths that the rows of each node of a graph can have, and counted ones.

Owns: how lengths go from node to node, in which data the rows of a node are counted, and why none
are where there are no such data. Does not own: their arithmetic (engine/plan/cost/lengths.py),
counting (Operator.data_tokens), bounds on prompts (prompt_bounds.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Node
from dataflow.operator import Reduce
from dataflow.rows import Domains, reader_of, row_line
from dataflow.rules.context import function_at
from dataflow.schema import Prompt, TokenPrompt
from dataflow.token_counts import NotCounted, TokenCounts
from engine.plan.cost.lengths import Lengths, of_demonstration, of_rollout
from engine.plan.cost.models import Shape, model_cost

Shapes = Mapping[str, Shape | None]
"""Of each Model; None where it is not known."""


def greatest_lengths(graph: Graph) -> dict[str, Lengths]:
    """Find what a graph and the bases of its Models allow, by node."""
    shapes: dict[str, Shape | None] = {}
    for state in graph.states:
        if isinstance(state, Model):
            shapes[state.name] = model_cost(state.base, state.head).shape
    return all_lengths(graph, shapes)


def all_lengths(graph: Graph, shapes: Shapes) -> dict[str, Lengths]:
    """Find the lengths of each node's rows, by node."""
    finder = _LengthFinder(graph, shapes)
    for node in graph.nodes:
        finder.add_node(node)
    return finder.lengths


class _LengthFinder:
    """Finds the lengths of one node after another, in running order."""

    def __init__(self, graph: Graph, shapes: Shapes) -> None:
        self._graph = graph
        self._shapes = shapes
        self._domains = Domains(graph)
        self.lengths: dict[str, Lengths] = {}

    def add_node(self, node: Node) -> None:
        """Find a node's lengths by those of the nodes above it. The nodes above a generation then
        get the length of its prompts.
        """
        self.lengths[node.name] = self._find_lengths(node)
        if node.operator.traits.generates:
            self._set_prompts_above(node)

    def _set_prompts_above(self, generation: Node) -> None:
        """Give the nodes that a generation's prompts come from the length that it reads."""
        lengths = self.lengths[generation.name]
        prompt = next(iter(generation.inputs.values()))
        for port in row_line(prompt, self._domains):
            if port.node.operator.traits.generates:
                break  # another's rows, of which this one's prompts were made
            answer = self.lengths[port.node.name].completion
            self.lengths[port.node.name] = replace(lengths, completion=answer)

    def _find_lengths(self, node: Node) -> Lengths:
        if node.operator.traits.generates:
            return self._find_rollout(node)
        if node.operator.tokenises and _reads_prompt_alone(node):
            return self._find_prompt_row(node)
        if node.operator.tokenises:
            return self._find_demonstration(node)
        if node.operator.work == "source":
            return of_rollout(0, None)
        rows = node.operator.rows
        inputs = [node.inputs[rows.to]] if isinstance(rows, Reduce) else node.inputs.values()
        above = [self.lengths[port.node.name] for port in inputs]
        longest_above = max(above, key=lambda lengths: (lengths.completion, lengths.prompt))
        if any(issubclass(schema, TokenPrompt) for schema in node.schemas):
            return longest_above.continue_with(len(node.params.get("then") or ""))
        return longest_above

    def _find_demonstration(self, node: Node) -> Lengths:
        """Rows that are made of the data's texts, for the Model that reads them."""
        lengths = of_demonstration()
        reader = reader_of(self._graph, node)
        if reader is None:
            return lengths
        model = next((s for s in reader.states.values() if isinstance(s, Model)), None)
        counts = None if model is None else _count_row_tokens(node, model.base)
        if model is None or counts is None:
            return lengths
        return lengths.take_demonstrations(counts, self._context_of(model))

    def _find_prompt_row(self, node: Node) -> Lengths:
        """Rows that are a prompt and an end token, for the Model that reads them."""
        lengths = of_rollout(1, None)
        reader = reader_of(self._graph, node)
        states = () if reader is None else reader.states.values()
        model = next((s for s in states if isinstance(s, Model)), None)
        if model is None:
            return lengths
        counts = _count_prompt_tokens(node, model.base, self._domains)
        return lengths.clip(self._context_of(model)).take_counts(counts, drops=False)

    def _find_rollout(self, node: Node) -> Lengths:
        policy = next(s for s in node.states.values() if isinstance(s, Model))
        context = self._context_of(policy)
        lengths = of_rollout(
            node.params["max_tokens"],
            node.params.get("max_prompt_tokens"),
            context=node.params.get("max_context") or 0,
            operator=node.operator.name,
        )
        prompt = next(iter(node.inputs.values()))
        if issubclass(prompt.schema, TokenPrompt):
            return lengths.take_prompts(self.lengths[prompt.node.name]).clip(context)
        counts = _count_prompt_tokens(node, policy.base, self._domains)
        drops = node.params.get("overlong_prompt") == "drop"
        return lengths.clip(context).take_counts(counts, drops=drops)

    def _context_of(self, model: Model) -> int:
        """The positions of a Model; 0 where its shape is not known."""
        shape = self._shapes[model.name]
        return shape.context if shape else 0


def _reads_prompt_alone(node: Node) -> bool:
    """Whether its token ids are made of prompts, and of no other text of the data."""
    declared = node.operator.inputs
    return bool(declared) and not any(each.ancestors_from for each in declared)


def _count_prompt_tokens(node: Node, base: str, domains: Domains) -> TokenCounts | NotCounted:
    """Count the prompts that a node reads first. base: of the Model whose tokenizer reads them."""
    prompt = next(iter(node.inputs.values()))
    for port in row_line(prompt, domains):
        above = port.node
        if above.operator.data_tokens:
            count = function_at(above.operator.data_tokens)
            return count(above.params["data"], above.params.get("split"), base)
        if above.operator.traits.generates or issubclass(port.schema, Prompt):
            return NotCounted(why=f"{above.name} makes them in the run")
    return NotCounted(why="they are in no data")


def _count_row_tokens(source: Node, base: str) -> TokenCounts | NotCounted | None:
    """Count the prompts and answers of a source of both; None of another node. base: of the Model
    whose tokenizer they are read by.
    """
    if not source.operator.data_tokens:
        return None
    count = function_at(source.operator.data_tokens)
    return count(source.params["data"], source.params.get("split"), base)
