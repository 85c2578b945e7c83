"""Nodes whose time nobody knows, and seconds that are said of what has none.

Owns: what is refused before anything is simulated, and the fix. Does not own: the times
(priced_times.py), who knows them (engine/plan/costs.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dataflow.errors import PlanError, nearest_or_all
from engine.plan.costs import PlanCosts
from engine.plan.plan import Plan, PlannedNode


def require_known_times(
    plan: Plan, costs: PlanCosts, seconds: Mapping[str, float], cpu: Mapping[str, float]
) -> None:
    """Refuse nodes whose time nobody knows, and what is said of no function, or cannot be. Raises
    PlanError.
    """
    others = [node for node in plan.nodes if not node.traits.computes]
    functions = [node.name for node in others if node.work != "train"]
    _require_functions("seconds", seconds, functions)
    _require_functions("cpu", cpu, functions)
    for name, row_seconds in seconds.items():
        if not row_seconds >= 0:  # no number at all, too
            problem = f"{name}: expected seconds a row, 0 or more, found {row_seconds:g}"
            raise PlanError(f"seconds: {problem}. Fix: --seconds {name}=0.001.")
    for name, share in cpu.items():
        if not 0 <= share <= 1:
            problem = f"{name}: expected a share from 0 to 1, found {share:g}"
            raise PlanError(f"cpu: {problem}. Fix: --cpu {name}=0.01.")
    problems = [_find_unknown(costs, node, seconds) for node in plan.nodes]
    lines = [problem for problem in problems if problem]
    if lines:
        raise PlanError("\n".join(lines))


def _require_functions(what: str, names: Iterable[str], functions: Sequence[str]) -> None:
    for name in names:
        if name not in functions:
            problem = f"expected a node that is a function, found {name!r}"
            raise PlanError(f"{what}: {problem}. Fix: {nearest_or_all(name, functions)}.")


def _find_unknown(costs: PlanCosts, node: PlannedNode, seconds: Mapping[str, float]) -> str:
    """Why nobody knows how long a node takes; empty where somebody does."""
    if node.work == "evaluate":
        return ""
    if node.traits.computes:
        why = costs.unpriced_reason(node.name)
        if not why:
            return ""
        if costs.sizes(node.name) is None:
            fix = "a base with a config.json and safetensors"
        else:
            fix = "measure it: dataflow profile GRAPH there, and --profile FILE"
        return f"simulate: {node.name}: {why}. Fix: {fix}."
    if node.name in seconds or costs.function(node.name, 1) is not None:
        return ""
    problem = "expected the seconds of a row of a user's function, found none"
    return f"simulate: {node.name}: {problem}. Fix: --seconds {node.name}=0.001, or --profile FILE."
