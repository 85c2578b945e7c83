"""The tools of MCP servers, over stdio and streamable HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from operators.environment_kinds import mcp_tools
from tests.environments.episodes import PooledEpisode, texts

PACKAGE = "mcp"
SERVER = str(Path(__file__).parent / "servers" / "mcp_shop.py")


def use_shop(episode: PooledEpisode) -> list[str]:
    """The answers to some calls, of which three fail."""
    names = [tool["function"]["name"] for tool in episode.first.tools]
    assert names == ["add", "fail", "read_variable", "crash"]
    parameters = episode.first.tools[0]["function"]["parameters"]
    assert parameters["properties"]["first"]["type"] == "integer"
    reply = episode.call(
        ("add", {"first": 1, "second": 2}),
        ("add", {"first": "one"}),
        ("fail", {"why": "boom"}),
        ("steal", {}),
        ("read_variable", {"name": "SHOP"}),
    )
    assert not reply.done
    assert episode.say("done").done
    assert episode.end().state == {"tool_calls": 5, "tool_failures": 3}
    return texts(reply)


def test_a_command_is_started_for_each_episode(begin: Any, python: str) -> None:
    server = mcp_tools([python, SERVER], env={"SHOP": "open"})
    answers = use_shop(begin(server))
    assert (answers[0], answers[4]) == ("3", "open")
    assert answers[1].startswith("Error: ")
    assert "fail" in answers[2]
    assert answers[3] == (
        "Error: there is no tool 'steal'; the tools are: add, fail, read_variable, crash"
    )


def test_a_url_is_a_server(begin: Any, serve: Any) -> None:
    url = serve("mcp_shop", "http").url
    answers = use_shop(begin(mcp_tools(f"{url}/mcp", headers={"X-Shop": "1"})))
    assert (answers[0], answers[4]) == ("3", "absent")


def test_a_server_that_ends_is_a_fault(begin: Any, python: str) -> None:
    fault = begin(mcp_tools([python, SERVER])).call(("crash", {})).fault
    assert fault is not None
    assert "the MCP server" in fault.text


@pytest.mark.parametrize("server", [["no-such-command"], "http://127.0.0.1:9/mcp"])
def test_a_server_that_is_not_there_is_a_fault(begin: Any, server: Any) -> None:
    fault = begin(mcp_tools(server)).first.fault
    assert fault is not None
    assert "no session with the MCP server" in fault.text
