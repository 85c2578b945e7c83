"""Environments written for TRL's `environment_factory`, unchanged.

Owns: the adapter `trl`: which methods are tools, what `reset` gets, texts of answers as TRL writes
them, the final reward. Does not own: how a call is run (tool_calls.py), schemas (tool_schemas.py).

Of a class, `reset`, `get_reward` and a `close` without parameters are called here, and every other
public method that has a docstring is a tool. An instance is made once and reset for each episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any

from ..awaitable_steps import complete
from ..exported_state import as_number, export_attributes
from ..tool_calls import ToolCalls, ToolTurn
from ..tool_schemas import describe_tool

_NO_TOOLS = ("reset", "get_reward")


class TrlEnvironment:
    """One instance of a user's class. tools: after `reset`, what the model may call."""

    def __init__(self, instance: Any) -> None:
        methods = tool_methods(type(instance))
        self._instance = instance
        self._functions = {name: getattr(instance, name) for name in methods}
        self._calls = ToolCalls({}, {})
        self.tools = [describe_tool(method) for method in methods.values()]

    def reset(self, seed: int, row: Mapping[str, Any]) -> Any:
        """Call `reset(**row)` with what it takes of the row; the seed too, if it names that.
        Returns text or None, or an awaitable of these.
        """
        self._calls = ToolCalls(
            self._functions,
            {},
            converts=False,
            write=write_returned,
            write_failure=write_failure,
            describe=str,
        )
        return complete(self._reset(seed, row))

    def _reset(self, seed: int, row: Mapping[str, Any]) -> Generator[Any, Any, str | None]:
        reset = self._instance.reset
        observation = yield reset(**select_keywords(reset, seed, row))
        return read_observation(observation)

    def step(self, message: Mapping[str, Any]) -> ToolTurn | Awaitable[ToolTurn]:
        """Answer the message's calls; done where it has none."""
        return self._calls.answer(message)

    def finish(self, reason: str) -> Any:
        """The final reward: of `get_reward()`, or the number that the attribute `reward` is."""
        if not hasattr(type(self._instance), "get_reward"):
            return as_number(getattr(self._instance, "reward", None))
        return self._instance.get_reward()

    def state(self) -> dict[str, Any]:
        """The instance's public attributes that JSON can hold, below counts of tool calls."""
        return {**self._calls.counts(), **export_attributes(vars(self._instance))}

    def close(self) -> Any:
        """Its `close`, where it has one that is no tool."""
        close = getattr(self._instance, "close", None)
        return close() if callable(close) and "close" not in self._functions else None


def tool_methods(kind: type) -> dict[str, Callable[..., Any]]:
    """The public methods of a class that are tools, by name, in the order of their names."""
    methods: dict[str, Callable[..., Any]] = {}
    for name, method in inspect.getmembers(kind, predicate=inspect.isfunction):
        if name.startswith("_") or name in _NO_TOOLS or _is_end(name, method):
            continue
        if inspect.getdoc(method):
            methods[name] = method
    return methods


def _is_end(name: str, method: Callable[..., Any]) -> bool:
    """Whether it is a `close` of the whole: one that closes something has a parameter for that."""
    return name == "close" and len(inspect.signature(method).parameters) == 1


def select_keywords(reset: Callable[..., Any], seed: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """What of a row a `reset` takes: all with `**row`, else the columns that it names. The seed is
    passed where it names `seed` and the row has none.
    """
    parameters = inspect.signature(reset).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    keywords = {name: cell for name, cell in row.items() if takes_all or name in parameters}
    if "seed" in parameters:
        keywords.setdefault("seed", seed)
    return keywords


def read_observation(observation: Any) -> str | None:
    """What `reset` returned, as text. Raises TypeError for what is neither text nor parts of it."""
    if observation is None or isinstance(observation, str):
        return observation
    text = join_text_parts(observation)
    if text is None:
        problem = f"`reset` returned {observation!r:.100}, expected a string or None"
        raise TypeError(f"{problem}. Fix: return what the user turn goes on with")
    return text


def join_text_parts(content: Any) -> str | None:
    """The text of a list of `{"type": "text", "text": ...}`; None if it is anything else."""
    if not isinstance(content, list) or not content:
        return None
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            return None
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def write_returned(returned: Any) -> str:
    """What a tool returned, as TRL writes it: its str, and of a list of texts these."""
    text = join_text_parts(returned)
    return str(returned) if text is None else text


def write_failure(text: str) -> str:
    """An error in TRL's form."""
    return str({"error": text})


class TrlFactory:
    """Makes instances of a user's class, or by a user's function."""

    def __init__(self, make_instance: Callable[[], Any]) -> None:
        self._make_instance = make_instance
        self.tools: Sequence[Mapping[str, Any]] = []
        self.columns: tuple[str, ...] = ("*",)
        if isinstance(make_instance, type):
            self.tools = [describe_tool(each) for each in tool_methods(make_instance).values()]

    def make(self) -> TrlEnvironment:
        """Call the class or the function. Raises TypeError where what it makes has no `reset`."""
        instance = self._make_instance()
        if not callable(getattr(instance, "reset", None)):
            problem = f"made {type(instance).__name__}, which has no `reset`"
            raise TypeError(f"{problem}. Fix: def reset(self, **row) -> str | None")
        return TrlEnvironment(instance)


def load(target: Callable[[], Any], arguments: Mapping[str, Any]) -> TrlFactory:
    """target: a class, or a function of no arguments that makes an instance. Raises ToolSchemaError
    where a method has no schema.
    """
    return TrlFactory(target)
