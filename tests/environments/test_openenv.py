"""Environments of OpenEnv, whose server is a process on the loopback."""

from __future__ import annotations

from typing import Any

from operators.environment_kinds import openenv_environment
from tests.environments.episodes import texts
from tests.environments.server_process import ServerProcess
from tests.environments.users import act_by_name

PACKAGE = "openenv"


def test_texts_are_actions(begin: Any, serve: Any) -> None:
    episode = begin(openenv_environment(serve("openenv_games", "guess").url), seed=13)
    assert episode.first.text == "Guess 0 to 9."
    reply = episode.say("1")
    assert (texts(reply), reply.reward, reply.done) == (["wrong"], 0.0, False)
    reply = episode.say("3")
    assert (texts(reply), reply.reward, reply.done) == (["right"], 1.0, True)
    assert episode.end().state["step_count"] == 2


def test_columns_and_functions_are_passed(begin: Any, serve: Any) -> None:
    url = serve("openenv_games", "guess").url
    episode = begin(openenv_environment(url, act=act_by_name, columns=["secret"]), {"secret": 5})
    assert texts(episode.say("nothing")) == ["That is no action: a digit"]
    assert "That is no action" in texts(episode.say("x"))[0]
    assert episode.say("5").done
    state = episode.end().state
    assert (state["steps"], state["refused"]) == (1, 2)


def test_what_the_server_raises_is_a_fault(begin: Any, serve: Any) -> None:
    episode = begin(openenv_environment(serve("openenv_games", "guess").url))
    fault = episode.say("no number").fault
    assert fault is not None
    assert "invalid literal" in fault.text


def test_tools_are_actions(begin: Any, serve: Any) -> None:
    episode = begin(openenv_environment(serve("openenv_games", "tools").url, tools=True))
    names = [tool["function"]["name"] for tool in episode.first.tools]
    assert names == ["add", "fail"]
    wrong = ("add", {"first": "one"})
    reply = episode.call(("add", {"first": 1, "second": 2}), ("fail", {}), wrong)
    answers = texts(reply)
    assert answers[0] == "3"
    assert "boom" in answers[1]
    assert "validation error" in answers[2]
    assert not reply.done
    assert episode.say("done").done
    assert episode.end().state["tool_failures"] == 2


def test_a_server_that_is_gone_is_a_fault(begin: Any, python: str) -> None:
    server = ServerProcess(python, "openenv_games", "tools")
    try:
        episode = begin(openenv_environment(server.url, tools=True))
    finally:
        server.end()
    fault = episode.call(("add", {"first": 1, "second": 2})).fault
    assert fault is not None
    assert "ToolsLost" in fault.text
