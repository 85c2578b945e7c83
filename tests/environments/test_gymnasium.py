"""Environments of Gymnasium, through text."""

from __future__ import annotations

from typing import Any

import pytest

from operators.environment_kinds import gymnasium_environment
from tests.environments.episodes import texts
from tests.environments.users import AddingUp, act_on_cart, observe_cart

PACKAGE = "gymnasium"
LAKE = {"render_mode": "ansi", "is_slippery": False}
DIRECTIONS = ["left", "down", "right", "up"]


def test_a_lake_is_crossed(begin: Any) -> None:
    lake = gymnasium_environment("FrozenLake-v1", actions=DIRECTIONS, arguments=LAKE)
    episode = begin(lake)
    assert episode.first.text == "[S]FFF\nFHFH\nFFFH\nHFFG"
    moves = ["right", "RIGHT", "I could go up, but I go down", "down", "down"]
    for move in moves:
        reply = episode.say(move)
        assert (reply.reward, reply.done) == (0.0, False)
    last = episode.say("right")
    assert (last.reward, last.done) == (1.0, True)
    assert texts(last)[0].endswith("HFF[G]")
    state = episode.end().state
    assert (state["steps"], state["rewards"], state["end"]) == (6, 1.0, "terminated")


def test_what_is_no_action_is_answered(begin: Any) -> None:
    lake = gymnasium_environment("FrozenLake-v1", actions=DIRECTIONS, arguments=LAKE)
    episode = begin(lake)
    reply = episode.say("leftwards")
    assert texts(reply) == ["Expected an action, one of: left, down, right, up."]
    assert (reply.reward, reply.done) == (None, False)
    assert episode.end().state["unreadable"] == 1


@pytest.mark.parametrize("text, is_read", [("1", True), ("I stick: 0.", True), ("7", False)])
def test_actions_without_names_are_numbers(begin: Any, text: str, is_read: bool) -> None:
    episode = begin(gymnasium_environment("Blackjack-v1"))
    reply = episode.say(text)
    assert (reply.reward is not None) == is_read
    assert is_read or texts(reply) == ["Expected an action, a number from 0 to 1."]


def test_a_users_functions_are_the_codec(begin: Any) -> None:
    cart = gymnasium_environment("CartPole-v1", observe=observe_cart, act=act_on_cart)
    episode = begin(cart)
    assert episode.first.text in ("leans right", "leans left")
    assert texts(episode.say("fly")) == ["That is no action: push left, or push right"]
    assert episode.say("push right").reward == 1.0


def test_arrays_are_short_and_the_seed_decides(begin: Any) -> None:
    cart = gymnasium_environment("CartPole-v1", actions=["left", "right"])
    first = begin(cart, seed=1).first.text
    assert first == begin(cart, seed=1).first.text
    assert first != begin(cart, seed=2).first.text
    assert len(first) < 50


def test_a_users_class_with_several_numbers(begin: Any) -> None:
    environment = gymnasium_environment(AddingUp, columns=["goal"], arguments={"most": 4})
    episode = begin(environment, {"goal": 4, "other": 1})
    assert episode.first.text == "sum: 0\ngoal: 4"
    assert "2 numbers" in texts(episode.say("3"))[0]
    assert "2 numbers" in texts(episode.say("1, 9"))[0]
    reply = episode.say("not 7 but 1 and 3")
    assert (reply.reward, reply.done, texts(reply)) == (0.5, True, ["4"])
    state = episode.end().state
    assert (state["end"], state["info"]) == ("truncated", {"array": [1, 3]})


def test_columns_that_are_not_named_are_no_options(begin: Any) -> None:
    environment = gymnasium_environment(AddingUp, arguments={"most": 4})
    assert begin(environment, {"goal": 4}).first.text == "sum: 0\ngoal: None"


def test_a_space_that_text_cannot_name_wants_a_function(begin: Any) -> None:
    episode = begin(gymnasium_environment("Pendulum-v1"))
    fault = episode.say("0.5").fault
    assert fault is not None
    assert "Fix: act=" in fault.text
