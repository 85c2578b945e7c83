"""The environment of the benchmark of agents, in TRL's form, the same class on both sides.

Owns: a search for a number, and its reward. Uses only the standard library, as the peer's
environment imports it, too.
"""

from __future__ import annotations

from typing import Any

NUMBERS = range(100, 1000)


class NumberSearch:
    """Says whether a guess is too low or too high, as often as it is asked."""

    def reset(self, number: int, **_: Any) -> None:
        """number: the one to be found."""
        self._number = number
        self._guess: int | None = None

    def guess(self, number: int) -> str:
        """Compare a guess with the hidden number.

        Args:
            number: A whole number of three digits.
        """
        self._guess = int(number)
        if self._guess < self._number:
            return "It is higher."
        if self._guess > self._number:
            return "It is lower."
        return "That is it."

    def get_reward(self) -> float:
        """1 for a last guess that is right, less the further off it is; 0 without a guess."""
        if self._guess is None:
            return 0.0
        return max(0.0, 1.0 - abs(self._guess - self._number) / len(NUMBERS))
