"""Reward functions as a user writes them, for graphs that are planned, drawn or run."""

from __future__ import annotations

from collections.abc import Sequence


def exact(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1.0 if a completion is the answer."""
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def brief(completions: Sequence[str]) -> list[float]:
    """More for shorter completions."""
    return [1.0 / (1 + len(c)) for c in completions]


def zero(completions: Sequence[str], **columns: object) -> list[float]:
    return [0.0] * len(completions)
