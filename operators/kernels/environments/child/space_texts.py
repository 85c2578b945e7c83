"""Gymnasium's spaces as text: what a model is shown, and what it may write.

Owns: observations as text where a user gives no function, actions read from text for the spaces
Discrete, MultiDiscrete, MultiBinary and Text. Does not own: environments (adapters/gymnasium.py).
Imports no gymnasium: a space is known by its class's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_INTEGER = re.compile(r"(?<![\w.])-?\d+(?![\w]|\.\d)")
_COLOURED = re.compile(r"\x1b\[\d+m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")


class UnreadableAction(ValueError):
    """A text that means no action; its text says to the model what is allowed."""


class ActionReader:
    """Reads actions of one space. names: of the actions of a Discrete space, in their order; in a
    model's text they count whatever their case.
    """

    def __init__(self, space: Any, names: Sequence[str]) -> None:
        self._space = space
        self._kind = type(space).__name__
        self._names = tuple(names)
        self._numbers = {name.casefold(): index for index, name in enumerate(self._names)}
        patterns = [re.escape(name) for name in sorted(self._names, key=len, reverse=True)]
        self._pattern = re.compile(rf"(?<!\w)({'|'.join(patterns)})(?!\w)", re.IGNORECASE)

    def read(self, text: str) -> Any:
        """The last action that a text names. Raises UnreadableAction where it names none, TypeError
        for a space of another kind.
        """
        if self._kind == "Discrete":
            return self._read_discrete(text)
        if self._kind in ("MultiDiscrete", "MultiBinary"):
            return self._read_numbers(text)
        if self._kind == "Text":
            return self._read_text(text)
        problem = f"expected a space of actions that text can name, found {self._kind}"
        raise TypeError(f"{problem}. Fix: act=, a function from the model's text to an action")

    def _read_discrete(self, text: str) -> int:
        first = int(getattr(self._space, "start", 0))
        last = first + int(self._space.n) - 1
        if self._names:
            written = self._pattern.findall(text)
            if written:
                return first + self._numbers[written[-1].casefold()]
            raise UnreadableAction(f"Expected an action, one of: {', '.join(self._names)}.")
        numbers = _INTEGER.findall(text)
        if numbers and first <= int(numbers[-1]) <= last:
            return int(numbers[-1])
        raise UnreadableAction(f"Expected an action, a number from {first} to {last}.")

    def _read_numbers(self, text: str) -> Any:
        """The last so many numbers of a text, as the space's own array."""
        sample = self._space.sample()
        numbers = [int(each) for each in _INTEGER.findall(text)][-sample.size :]
        if len(numbers) == sample.size:
            action = sample.copy()
            action.flat[:] = numbers
            if self._space.contains(action):
                return action
        raise UnreadableAction(f"Expected an action, {sample.size} numbers of {self._space}.")

    def _read_text(self, text: str) -> str:
        action = text.strip()
        if self._space.contains(action):
            return action
        space = self._space
        lengths = f"{space.min_length} to {space.max_length} characters"
        allowed = "".join(sorted(space.characters))
        raise UnreadableAction(f"Expected an action of {lengths}, of these: {allowed:.200}")


def write_observation(environment: Any, observation: Any) -> str:
    """An observation where the user gave no function for it: what the environment renders, if it
    renders text (`render_mode="ansi"`), with coloured parts in brackets; else a string as it is,
    and numbers and arrays as Python writes them.
    """
    if getattr(environment, "render_mode", None) == "ansi":
        return _without_colours(environment.render())
    return _write(observation)


def _without_colours(rendered: str) -> str:
    marked = _COLOURED.sub(r"[\1]", rendered)
    return _ESCAPE.sub("", marked).strip("\n")


def _write(observation: Any) -> str:
    if isinstance(observation, Mapping):
        lines = [f"{name}: {_write(part)}" for name, part in observation.items()]
        return "\n".join(lines)
    if isinstance(observation, tuple):
        return ", ".join(_write(part) for part in observation)
    if hasattr(observation, "tolist"):
        return str(_rounded(observation.tolist()))
    return str(observation)


def _rounded(numbers: Any) -> Any:
    """Four significant digits: of a float32 more are noise, and each is a token."""
    if isinstance(numbers, float):
        return float(f"{numbers:.4g}")
    if isinstance(numbers, list):
        return [_rounded(each) for each in numbers]
    return numbers
