"""What only repeats what is proven, with other seeds, graphs or examples: a third of it in a turn.

Owns: the mark of such tests, which of them a turn of `.ci/run` leaves out, and how many examples
are drawn there. Does not own: the number of the turn (.ci/turn).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

Thing = TypeVar("Thing")
VARIABLE = "CI_TURN"
"""Names the turn; without it all run."""
TURNS = 3
"""After so many every test has run."""


def of_turn(repeating: Sequence[Thing]) -> list[Thing]:
    """Of things that each repeat a proof those of this turn; all outside of `.ci/run`."""
    turn = os.environ.get(VARIABLE)
    return [*repeating] if turn is None else [*repeating[int(turn) % TURNS :: TURNS]]


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The repeating tests that are not of this turn."""
    turn = os.environ.get(VARIABLE)
    if turn is None:
        return []
    repeating = [item for item in items if item.get_closest_marker("repeats")]
    return [item for place, item in enumerate(repeating) if place % TURNS != int(turn) % TURNS]


def example_count(examples: int) -> int:
    """How many examples a property test draws: a third in a turn, and each turn draws anew."""
    return examples if VARIABLE not in os.environ else -(-examples // TURNS)
