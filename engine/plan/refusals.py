"""The words of a refusal: what is wrong with a plan, or with a wish for one, and the nearest fix.

Owns: their form. Does not own: what is refused (checks/, passes/), the error (dataflow/errors.py).
"""

from __future__ import annotations


def add_fix(problem: str, fix: str) -> str:
    """`<problem>. Fix: <fix>.`, neither with a full stop of its own."""
    return f"{problem}. Fix: {fix}."
