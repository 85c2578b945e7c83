"""Rewards in TRL's form: it imports nothing from this project and runs unchanged in TRL."""

from __future__ import annotations

import re


def correct(completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    """1.0 if the first number in the completion is the answer."""
    found = (re.search(r"\d+", text) for text in completions)
    return [
        float(match is not None and match.group() == right)
        for match, right in zip(found, answer, strict=True)
    ]


def only_digits(completions: list[str], **kwargs: object) -> list[float]:
    """The share of characters that are digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
