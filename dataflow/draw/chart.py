"""Charts as SVG pictures: of metrics over Steps, and of what differs between things with labels.

Owns: axes, lines and colours. Does not own: which metrics are worth a chart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from dataflow.draw.layer_draft import Size
from dataflow.draw.shapes import write_document, write_text_at
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
"""Pixels of a letter, roughly."""


def draw_chart(title: str, lines: Mapping[str, Points]) -> str:
    """Draw a line for each name; values that are not finite leave a gap. At least one value is
    finite. Lines beyond the number of COLOURS are left out, and the title says so.
    """
    title = _complete_title(title, lines)
    drawn_lines = {name: list(thin_points(points)) for name, points in _first_lines(lines)}
    frame = _Frame(_join_points(drawn_lines))
    body = [write_text_at(_LEFT, 18, title, "name"), *frame.axes()]
    for colour, points in zip(COLOURS, drawn_lines.values(), strict=False):
        body += frame.line(points, colour)
    body += _legend(list(drawn_lines))
    return write_document(_SIZE.width, _SIZE.height, title, body)


def draw_charts(
    title: str, panels: Mapping[str, Mapping[str, Points]], labels: Sequence[str]
) -> str:
    """Draw charts side by side, two in a row, from 0 up: points at the numbers of their labels,
    each with a dot. Every panel has at least one value, all finite and none below 0.
    """
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / 2)
    body = [write_text_at(_LEFT, 24, title, "name")]
    for number, (name, lines) in enumerate(panels.items()):
        row, column = divmod(number, 2)
        x = column * _SIZE.width
        y = 32 + row * _SIZE.height
        body.append(f'<g transform="translate({x:.0f} {y:.0f})">')
        body += _panel(name, lines, labels)
        body.append("</g>")
    width, height = columns * _SIZE.width, 36 + rows * _SIZE.height
    return write_document(width, height, title, body)


def _panel(title: str, lines: Mapping[str, Points], labels: Sequence[str]) -> Iterator[str]:
    drawn_lines = dict(_first_lines(lines))
    points = _join_points(drawn_lines)
    # The axes begin at 0 and have room for all labels.
    points += [(0.0, 0.0), (len(labels) - 1.0, 0.0)]
    frame = _Frame(points)
    yield write_text_at(_LEFT, 18, _complete_title(title, lines), "name")
    yield from frame.axes(labels)
    for colour, line_points in zip(COLOURS, drawn_lines.values(), strict=False):
        if len(line_points) > 1:
            yield from frame.line(line_points, colour)
        yield from frame.dots(line_points, colour)
    yield from _legend(list(drawn_lines))


def _first_lines(lines: Mapping[str, Points]) -> list[tuple[str, Points]]:
    """As many lines as there are colours."""
    return list(lines.items())[: len(COLOURS)]


def _join_points(lines: Mapping[str, Points]) -> list[tuple[float, float]]:
    """The points of all lines."""
    return list(itertools.chain.from_iterable(lines.values()))


def _complete_title(title: str, lines: Mapping[str, Points]) -> str:
    """A title that says how many lines are left out."""
    left_out = len(lines) - len(COLOURS)
    if left_out <= 0:
        return title
    return f"{title} ({left_out} more not shown)"


def thin_points(points: Points) -> Iterator[tuple[float, float]]:
    """Yield at most _MOST points: the means of neighbours, where there are more."""
    group_size = math.ceil(len(points) / _MOST) or 1
    for start in range(0, len(points), group_size):
        group = points[start : start + group_size]
        finite = [number for _, number in group if math.isfinite(number)]
        mean = sum(finite) / len(finite) if finite else math.nan
        last_step, _ = group[-1]
        yield last_step, mean


class _Frame:
    """The area between the axes."""

    def __init__(self, points: Points) -> None:
        steps = [step for step, _ in points]
        finite = [number for _, number in points if math.isfinite(number)]
        self._first, self._last = min(steps), max(steps)
        self._low, self._high = min(finite), max(finite)
        if self._low == self._high:
            # A constant line runs through the middle.
            room = abs(self._low) * 0.1 or 1.0
            self._low -= room
            self._high += room

    def axes(self, labels: Sequence[str] = ()) -> Iterator[str]:
        """Lines at the least, the middle and the greatest value, and the labels below; without
        labels the first and the last Step.
        """
        right, bottom = _SIZE.width - _RIGHT, _SIZE.height - _BOTTOM
        for number in (self._low, (self._low + self._high) / 2, self._high):
            y = self._y(number)
            ends = f'x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"'
            yield f'<line class="axis" {ends}/>'
            label = shown_number(number)
            x = _LEFT - 6 - _LETTER * len(label)
            yield write_text_at(x, y + 3.5, label, "soft")
        if labels:
            yield from self._ticks(labels, bottom + 14)
            return
        yield write_text_at(_LEFT, bottom + 14, f"step {self._first:.0f}", "soft")
        label = f"{self._last:.0f}"
        x = right - _LETTER * len(label)
        yield write_text_at(x, bottom + 14, label, "soft")

    def _ticks(self, labels: Sequence[str], y: float) -> Iterator[str]:
        """The labels below their points, as many as there is room for."""
        gaps = max(1, len(labels) - 1)
        room = (_SIZE.width - _LEFT - _RIGHT) / gaps
        longest = max(map(len, labels))
        every = math.ceil((longest + 1) * _LETTER / room)
        right = _SIZE.width
        for number in range(0, len(labels), every):
            width = _LETTER * len(labels[number])
            x = min(self._x(number) - width / 2, right - width)
            yield write_text_at(x, y, labels[number], "soft")

    def dots(self, points: Points, colour: str) -> Iterator[str]:
        """A dot for each."""
        for step, number in points:
            x, y = self._x(step), self._y(number)
            yield _write_dot(f"{x:.1f}", f"{y:.1f}", colour)

    def line(self, points: Points, colour: str) -> Iterator[str]:
        """A line; a value between two gaps is a dot."""
        run: list[str] = []
        # A gap behind the last point ends the last run.
        for step, number in [*points, (math.nan, math.nan)]:
            if math.isfinite(number):
                x, y = self._x(step), self._y(number)
                run.append(f"{x:.1f},{y:.1f}")
                continue
            if len(run) == 1:
                x_text, _, y_text = run[0].partition(",")
                yield _write_dot(x_text, y_text, colour)
            elif run:
                yield f'<polyline class="chart" points="{" ".join(run)}" stroke="{colour}"/>'
            run = []

    def _x(self, step: float) -> float:
        part = (step - self._first) / ((self._last - self._first) or 1.0)
        return _LEFT + part * (_SIZE.width - _LEFT - _RIGHT)

    def _y(self, number: float) -> float:
        part = (number - self._low) / (self._high - self._low)
        return _SIZE.height - _BOTTOM - part * (_SIZE.height - _TOP - _BOTTOM)


def _write_dot(x: str, y: str, colour: str) -> str:
    return f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>'


def _legend(names: Sequence[str]) -> Iterator[str]:
    """The lines' names in their colours; a single line's is the title's."""
    if len(names) < 2:
        return
    x, y = _LEFT, _SIZE.height - 10
    for colour, name in zip(COLOURS, names, strict=False):
        place = f'x="{x:.1f}" y="{y - 7:.1f}"'
        yield f'<rect {place} width="10" height="4" fill="{colour}"/>'
        yield write_text_at(x + 14, y, name, "soft")
        x += 26 + _LETTER * len(name)
