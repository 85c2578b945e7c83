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
"""What a column, a file or a kernel can hold of a whole number."""

_SMALLEST32, _LARGEST32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
"""What float32 holds in full precision, besides 0: kernels compute with that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The values that a parameter takes. `above`: low itself is excluded. optional: also None.
    pair: also two values. filled: no empty text. kind `texts`: any number of texts, none of them
    empty; `value`: an object of class `of`.
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

    def accepts(self, value: Any) -> bool:
        """Whether the parameter takes this value; a Schedule, whether it takes all its values."""
        if isinstance(value, Schedule):
            return self._accepts_schedule(value)
        if self.pair and isinstance(value, tuple):
            single = replace(self, pair=False)
            return len(value) == 2 and all(map(single.accepts, value))
        return (value is None and self.optional) or self._fits(value)

    def _accepts_schedule(self, value: Schedule) -> bool:
        ends = self._fits(value.start) and (self._fits(value.stop) or value.stop == self.low)
        return ends and value.steps >= 0 and value.warmup >= 0

    def expected(self, found: Any = None) -> str:
        """`a whole number >= 1`, as in "expected a whole number >= 1". found: the value, if any."""
        if isinstance(found, int) and abs(found) > LARGEST:
            return f"{self.expected()}, of 64 bits"
        if _is_lost_in_float32(found):
            return f"{self.expected()}, also in float32"
        if self.kind == "choice":
            return " or ".join(map(repr, self.choices))
        word = f"{self.like!r}" if self.kind == "value" else _WORDS[self.kind]
        bounds = self._bounds()
        also = " or a pair of them" if self.pair else " that is not empty" if self.filled else ""
        return f"{word}{f' {bounds}' if bounds else ''}{also}{' or None' if self.optional else ''}"

    def suggestion(self, value: Any) -> Any:
        """The nearest value that is accepted."""
        if self.kind == "choice":
            return nearest(str(value), self.choices) or self.choices[0]
        return self.like

    def _fits(self, value: Any) -> bool:
        if self.kind == "choice":
            return isinstance(value, str) and value in self.choices
        if self.kind == "flag":
            return isinstance(value, bool)
        if self.kind == "text":
            return isinstance(value, str) and bool(value or not self.filled)
        if self.kind == "value":
            return self.of is not None and isinstance(value, self.of)
        if self.kind == "texts":
            return isinstance(value, (tuple, list)) and all(isinstance(v, str) and v for v in value)
        return self._fits_number(value)

    def _fits_number(self, value: Any) -> bool:
        kinds = int if self.kind == "whole" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        if isinstance(value, int):
            return abs(value) <= LARGEST and self._within(value)
        return _fits_float32(value) and self._within(value)

    def _within(self, value: float) -> bool:
        high_enough = self.low is None or (value > self.low if self.above else value >= self.low)
        return high_enough and (self.high is None or value <= self.high)

    def _bounds(self) -> str:
        if self.low is None:
            return ""
        if self.high is None:
            return f"{'>' if self.above else '>='} {self.low:g}"
        return f"in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"


def _fits_float32(value: float) -> bool:
    """Whether it is the same number there, but for rounding: not inf for a large one, or 0 for a
    small one. Numbers below the smallest normal one are 0 on devices that flush them.
    """
    return value == 0 or _SMALLEST32 <= abs(value) <= _LARGEST32


def _is_lost_in_float32(value: Any) -> bool:
    """Whether it has a finite number that does not fit."""
    if isinstance(value, Schedule):
        return _is_lost_in_float32((value.start, value.stop))
    if isinstance(value, tuple):
        return any(map(_is_lost_in_float32, value))
    return isinstance(value, float) and math.isfinite(value) and not _fits_float32(value)


def whole(low: int, *, like: int, optional: bool = False) -> Limit:
    """A whole number from `low` on."""
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
    """A finite number from `low` (without it, if above) to `high`."""
    return Limit(
        kind="number", low=low, high=high, above=above, like=like, optional=optional, pair=pair
    )


def flag() -> Limit:
    """True or False."""
    return Limit(kind="flag", like=True)


def text(*, like: str, optional: bool = False, filled: bool = False) -> Limit:
    """Any text; filled: but the empty one."""
    return Limit(kind="text", like=like, optional=optional, filled=filled)


def texts(*, like: str) -> Limit:
    """Texts, none of them empty."""
    return Limit(kind="texts", like=like)


def choice(*names: str) -> Limit:
    """One of these words."""
    return Limit(kind="choice", choices=names)


def value(of: type[Any], *, like: Any, optional: bool = False) -> Limit:
    """An object of this class, which its own constructor has checked. like: shown as what is
    expected, and as the fix.
    """
    return Limit(kind="value", of=of, like=like, optional=optional)
