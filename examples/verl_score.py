"""A score in verl's form: it imports nothing from this project and runs unchanged in verl."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """`score` is the reward; verl logs the other entries, and so does this project."""
    right = float(solution_str.strip() == ground_truth)
    digits = sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
    return {"score": 0.8 * right + 0.2 * digits, "acc": right}
