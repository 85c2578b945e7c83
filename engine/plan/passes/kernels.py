"""Which kernel runs each node.

Owns: the choice, by the operator's order of preference and what is installed. Does not
own: the kernels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from dataflow.errors import PlanError
from engine.plan.draft import Draft
from engine.plan.plan import PlannedNode


def choose_kernels(draft: Draft) -> Draft:
    """The first kernel of each operator whose module is there. Raises PlanError for an operator without one."""
    offered = {n.name: n.operator.kernels for n in draft.graph.nodes}
    return replace(draft, nodes=tuple(_chosen(n, offered[n.name]) for n in draft.nodes))


def _chosen(node: PlannedNode, offered: Mapping[str, str]) -> PlannedNode:
    for path in offered.values():
        module = path.partition(":")[0]
        if _installed(module):
            return replace(node, kernel=path)
    tried = ", ".join(offered.values()) or "none is declared"
    problem = f"{node.name}: operator {node.operator!r} has no kernel here (tried: {tried})"
    raise PlanError(f"{problem}. Fix: install one, or leave the node out.")


@cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
