"""Plain Python functions as the tools of an episode.

Owns: the adapter `tools`, for `operators.environments.tools`. Does not own: how a call is run and
answered (tool_calls.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ..tool_calls import ToolCalls, ToolTurn
from ..tool_schemas import describe_tool


class FunctionTools:
    """An episode with functions to call; over when the model calls none."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], tools: Sequence[Any]) -> None:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        self._functions = functions
        self._schemas = schemas
        self._calls = ToolCalls(functions, schemas)

    def reset(self, seed: int, row: Mapping[str, Any]) -> None:
        """Begin an episode: nothing is added to the prompt."""
        self._calls = ToolCalls(self._functions, self._schemas)

    def step(self, message: Mapping[str, Any]) -> ToolTurn | Awaitable[ToolTurn]:
        """Answer the message's calls; done where it has none."""
        return self._calls.answer(message)

    def finish(self, reason: str) -> None:
        """Nothing is left to score."""

    def state(self) -> dict[str, Any]:
        """How many calls there were, and how many failed."""
        return dict(self._calls.counts())

    def close(self) -> None:
        """Nothing is open."""


class FunctionToolsFactory:
    """Makes episodes with the same functions."""

    columns: tuple[str, ...] = ()

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self.tools = [describe_tool(function) for function in functions]
        self._functions = {function.__name__: function for function in functions}

    def make(self) -> FunctionTools:
        """An environment without state of its own."""
        return FunctionTools(self._functions, self.tools)


def load(
    target: Sequence[Callable[..., Any]], arguments: Mapping[str, Any]
) -> FunctionToolsFactory:
    """target: the functions. Raises ToolSchemaError where one has no schema."""
    return FunctionToolsFactory(target)
