"""The tool calls of a model's message, run one after another and answered.

Owns: which function a call means, its answer as a message of role `tool`, errors as texts that a
model can act on, counts of both. Does not own: schemas (tool_schemas.py), when an episode is over
(adapters).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any

from .awaitable_steps import complete
from .tool_arguments import convert_arguments, find_argument_problem

ToolTurn = tuple[list[dict[str, Any]], Any, bool]
"""Messages, reward or None, and done."""


def write_json(returned: Any) -> str:
    """Write what a tool returned: a string as it is, anything else as JSON; what JSON cannot hold
    as its str.
    """
    if isinstance(returned, str):
        return returned
    return json.dumps(returned, ensure_ascii=False, default=str)


def write_error(text: str) -> str:
    """Write why a call failed, as a sentence."""
    return f"Error: {text}"


class ToolsLost(ConnectionError):
    """What runs the tools is gone: no text to the model helps, and the episode cannot go on."""


class ToolFailed(Exception):
    """A call failed; the text is the model's, as it is."""


def describe_error(error: BaseException) -> str:
    """Write `ValueError: boom`, or the class alone where an error has no text; of ToolFailed its
    text.
    """
    text = str(error).strip()
    if isinstance(error, ToolFailed):
        return text
    name = type(error).__name__
    return f"{name}: {text}" if text else name


class ToolCalls:
    """Runs calls by a table of functions. calls, failures: how many there were.

    functions: by name; each is called with the call's arguments as keywords, and may return an
    awaitable. schemas: of those whose arguments are checked before they are called. converts:
    arguments become Enum members and tuples where the annotations say so. write, write_failure: an
    answer's text. describe: an exception as text.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        converts: bool = True,
        write: Callable[[Any], str] = write_json,
        write_failure: Callable[[str], str] = write_error,
        describe: Callable[[BaseException], str] = describe_error,
    ) -> None:
        self._functions = functions
        self._schemas = schemas
        self._converts = converts
        self._write = write
        self._write_failure = write_failure
        self._describe = describe
        self.calls = 0
        self.failures = 0

    def answer(self, message: Mapping[str, Any]) -> ToolTurn | Awaitable[ToolTurn]:
        """Answer all calls of a message, in their order, then those that could not be read. Returns
        what `step` of an environment does, without a reward: over where there are neither.
        """
        return complete(self._answer(message))

    def _answer(self, message: Mapping[str, Any]) -> Generator[Any, Any, ToolTurn]:
        answers: list[dict[str, Any]] = []
        for call in message.get("tool_calls") or ():
            answer = yield from self._answer_call(call["function"])
            answers.append(answer)
        for problem in message.get("tool_call_errors") or ():
            self.calls += 1
            text = f"this call could not be read: {problem}. Write it again, as the tools' form is."
            answers.append(self._failure("", text))
        return answers, None, not answers

    def _answer_call(self, call: Mapping[str, Any]) -> Generator[Any, Any, dict[str, Any]]:
        name, arguments = call["name"], call.get("arguments") or {}
        self.calls += 1
        problem = self._find_problem(name, arguments)
        if problem:
            return self._failure(name, problem)
        function = self._functions[name]
        try:
            returned = yield function(**self._convert(function, arguments))
            return {"role": "tool", "name": name, "content": self._write(returned)}
        except ToolsLost:
            raise
        except Exception as error:  # of the user's function: the model is told, the episode goes on
            return self._failure(name, self._describe(error))

    def _convert(
        self, function: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return convert_arguments(function, arguments) if self._converts else arguments

    def _find_problem(self, name: str, arguments: Any) -> str | None:
        if name not in self._functions:
            names = ", ".join(self._functions) or "none"
            return f"there is no tool {name!r}; the tools are: {names}"
        if name not in self._schemas:
            return None
        problem = find_argument_problem(self._schemas[name], arguments)
        return f"{name}: {problem}" if problem else None

    def _failure(self, name: str, text: str) -> dict[str, Any]:
        self.failures += 1
        answer = {"role": "tool", "name": name, "content": self._write_failure(text)}
        if not name:
            del answer["name"]
        return answer

    def counts(self) -> dict[str, int]:
        """`tool_calls` and `tool_failures`, for an environment's state."""
        return {"tool_calls": self.calls, "tool_failures": self.failures}
