"""The last pass: changes nothing, and refuses a plan that cannot run.

Owns: the error. Does not own: the checks (engine/plan/checks).
"""

from __future__ import annotations

from dataflow.errors import PlanError
from engine.plan.checks import CHECKS
from engine.plan.draft import Draft


def verify_plan(draft: Draft) -> Draft:
    """Return the same draft. Raises PlanError with every check that failed, by its name."""
    problems: list[str] = []
    for name, find_problems in CHECKS.items():
        problems += [f"{name}: {problem}" for problem in find_problems(draft)]
    if problems:
        raise PlanError("\n".join(problems))
    return draft
