"""Environments of Gymnasium, whose observations and actions go through text.

Owns: the adapter `gymnasium`: making one, resetting and stepping it. Does not own: how spaces are
read and written as text (../space_texts.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from ..exported_state import export_attributes
from ..space_texts import ActionReader, UnreadableAction, write_observation


class GymnasiumEnvironment:
    """One environment, made at its first `reset`, and reset for each episode."""

    def __init__(
        self,
        make_environment: Callable[[], Any],
        observe: Callable[[Any], str] | None,
        act: Callable[[str], Any] | None,
        actions: tuple[str, ...],
    ) -> None:
        self._make_environment = make_environment
        self._observe = observe
        self._act = act
        self._actions = actions
        self._environment: Any = None
        self._reader = ActionReader(None, ())
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._unreadable = 0
        self._rewards = 0.0
        self._end: str | None = None
        self._info: Mapping[str, Any] = {}

    def reset(self, seed: int, row: Mapping[str, Any]) -> str:
        """Reset with the seed and the row's columns as `options`; returns the observation."""
        if self._environment is None:
            self._environment = self._make_environment()
            self._reader = ActionReader(self._environment.action_space, self._actions)
        self._begin()
        observation, self._info = self._environment.reset(seed=seed, options=dict(row) or None)
        return self._write(observation)

    def _write(self, observation: Any) -> str:
        if self._observe is None:
            return write_observation(self._environment, observation)
        return self._observe(observation)

    def step(self, message: Mapping[str, Any]) -> tuple[str, float | None, bool]:
        """Act as the text says; what cannot be read as an action costs a turn and is no step."""
        try:
            action = self._read(message["content"])
        except UnreadableAction as error:
            self._unreadable += 1
            return str(error), None, False
        observation, reward, terminated, truncated, self._info = self._environment.step(action)
        self._steps += 1
        self._rewards += float(reward)
        if terminated or truncated:
            self._end = "terminated" if terminated else "truncated"
        return self._write(observation), float(reward), self._end is not None

    def _read(self, text: str) -> Any:
        """The action that a text means. Raises UnreadableAction, also for a ValueError of `act`."""
        if self._act is None:
            return self._reader.read(text)
        try:
            return self._act(text)
        except ValueError as error:
            raise UnreadableAction(f"That is no action: {error}") from error

    def finish(self, reason: str) -> None:
        """All rewards were the turns' own."""

    def state(self) -> dict[str, Any]:
        """Counts, the sum of rewards, how it ended, and what JSON can hold of the last `info`."""
        return {
            "steps": self._steps,
            "unreadable": self._unreadable,
            "rewards": self._rewards,
            "end": self._end,
            "info": export_attributes(self._info),
        }

    def close(self) -> None:
        """Close the environment, if one was made."""
        if self._environment is not None:
            self._environment.close()


class GymnasiumFactory:
    """Makes environments of one id, class or function."""

    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(
        self,
        entry: str | Callable[..., Any],
        functions: Mapping[str, Callable[..., Any]],
        arguments: Mapping[str, Any],
    ) -> None:
        self._entry = entry
        self._observe: Callable[[Any], str] | None = functions.get("observe")
        self._act: Callable[[str], Any] | None = functions.get("act")
        self._actions: tuple[str, ...] = tuple(arguments["actions"])
        self._arguments: Mapping[str, Any] = arguments["arguments"]
        self.columns: tuple[str, ...] = tuple(arguments["columns"])

    def make(self) -> GymnasiumEnvironment:
        """The environment itself is made by its first `reset`."""
        return GymnasiumEnvironment(self._make_environment, self._observe, self._act, self._actions)

    def _make_environment(self) -> Any:
        if not isinstance(self._entry, str):
            return self._entry(**self._arguments)
        return importlib.import_module("gymnasium").make(self._entry, **self._arguments)


def load(target: Any, arguments: Mapping[str, Any]) -> GymnasiumFactory:
    """target: an id, class or function, then functions, which `functions` in the arguments names:
    `observe` and `act`. The other arguments: `actions`, names of a Discrete space's, `columns`, and
    the environment's own `arguments`.
    """
    entry = target[0]
    functions = dict(zip(arguments["functions"], target[1:]))  # noqa: B905 - Python 3.9
    if isinstance(entry, str):
        importlib.import_module("gymnasium")  # before the fork, once for all episodes
    return GymnasiumFactory(entry, functions, arguments)
