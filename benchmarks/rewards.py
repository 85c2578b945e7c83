"""Reward functions of the benchmarks, in TRL's signature, the same code on both sides.

Owns: scoring of the settings' answers. Uses only the standard library, as the peer's environment
imports it, too.
"""

from __future__ import annotations

from typing import Any


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 if the completion is the answer, else 0."""
    return [float(text == want) for text, want in zip(completions, answer, strict=True)]


def agreement(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The share of the longer one's positions at which completion and answer agree."""
    return [
        sum(a == b for a, b in zip(text, want, strict=False)) / max(len(text), len(want))
        for text, want in zip(completions, answer, strict=True)
    ]


def even_share(completions: list[str], **_: Any) -> list[float]:
    """The share of even digits in a completion of any length; 0 for an empty one."""
    return [sum(c in "02468" for c in text) / len(text) if text else 0.0 for text in completions]


def share_of_digits(completions: list[str], **columns: object) -> list[float]:
    """The share of an answer's letters that are digits."""
    rewards: list[float] = []
    for text in completions:
        digit_count = sum(letter.isdigit() for letter in text)
        rewards.append(digit_count / max(1, len(text)))
    return rewards


REWARDS = {function.__name__: function for function in (exact_match, agreement, even_share)}
