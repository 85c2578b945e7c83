"""Charts as SVG pictures: of metrics over Steps, and of what differs between things with labels.

Owns: axes, lines and colours. Does not own: which metrics are worth a chart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from dataflow.draw.layers import Size
from dataflow.draw.shapes import document, words_at
from dataflow.safe_text import shown_number

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
    title = _titled(title, lines)
    frame = _Frame([point for points in shown.values() for point in points])
    body = [words_at(_LEFT, 18, title, "name"), *frame.axes()]
    for colour, points in zip(COLOURS, shown.values(), strict=False):
        body += frame.line(points, colour)
    return document(_SIZE.width, _SIZE.height, title, [*body, *_legend(list(shown))])


def charts(title: str, panels: Mapping[str, Mapping[str, Points]], labels: Sequence[str]) -> str:
    """Charts side by side, two in a row, from 0 up: points at the numbers of their labels, each
    with a dot. Every panel has at least one value, all finite and none below 0.
    """
    wide, rows = min(2, len(panels)) * _SIZE.width, -(-len(panels) // 2)
    body = [words_at(_LEFT, 24, title, "name")]
    for number, (name, lines) in enumerate(panels.items()):
        x, y = (number % 2) * _SIZE.width, 32 + (number // 2) * _SIZE.height
        body += [
            f'<g transform="translate({x:.0f} {y:.0f})">',
            *_panel(name, lines, labels),
            "</g>",
        ]
    return document(wide, 36 + rows * _SIZE.height, title, body)


def _panel(title: str, lines: Mapping[str, Points], labels: Sequence[str]) -> Iterator[str]:
    shown = dict(list(lines.items())[: len(COLOURS)])
    points = [point for points in shown.values() for point in points]
    frame = _Frame([*points, (0.0, 0.0), (len(labels) - 1.0, 0.0)])
    yield words_at(_LEFT, 18, _titled(title, lines), "name")
    yield from frame.axes(labels)
    for colour, own in zip(COLOURS, shown.values(), strict=False):
        yield from frame.line(own, colour) if len(own) > 1 else ()
        yield from frame.dots(own, colour)
    yield from _legend(list(shown))


def _titled(title: str, lines: Mapping[str, Points]) -> str:
    left_out = len(lines) - len(COLOURS)
    return f"{title} ({left_out} more not shown)" if left_out > 0 else title


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

    def axes(self, labels: Sequence[str] = ()) -> Iterator[str]:
        """Lines at the least, the middle and the greatest value, and the labels below; without
        labels the first and the last Step.
        """
        right, bottom = _SIZE.width - _RIGHT, _SIZE.height - _BOTTOM
        for value in (self._low, (self._low + self._high) / 2, self._high):
            y = self._y(value)
            ends = f'x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"'
            yield f'<line class="axis" {ends}/>'
            label = shown_number(value)
            x = _LEFT - 6 - _LETTER * len(label)
            yield words_at(x, y + 3.5, label, "soft")
        if labels:
            yield from self._ticks(labels, bottom + 14)
            return
        yield words_at(_LEFT, bottom + 14, f"step {self._first:.0f}", "soft")
        label = f"{self._last:.0f}"
        yield words_at(right - _LETTER * len(label), bottom + 14, label, "soft")

    def _ticks(self, labels: Sequence[str], y: float) -> Iterator[str]:
        """The labels below their points, as many as there is room for."""
        room = (_SIZE.width - _LEFT - _RIGHT) / max(1, len(labels) - 1)
        every = math.ceil((max(map(len, labels)) + 1) * _LETTER / room)
        right = _SIZE.width
        for number, label in list(enumerate(labels))[::every]:
            wide = _LETTER * len(label)
            yield words_at(min(self._x(number) - wide / 2, right - wide), y, label, "soft")

    def dots(self, points: Points, colour: str) -> Iterator[str]:
        """A dot for each."""
        for step, value in points:
            place = f'cx="{self._x(step):.1f}" cy="{self._y(value):.1f}"'
            yield f'<circle {place} r="2.5" fill="{colour}"/>'

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
