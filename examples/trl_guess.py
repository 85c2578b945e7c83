"""An environment and a reward as TRL has them: this file imports nothing from this project, and
`GRPOTrainer(environment_factory=GuessNumber, reward_funcs=solved)` runs it unchanged.
"""

from __future__ import annotations

from typing import Any


class GuessNumber:
    """Each public method with a docstring is a tool; `reset` gets the columns of the row."""

    def __init__(self) -> None:
        self.reward = 0.0
        self._number = 0

    def reset(self, answer: str, **kwargs: object) -> str:
        """What is returned is added to the prompt."""
        self.reward = 0.0
        self._number = int(answer)
        return " guess it"

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.

        Returns:
            Whether the number is higher or lower.
        """
        if number == self._number:
            self.reward = 1.0
            return "right"
        return "higher" if number < self._number else "lower"


def solved(environments: list[Any], **kwargs: object) -> list[float]:
    """The reward that each environment ended with."""
    return [environment.reward for environment in environments]
