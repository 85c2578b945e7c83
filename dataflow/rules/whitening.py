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


def check(context: Context) -> Iterator[Fault]:
    """Whitening twice. A group's normalisation may be followed by the Step's."""
    by: dict[int, Node] = {}
    for node in context.graph.nodes:
        if not any(issubclass(s, Advantage) for s in node.schemas):
            continue
        done = _whitened_by(node, by)
        if node.operator.normalises == "batch":
            if done is not None:
                line = line_of(done, node.origin)
                problem = f"its advantage is whitened already, by {done.name!r} ({line})"
                fix = f"leave out {node.name!r} or {done.name!r}"
                yield fault_at(node, "normalised", problem, fix)
            done = node
        if done is not None:
            by[id(node)] = done


def _whitened_by(node: Node, by: dict[int, Node]) -> Node | None:
    """What whitened the first whitened advantage of the node."""
    advantages = [p.node for p in node.inputs.values() if issubclass(p.schema, Advantage)]
    return next((by[id(n)] for n in advantages if id(n) in by), None)
