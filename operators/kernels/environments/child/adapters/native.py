"""A user's own class: `reset(seed=, **row)`, `step(message)`, and `finish`, `close`, `state`.

Owns: which of its methods and parameters a class has, and what its `step` may return. Does not own:
checks of messages and numbers (../calls.py, the pool).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from ..faults import AnswerRefused, describe_value

_TURN = ("messages", "reward", "done")
_EVERY_COLUMN = "*"


def load(target: Any, arguments: dict[str, Any]) -> NativeFactory:
    """Environments of a class, or of a function that makes one."""
    return NativeFactory(target, arguments)


class NativeFactory:
    """Makes environments; arguments: keywords of the class."""

    tools: tuple[dict[str, Any], ...] = ()

    def __init__(self, target: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self._target = target
        self._arguments = arguments
        self.columns: tuple[str, ...] = (_EVERY_COLUMN,)
        if isinstance(target, type):
            _method(target, "step")
            self.columns = _ResetParameters(_method(target, "reset"), skipped=1).columns()

    def make(self) -> NativeEnvironment:
        """A new object of the user's."""
        return NativeEnvironment(self._target(**self._arguments))


class NativeEnvironment:
    """One object of the user's, as the contract of adapters has it."""

    def __init__(self, user_object: Any) -> None:
        self._user_object = user_object
        self._reset = _method(user_object, "reset")
        self._step = _method(user_object, "step")
        self._parameters = _ResetParameters(self._reset)

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The object's own `tools`, where it has a list of schemas."""
        tools = getattr(self._user_object, "tools", None)
        return tools if isinstance(tools, list) else None

    def reset(self, seed: int, row: dict[str, Any]) -> Any:
        """Its `reset`, with those of the columns that it takes, and the seed if it takes one."""
        return self._reset(**self._parameters.choose(seed, row))

    def step(self, message: dict[str, Any]) -> Any:
        """Its `step`, whose Turn, tuple or dict becomes a tuple."""
        returned = self._step(message)
        if inspect.isawaitable(returned):
            return _await_turn(returned)
        return _read_turn(returned)

    def finish(self, reason: str) -> Any:
        """Its `finish`, where it has one."""
        finish = getattr(self._user_object, "finish", None)
        return finish(reason) if callable(finish) else None

    def state(self) -> Any:
        """What its `state()` returns; without one, its public attributes that JSON can hold."""
        state = getattr(self._user_object, "state", None)
        if callable(state):
            return state()
        attributes = getattr(self._user_object, "__dict__", {})
        return {name: held for name, held in attributes.items() if _is_exported(name, held)}

    def close(self) -> Any:
        """Its `close`, where it has one."""
        close = getattr(self._user_object, "close", None)
        return close() if callable(close) else None


class _ResetParameters:
    """What a `reset` takes. skipped: parameters before those that are passed (self)."""

    def __init__(self, reset: Callable[..., Any], skipped: int = 0) -> None:
        names: list[str] = []
        self._takes_all = False
        for parameter in list(inspect.signature(reset).parameters.values())[skipped:]:
            if parameter.kind is parameter.VAR_KEYWORD:
                self._takes_all = True
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                names.append(parameter.name)
        self._takes_seed = "seed" in names
        self._names = tuple(name for name in names if name != "seed")

    def columns(self) -> tuple[str, ...]:
        """The dataset columns."""
        every = (_EVERY_COLUMN,) if self._takes_all else ()
        return self._names + every

    def choose(self, seed: int, row: dict[str, Any]) -> dict[str, Any]:
        """Those of a row's columns that it takes, and the seed if it takes one."""
        columns: dict[str, Any] = {}
        for name, cell in row.items():
            if name != "seed" and (self._takes_all or name in self._names):
                columns[name] = cell
        if self._takes_seed:
            columns["seed"] = seed
        return columns


def _method(owner: Any, name: str) -> Callable[..., Any]:
    method = getattr(owner, name, None)
    if callable(method):
        return method
    kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
    raise AnswerRefused(f"is a {kind} without a method `{name}`")


async def _await_turn(returned: Any) -> tuple[Any, Any, Any]:
    return _read_turn(await returned)


def _read_turn(returned: Any) -> tuple[Any, Any, Any]:
    """messages, reward and done of what `step` returned."""
    if isinstance(returned, tuple):
        if len(returned) == len(_TURN):
            return returned
    elif isinstance(returned, dict):
        if returned and set(returned) <= set(_TURN):
            return returned.get("messages", ()), returned.get("reward"), returned.get("done", False)
    elif all(hasattr(returned, name) for name in _TURN):
        return returned.messages, returned.reward, returned.done
    raise AnswerRefused(
        f"returned {describe_value(returned)} from `step`, expected a Turn, a tuple (messages,"
        " reward, done) or a dict of these"
    )


def _is_exported(name: str, held: Any) -> bool:
    if name.startswith("_"):
        return False
    try:
        json.dumps(held, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
