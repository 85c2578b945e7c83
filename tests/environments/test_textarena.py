"""Games of TextArena."""

from __future__ import annotations

from typing import Any

import pytest

from operators.environment_kinds import textarena_environment
from tests.environments.episodes import texts

PACKAGE = "textarena"
SOLUTION = ["A C", "A B", "C B", "A C", "B A", "B C", "A C"]


def test_tower_of_hanoi_is_solved(begin: Any) -> None:
    episode = begin(textarena_environment("TowerOfHanoi-v0"))
    assert "Tower of Hanoi with 3 disks" in episode.first.text
    assert "A: [3, 2, 1]" in episode.first.text
    replies = [episode.say(f"I move [{move}].") for move in SOLUTION]
    assert [reply.done for reply in replies] == [False] * 6 + [True]
    # Each answer has what is new alone: neither the prompt nor what the player wrote.
    assert texts(replies[0]) == [
        "You moved disk 1 from A to C.\nCurrent Board: \nA: [3, 2]\nB: []\nC: [1]\n."
    ]
    final = episode.end()
    assert final.reward == 1.0
    assert final.state["steps"] == 7
    assert "solved" in final.state["reason"]


def test_a_number_is_guessed(begin: Any) -> None:
    episode = begin(textarena_environment("GuessTheNumber-v0-hardcore"))
    assert "between 1 and 50 within 10 turns" in episode.first.text
    low, high, reply = 1, 50, episode.first
    while not reply.done:
        guess = (low + high) // 2
        reply = episode.say(f"[{guess}]")
        if "lower" in str(reply.messages):
            high = guess - 1
        else:
            low = guess + 1
    assert episode.end().reward == 1.0


def test_an_invalid_move_is_answered_and_the_second_one_ends_the_game(begin: Any) -> None:
    episode = begin(textarena_environment("GuessTheNumber-v0-hardcore"))
    first = episode.say("[77]")
    assert "invalid move" in texts(first)[0]
    assert not first.done
    assert episode.say("[78]").done
    assert episode.end().state["invalid_move"] is True


def test_the_seed_decides_and_arguments_are_the_games(begin: Any) -> None:
    environment = textarena_environment("GuessTheNumber-v0", arguments={"max_number": 1000000})
    answers: list[list[str]] = []
    for seed in (3, 3, 4, 5):
        episode = begin(environment, seed=seed)
        assert "1000000" in episode.first.text
        hints = [texts(episode.say(f"[{guess}]"))[0] for guess in range(10000, 90001, 10000)]
        answers.append(hints)
    assert answers[0] == answers[1]
    assert episode.end().reward is None  # the game is not over


def test_a_game_of_two_is_refused(begin: Any) -> None:
    fault = begin(textarena_environment("TicTacToe-v0")).first.fault
    assert fault is not None
    assert "number of players" in fault.text


@pytest.mark.parametrize("name", ["NoGame-v0"])
def test_a_game_that_is_not_there_is_a_fault(begin: Any, name: str) -> None:
    fault = begin(textarena_environment(name)).first.fault
    assert fault is not None
    assert name in fault.text
