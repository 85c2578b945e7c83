"""A chart of metrics over Steps, as an SVG picture.

Owns: its axes, lines and colours. Does not own: which metrics are worth a chart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from dataflow.draw.layers import Size
from dataflow.draw.shapes import document, words_at

Points = Sequence[tuple[float, float]]
"""(Step, value), Steps ascending."""

COLOURS = ("#2f6fb3", "#d4953a", "#5aa469", "#cc5f5f", "#8e68bf", "#46a0a0")
"""Of as many lines; a chart has no more."""
_SIZE = Size(width=440.0, height=210.0)
_LEFT, _TOP, _RIGHT, _BOTTOM = 58.0, 30.0, 14.0, 44.0
_MOST = 400
"""Points of a line; of more, each is the mean of several."""
_LETTER = 6.2


def chart(title: str, lines: Mapping[str, Points]) -> str:
    """A line for each name; values that are not finite leave a gap. At least one value is finite.
    Lines beyond the number of COLOURS are left out, and the title says so.
    """
    shown = {name: list(thinned(points)) for name, points in list(lines.items())[: len(COLOURS)]}
    left_out = len(lines) - len(shown)
    title += f" ({left_out} more not shown)" if left_out else ""
    frame = _Frame([point for points in shown.values() for point in points])
    body = [words_at(_LEFT, 18, title, "name"), *frame.axes()]
    for colour, points in zip(COLOURS, shown.values(), strict=False):
        body += frame.line(points, colour)
    return document(_SIZE.width, _SIZE.height, title, [*body, *_legend(list(shown))])


def thinned(points: Points) -> Iterator[tuple[float, float]]:
    """At most _MOST points: the means of neighbours, where there are more."""
    each = math.ceil(len(points) / _MOST) or 1
    for start in range(0, len(points), each):
        part = points[start : start + each]
        finite = [value for _, value in part if math.isfinite(value)]
        yield part[-1][0], sum(finite) / len(finite) if finite else math.nan


class _Frame:
    """The area between the axes."""

    def __init__(self, points: Points) -> None:
        steps = [step for step, _ in points]
        values = [value for _, value in points if math.isfinite(value)]
        self._first, self._last = min(steps), max(steps)
        self._low, self._high = min(values), max(values)
        if self._low == self._high:
            room = abs(self._low) * 0.1 or 1.0
            self._low, self._high = self._low - room, self._high + room

    def axes(self) -> Iterator[str]:
        """Lines at the least, the middle and the greatest value, and the Steps below."""
        right, bottom = _SIZE.width - _RIGHT, _SIZE.height - _BOTTOM
        for value in (self._low, (self._low + self._high) / 2, self._high):
            y = self._y(value)
            ends = f'x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"'
            yield f'<line class="axis" {ends}/>'
            label = f"{value:.3g}"
            x = _LEFT - 6 - _LETTER * len(label)
            yield words_at(x, y + 3.5, label, "soft")
        yield words_at(_LEFT, bottom + 14, f"step {self._first:g}", "soft")
        label = f"{self._last:g}"
        yield words_at(right - _LETTER * len(label), bottom + 14, label, "soft")

    def line(self, points: Points, colour: str) -> Iterator[str]:
        """A line; a value between two gaps is a dot."""
        run: list[str] = []
        for step, value in [*points, (math.nan, math.nan)]:
            if math.isfinite(value):
                run.append(f"{self._x(step):.1f},{self._y(value):.1f}")
                continue
            if len(run) == 1:
                x, _, y = run[0].partition(",")
                yield f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>'
            elif run:
                yield f'<polyline class="chart" points="{" ".join(run)}" stroke="{colour}"/>'
            run = []

    def _x(self, step: float) -> float:
        part = (step - self._first) / ((self._last - self._first) or 1.0)
        return _LEFT + part * (_SIZE.width - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        part = (value - self._low) / (self._high - self._low)
        return _SIZE.height - _BOTTOM - part * (_SIZE.height - _TOP - _BOTTOM)


def _legend(names: Sequence[str]) -> Iterator[str]:
    """The lines' names in their colours; a single line's is the title's."""
    if len(names) < 2:
        return
    x, y = _LEFT, _SIZE.height - 10
    for colour, name in zip(COLOURS, names, strict=False):
        yield f'<rect x="{x:.1f}" y="{y - 7:.1f}" width="10" height="4" fill="{colour}"/>'
        yield words_at(x + 14, y, name, "soft")
        x += 26 + _LETTER * len(name)
