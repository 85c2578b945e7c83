"""What only repeats what is proven, with other seeds, graphs or examples: a third of it in a turn.

Owns: the mark of such tests, which of them a turn of `.ci/run` leaves out, and how many examples
are drawn. Does not own: the number of the turn (.ci/turn).
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
EXAMPLES = "TEST_EXAMPLES"
"""`all`: property tests draw all of their examples."""


def of_turn(repeating: Sequence[Thing]) -> list[Thing]:
    """Of things that each repeat a proof those of this turn; all outside of `.ci/run`."""
    turn = os.environ.get(VARIABLE)
    return [*repeating] if turn is None else [*repeating[int(turn) % TURNS :: TURNS]]


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The repeating tests that are not of this turn: of the one that `repeats(turn=...)` names, or
    each third of the others.
    """
    turn = os.environ.get(VARIABLE)
    if turn is None:
        return []
    named: dict[pytest.Item, int] = {
        item: mark.kwargs["turn"]
        for item in items
        for mark in item.iter_markers("repeats")
        if "turn" in mark.kwargs
    }
    others = [i for i in items if i.get_closest_marker("repeats") and i not in named]
    turn_of = named | {item: place % TURNS for place, item in enumerate(others)}
    return [item for item, third in turn_of.items() if third != int(turn) % TURNS]


def example_count(examples: int) -> int:
    """How many examples a property test draws: a third, as each run draws others; all of them where
    EXAMPLES says so.
    """
    return examples if os.environ.get(EXAMPLES) == "all" else -(-examples // TURNS)
