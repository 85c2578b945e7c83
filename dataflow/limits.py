"""Limits: which values a parameter takes.

Owns: the kinds of limits, and their text in a message. Does not own: which operator has which (its
declaration), the rule that applies them (rules/parameters.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from dataflow.errors import nearest
from dataflow.schedule import Schedule

_WORDS = {
    "whole": "a whole number",
    "number": "a number",
    "flag": "True or False",
    "text": "text",
    "texts": "a string or several, none of them empty",
}

LARGEST = 2**63 - 1
"""The largest whole number that a column, a file or a kernel can hold."""

_SMALLEST32 = 2.0**-126
_LARGEST32 = (2.0 - 2.0**-23) * 2.0**127
"""Between them float32 holds a number in full precision: kernels compute with that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The values that a parameter takes.

    kind `texts`: any number of texts, none of them empty; `value`: an object of class `of`. above:
    low itself is excluded. optional: also None. pair: also two values. filled: no empty text.
    """

    kind: Literal["whole", "number", "flag", "text", "texts", "choice", "value"]
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: tuple[str, ...] = ()
    optional: bool = False
    pair: bool = False
    filled: bool = False
    of: type[Any] | None = None
    like: Any = None
    """A usual value, named in the fix."""

    def accepts(self, candidate: Any) -> bool:
        """Whether the parameter takes this value; a Schedule, whether it takes all its values."""
        if isinstance(candidate, Schedule):
            return self._accepts_schedule(candidate)
        if self.pair and isinstance(candidate, tuple):
            single = replace(self, pair=False)
            return len(candidate) == 2 and all(map(single.accepts, candidate))
        return (candidate is None and self.optional) or self._fits(candidate)

    def _accepts_schedule(self, schedule: Schedule) -> bool:
        if not self._fits(schedule.start):
            return False
        # It may end on a low that is excluded elsewhere: a learning rate falls to 0.
        if not self._fits(schedule.stop) and schedule.stop != self.low:
            return False
        return schedule.steps >= 0 and schedule.warmup >= 0

    def describe(self, candidate: Any = None) -> str:
        """Describe what is accepted: `a whole number >= 1`, as in "expected a whole number >= 1".
        candidate: the value that is refused, if there is one: it may only be too precise.
        """
        if isinstance(candidate, int) and abs(candidate) > LARGEST:
            return f"{self.describe()}, of 64 bits"
        if _is_lost_in_float32(candidate):
            return f"{self.describe()}, also in float32"
        if self.kind == "choice":
            names: list[str | None] = list(self.choices)
            if self.optional:
                names.append(None)
            return " or ".join(map(repr, names))
        words = repr(self.like) if self.kind == "value" else _WORDS[self.kind]
        if bounds := self._bounds():
            words += f" {bounds}"
        if self.pair:
            words += " or a pair of them"
        elif self.filled:
            words += " that is not empty"
        if self.optional:
            words += " or None"
        return words

    def suggestion(self, candidate: Any) -> Any:
        """The accepted value that is nearest to this one."""
        if self.kind == "choice":
            return nearest(str(candidate), self.choices) or self.choices[0]
        return self.like

    def _fits(self, candidate: Any) -> bool:
        if self.kind == "choice":
            return isinstance(candidate, str) and candidate in self.choices
        if self.kind == "flag":
            return isinstance(candidate, bool)
        if self.kind == "text":
            return isinstance(candidate, str) and bool(candidate or not self.filled)
        if self.kind == "value":
            return self.of is not None and isinstance(candidate, self.of)
        if self.kind == "texts":
            return _are_filled_texts(candidate)
        return self._fits_number(candidate)

    def _fits_number(self, candidate: Any) -> bool:
        kinds = int if self.kind == "whole" else (int, float)
        # A bool is an int to Python, but not to a user.
        if isinstance(candidate, bool) or not isinstance(candidate, kinds):
            return False
        if isinstance(candidate, int):
            return abs(candidate) <= LARGEST and self._is_within(candidate)
        return _fits_float32(candidate) and self._is_within(candidate)

    def _is_within(self, candidate: float) -> bool:
        if self.high is not None and not candidate <= self.high:
            return False
        if self.low is None:
            return True
        return candidate > self.low if self.above else candidate >= self.low

    def _bounds(self) -> str:
        if self.low is None:
            return ""
        if self.high is None:
            comparison = ">" if self.above else ">="
            return f"{comparison} {self.low:g}"
        bracket = "(" if self.above else "["
        return f"in {bracket}{self.low:g}, {self.high:g}]"


def _are_filled_texts(candidate: Any) -> bool:
    if not isinstance(candidate, (tuple, list)):
        return False
    return all(isinstance(text, str) and text for text in candidate)


def _fits_float32(candidate: float) -> bool:
    """Whether it is the same number there, but for rounding: not inf for a large one, or 0 for a
    small one. Numbers below the smallest normal one are 0 on devices that flush them.
    """
    return candidate == 0 or _SMALLEST32 <= abs(candidate) <= _LARGEST32


def _is_lost_in_float32(candidate: Any) -> bool:
    """Whether it has a finite number that does not fit."""
    if isinstance(candidate, Schedule):
        return _is_lost_in_float32((candidate.start, candidate.stop))
    if isinstance(candidate, tuple):
        return any(map(_is_lost_in_float32, candidate))
    if not isinstance(candidate, float) or not math.isfinite(candidate):
        return False
    return not _fits_float32(candidate)


def whole(low: int, *, like: int, optional: bool = False) -> Limit:
    """Accept a whole number from `low` on."""
    return Limit(kind="whole", low=low, like=like, optional=optional)


def number(
    low: float | None = None,
    high: float | None = None,
    *,
    like: float | tuple[float, float],
    above: bool = False,
    optional: bool = False,
    pair: bool = False,
) -> Limit:
    """Accept a finite number from `low` (without it, if above) to `high`."""
    return Limit(
        kind="number", low=low, high=high, above=above, like=like, optional=optional, pair=pair
    )


def flag() -> Limit:
    """Accept True or False."""
    return Limit(kind="flag", like=True)


def text(*, like: str, optional: bool = False, filled: bool = False) -> Limit:
    """Accept any text; filled: any but the empty one."""
    return Limit(kind="text", like=like, optional=optional, filled=filled)


def texts(*, like: str) -> Limit:
    """Accept any number of texts, none of them empty."""
    return Limit(kind="texts", like=like)


def choice(*names: str, optional: bool = False) -> Limit:
    """Accept one of these words."""
    return Limit(kind="choice", choices=names, optional=optional)


def instance(of: type[Any], *, like: Any, optional: bool = False) -> Limit:
    """Accept an object of this class, which its own constructor has checked. like: shown as what is
    expected, and as the fix.
    """
    return Limit(kind="value", of=of, like=like, optional=optional)
