"""The picture of the coordinator's curves: microseconds an event over the number of Workers.

Owns: the layout. Does not own: the numbers (coordinator.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import ceil, log

WIDTH, HEIGHT, LEFT, TOP = 460, 240, 60, 60
COLOURS = ("#2f6fb3", "#d4953a", "#5aa469")

_STYLE = 'font-family="Inter, Helvetica, Arial, sans-serif" font-size="12"'
_UNIT = 20
"""Microseconds between two lines."""
_APART = 14
"""Between two names."""
Points = Sequence[tuple[int, float]]


def picture(curves: Mapping[str, Points]) -> str:
    """An SVG; Workers are on a logarithmic axis, which begins and ends with the least and most."""
    most = max(each for points in curves.values() for _, each in points)
    high = ceil(most / _UNIT) * _UNIT
    workers = [count for count, _ in next(iter(curves.values()))]
    wide, tall = LEFT + WIDTH + 130, TOP + HEIGHT + 50
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" {_STYLE}>',
        f'<rect width="{wide}" height="{tall}" fill="white"/>',
        f'<text x="{LEFT}" y="28" font-size="15">The coordinator: CPU time of an event</text>',
        f'<text x="{LEFT}" y="46" fill="#667">microseconds, by Workers that generate</text>',
        f'<g transform="translate({LEFT},{TOP})">',
        *_axes(workers, high),
    ]
    ends = apart([_y(points[-1][1], high) for points in curves.values()])
    for colour, end, (name, points) in zip(COLOURS, ends, curves.items(), strict=True):
        at = [(_x(count, workers), _y(each, high)) for count, each in points]
        lines += _line(at, colour)
        lines.append(
            f'<text x="{WIDTH + 10}" y="{end + 4:.1f}" fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join([*lines, "</g>", "</svg>"]) + "\n"


def _x(count: int, workers: Sequence[int]) -> float:
    return WIDTH * log(count / workers[0]) / log(workers[-1] / workers[0])


def _y(each: float, high: float) -> float:
    return HEIGHT * (1 - each / high)


def _axes(workers: Sequence[int], high: int) -> Iterator[str]:
    for value in range(0, high + 1, _UNIT):
        y = _y(value, high)
        yield f'<line x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e6e9ef"/>'
        yield f'<text x="-8" y="{y + 4:.1f}" text-anchor="end" fill="#99a">{value}</text>'
    for count in workers:
        x = _x(count, workers)
        where = f'x="{x:.1f}" y="{HEIGHT + 20}" text-anchor="middle"'
        yield f'<text {where} fill="#99a">{count:,}</text>'


def apart(ends: Sequence[float]) -> list[float]:
    """The same heights, moved up where one would stand in the way of another below it."""
    found = list(ends)
    below = float(HEIGHT + _APART)
    for place in sorted(range(len(ends)), key=lambda place: -ends[place]):
        below = found[place] = min(ends[place], below - _APART)
    return found


def _line(points: Sequence[tuple[float, float]], colour: str) -> Iterator[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
