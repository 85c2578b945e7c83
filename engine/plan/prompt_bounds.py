"""The most tokens that a generation's prompts can have, as far as graph and data say.

Owns: this bound, for what is sized once before the first prompt is tokenised. Does not own: the
lengths that estimates assume (engine/plan/lengths.py), reading data (Operator.data_longest).
"""

from __future__ import annotations

from dataflow.node import Node
from dataflow.rows import Domains, row_line
from dataflow.rules.context import function_at
from dataflow.schema import Prompt

NEXT_TURN = 64
"""Tokens that a chat template writes around a turn that continues a row."""


def most_prompt_tokens(node: Node, domains: Domains) -> int | None:
    """Find the bound of a generation; None if nobody knows it, as for tasks and for prompts that a
    user's operator makes.
    """
    stated = node.params.get("max_prompt_tokens")
    if stated is not None:
        return int(stated)
    later_turns = 0
    prompt_port = next(iter(node.inputs.values()))
    for port in row_line(prompt_port, domains):
        above = port.node
        if above.operator.data_longest:
            longest = _find_longest_in_data(above)
            return None if longest is None else longest + later_turns
        if above.operator.traits.generates:
            prompt = most_prompt_tokens(above, domains)
            if prompt is None:
                return None
            row = prompt + int(above.params["max_tokens"])
            return min(row, above.params.get("max_context") or row) + later_turns
        if "then" in above.params:
            # No tokenizer is asked: each byte counts as a token.
            text = above.params["then"] or ""
            later_turns += NEXT_TURN + len(text.encode())
        elif issubclass(port.schema, Prompt):
            return None
    return None


def _find_longest_in_data(source: Node) -> int | None:
    longest = function_at(source.operator.data_longest)
    return longest(source.params["data"], source.params.get("split"))
