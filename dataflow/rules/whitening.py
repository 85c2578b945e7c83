"""Normalised: an advantage is whitened over a Step once.

Owns: following along the wires what operators declare as `normalises`. Does not own: whether a
formula is right.
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import Fault
from dataflow.node import Node
from dataflow.rules.context import Context, fault_at, line_of
from dataflow.schema import Advantage


def check_one_whitening(context: Context) -> Iterator[Fault]:
    """Whitening twice. A group's normalisation may be followed by the Step's."""
    whitened_by: dict[int, Node] = {}
    for node in context.graph.nodes:
        if not any(issubclass(schema, Advantage) for schema in node.schemas):
            continue
        whitener = _find_whitener(node, whitened_by)
        if node.operator.normalises == "batch":
            if whitener is not None:
                line = line_of(whitener, node.origin)
                problem = f"its advantage is whitened already, by {whitener.name!r} ({line})"
                fix = f"leave out {node.name!r} or {whitener.name!r}"
                yield fault_at(node, "normalised", problem, fix)
            whitener = node
        if whitener is not None:
            whitened_by[id(node)] = whitener


def _find_whitener(node: Node, whitened_by: dict[int, Node]) -> Node | None:
    """What whitened the first whitened advantage of the node."""
    for port in node.inputs.values():
        if issubclass(port.schema, Advantage) and id(port.node) in whitened_by:
            return whitened_by[id(port.node)]
    return None
