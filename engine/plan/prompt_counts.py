"""Tokens of the rows that a generation, or a Model, is going to read, counted in their data.

Owns: which source that is, and why nothing is counted where there is none. Does not own: counting
(Operator.data_tokens), bounds on prompts (prompt_bounds.py), what follows from it (lengths.py).
"""

from __future__ import annotations

from dataflow.node import Node
from dataflow.rows import Domains, row_line
from dataflow.rules.context import function_at
from dataflow.schema import Prompt
from dataflow.token_counts import NotCounted, TokenCounts


def count_prompt_tokens(generation: Node, base: str, domains: Domains) -> TokenCounts | NotCounted:
    """Count the prompts of a generation. base: of the Model whose tokenizer they are read by."""
    prompt = next(iter(generation.inputs.values()))
    for port in row_line(prompt, domains):
        above = port.node
        if above.operator.data_tokens:
            count = function_at(above.operator.data_tokens)
            return count(above.params["data"], above.params.get("split"), base)
        if above.operator.traits.generates or issubclass(port.schema, Prompt):
            return NotCounted(why=f"{above.name} makes them in the run")
    return NotCounted(why="they are in no data")


def count_row_tokens(source: Node, base: str) -> TokenCounts | NotCounted | None:
    """Count the prompts and answers of a source of both; None of another node. base: of the Model
    whose tokenizer they are read by.
    """
    if not source.operator.data_tokens:
        return None
    count = function_at(source.operator.data_tokens)
    return count(source.params["data"], source.params.get("split"), base)
