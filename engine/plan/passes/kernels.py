"""Which kernel runs each node.

Owns: the choice: the operator's order of preference, and what is installed. Does not own: kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import takewhile

from dataflow.errors import PlanError
from dataflow.importing import located
from engine.plan.draft import Draft
from engine.plan.plan import PlannedNode


def choose_kernels(draft: Draft) -> Draft:
    """Choose each operator's first installed kernel. Raises PlanError if it has none."""
    offered = {n.name: n.operator.kernels for n in draft.graph.nodes}
    nodes = tuple(_chosen(n, offered[n.name]) for n in draft.nodes)
    passed = [note for n in nodes for note in _passed_over(n, offered[n.name])]
    return replace(draft, nodes=nodes, notes=(*draft.notes, *passed))


def _chosen(node: PlannedNode, offered: Mapping[str, str]) -> PlannedNode:
    for path in offered.values():
        if _installed(path.partition(":")[0]):
            return replace(node, kernel=path)
    tried = ", ".join(offered.values()) or "none is declared"
    problem = f"{node.name}: operator {node.operator!r} has no kernel here (tried: {tried})"
    raise PlanError(f"{problem}. Fix: install one, or leave the node out.")


def _passed_over(node: PlannedNode, offered: Mapping[str, str]) -> Iterator[str]:
    for path in takewhile(lambda path: path != node.kernel, offered.values()):
        yield f"{node.name}: kernel {path} is not installed here"


@cache
def _installed(module: str) -> bool:
    return located(module) is not None
