"""Fill in parameters that follow from elsewhere in the graph.

Owns: the temperature of log-probs and of training, the longest completion that training may
meet, and how long the rows of a generation may be for all who read them. Does not own: defaults that
need no graph (operators/).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dataflow.node import Node, Port
from dataflow.operator import Expand, Same
from dataflow.positions import row_positions
from engine.plan.draft import Draft


def resolve(draft: Draft) -> Draft:
    """Give logprobs and train the temperature that their rows were sampled with, and train their `max_tokens`.

    A ratio of log-probs means something at one temperature only. Greedy rows (0.0), and rows that nobody sampled,
    count as sampled at 1.0. `logprobs(temperature=...)` as the user gave it stays.
    """
    notes: list[str] = []
    known = row_positions(draft.graph)

    def change(node: Node) -> Node:
        least = known.get(node.name)
        if least is not None and node.operator.work in ("decode", "source"):
            if least.node.name != node.name and node.operator.work == "decode":
                notes.append(f"{node.name}: rows of at most {least.limit} tokens, the positions of {least.model}")
            return node.changed(params=node.params | {"positions": least.limit, "positions_of": least.model})
        found = _found(node)
        if not found:
            return node
        sampler, params = found
        if params.get("temperature", 1.0) != 1.0:
            notes.append(f"{node.name}: temperature {params['temperature']}, that of {sampler}")
        return node.changed(params=node.params | params)

    return replace(draft, graph=draft.graph.map(change), notes=(*draft.notes, *notes))


def _found(node: Node) -> tuple[str, dict[str, Any]] | None:
    """The sampler's name, and the parameters to set; None for a node that needs none."""
    logprobs = node.operator.name == "logprobs" and node.params["temperature"] is None
    if not logprobs and node.operator.work != "train":
        return None
    sampler = sampler_of(node.inputs["rows"])
    if sampler is None:
        return ("nobody", {"temperature": 1.0}) if logprobs else None
    params = {"temperature": float(sampler.params["temperature"]) or 1.0}
    return sampler.name, params if logprobs else params | {"max_tokens": sampler.params["max_tokens"]}


def sampler_of(port: Port[Any]) -> Node | None:
    """The decode node that wrote these rows' tokens, None where a source did."""
    return next((p.node for p in row_line(port) if p.node.operator.work == "decode"), None)


def row_line(port: Port[Any]) -> Iterator[Port[Any]]:
    """The port, the one whose rows its rows are or come of, and so on to the source; selects are passed through."""
    at: Port[Any] | None = port
    while at is not None:
        if at.node.operator.work != "select":
            yield at
        at = _above(at)


def _above(port: Port[Any]) -> Port[Any] | None:
    node = port.node
    if node.operator.work == "select":
        return node.inputs[f"port{port.index}"]
    rows = node.operator.rows
    return node.inputs.get(rows.of) if isinstance(rows, (Same, Expand)) else None
