"""Environments of OpenEnv, one by its name, on a free port: `guess`, with texts as actions, and
`tools`.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    Environment,
    Observation,
    State,
    create_fastapi_app,
)
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class GuessAction(Action):
    """A number as text."""

    guess: str


class HintObservation(Observation):
    """What is told of a guess."""

    hint: str


class HiddenDigit(Environment):
    """A digit is to be found: the column `secret`, or else the seed's last one."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **columns: Any) -> Any:
        self._secret = columns.get("secret", (seed or 0) % 10)
        self._state = State(step_count=0)
        return HintObservation(hint="Guess 0 to 9.")

    def step(self, action: Any, timeout_s: float | None = None, **columns: Any) -> Any:
        self._state.step_count += 1
        is_right = int(action.guess) == self._secret
        hint = "right" if is_right else "wrong"
        return HintObservation(hint=hint, reward=float(is_right), done=is_right)

    @property
    def state(self) -> State:
        return self._state


class ToolBox(MCPEnvironment):
    """Tools, of which one fails."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("box")

        @server.tool
        def add(first: int, second: int) -> int:
            """Adds two numbers."""
            return first + second

        @server.tool
        def fail() -> str:
            """Fails."""
            raise ValueError("boom")

        super().__init__(server)
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **columns: Any) -> Any:
        self._state = State(step_count=0)
        return Observation()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **columns: Any) -> Any:
        return Observation()

    @property
    def state(self) -> State:
        return self._state


def main() -> None:
    """Serve until killed."""
    kinds: dict[str, Any] = {
        "guess": (HiddenDigit, GuessAction, HintObservation),
        "tools": (ToolBox, CallToolAction, CallToolObservation),
    }
    app = create_fastapi_app(*kinds[sys.argv[1]], max_concurrent_envs=8)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    config = uvicorn.Config(app, log_level="critical")
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
