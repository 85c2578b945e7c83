"""SVG shapes as text: the few that pictures need, all words escaped.

Owns: SVG syntax. Does not own: the places of things (arrange.py, chart.py), colours (style.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from html import escape

from dataflow.draw.scene import Point, Rect, Words
from dataflow.draw.style import sheet

_HEAD = 8.0
"""Length of an arrow's head."""
_STRAIGHT = 0.05
"""Pixels by which the ends of a straight line may differ in x or y: less than is written."""


def write_document(
    width: float, height: float, title: str, body: Sequence[str], *, role: str = "img"
) -> str:
    """A whole SVG file. role: `img`, or `group` where what is inside can be reached by itself."""
    name = escape(title)
    size = f'width="{width:.0f}" height="{height:.0f}"'
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" {size}'
    label = f'role="{role}" aria-label="{name}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" class="dataflow" {box} {label}>']
    if role == "img":
        lines.append(f"<title>{name}</title>")
    lines.append(sheet())
    lines.append('<rect class="paper" width="100%" height="100%"/>')
    lines += body
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def write_group(kind: str, inside: Sequence[str], attributes: Mapping[str, str]) -> str:
    """A group of a class, with further attributes."""
    words = [f'class="{escape(kind)}"']
    for name, text in attributes.items():
        words.append(f'{name}="{escape(text)}"')
    return f"<g {' '.join(words)}>{''.join(inside)}</g>"


def write_words(words: Words) -> str:
    """A line of text in its class."""
    return write_text_at(words.x, words.y, words.text, words.kind)


def write_text_at(x: float, y: float, line: str, kind: str) -> str:
    """Words of a class that start at (x, y)."""
    place = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text class="{kind}" {place}>{escape(line)}</text>'


def write_rectangle(rect: Rect, kind: str, radius: float) -> str:
    """A rounded rectangle of a class."""
    place = f'x="{rect.x:.1f}" y="{rect.y:.1f}"'
    size = f'width="{rect.width:.1f}" height="{rect.height:.1f}"'
    return f'<rect class="{kind}" {place} {size} rx="{radius:g}"/>'


def write_strip(rect: Rect, kind: str) -> str:
    """An empty group that says where a page may draw."""
    place = f'data-x="{rect.x:.1f}" data-y="{rect.y:.1f}"'
    size = f'data-width="{rect.width:.1f}" data-height="{rect.height:.1f}"'
    return f'<g class="{kind}" {place} {size}></g>'


def write_drum(rect: Rect) -> str:
    """A cylinder, the symbol of something stored."""
    rim = 6.0
    top, low = rect.y + rim, rect.bottom - rim
    half = rect.width / 2
    left_side = f"M{_write_point((rect.x, top))} V{low:.1f}"
    bottom = f"a{half:.1f},{rim} 0 0 0 {rect.width:.1f},0"
    body = f'<path class="drum" d="{left_side} {bottom} V{top:.1f}"/>'
    middle = rect.x + half
    lid = f'cx="{middle:.1f}" cy="{top:.1f}" rx="{half:.1f}" ry="{rim}"'
    return f'{body}<ellipse class="drum" {lid}/>'


def write_arrow(points: Sequence[Point], *, round_corners: bool) -> str:
    """A line through its points and the head of an arrow at its end. Between points of unequal x
    and y it is a curve, vertical at both; or, with round corners, it is straight everywhere.
    """
    tip, before = points[-1], points[-2]
    direction = _find_direction(before, tip)
    # The line ends inside the head, which would not be pointed otherwise.
    line = [*points[:-1], _step_back(tip, direction, _HEAD - 2)]
    path = _write_elbow(line) if round_corners else _write_curve(line)
    # The first one is wider and not seen: it is what a pointer hits.
    lines = f'<path class="hit" d="{path}"/><path class="wire" d="{path}"/>'
    return lines + _write_head(tip, direction)


def _find_direction(before: Point, tip: Point) -> Point:
    """The unit vector along the last piece of a line, which runs along an axis."""
    (x0, y0), (x1, y1) = before, tip
    if abs(y1 - y0) < _STRAIGHT:
        return _sign(x1 - x0), 0.0
    return 0.0, _sign(y1 - y0)


def _sign(difference: float) -> float:
    return 1.0 if difference >= 0 else -1.0


def _step_back(tip: Point, direction: Point, length: float) -> Point:
    (x, y), (dx, dy) = tip, direction
    return x - dx * length, y - dy * length


def _write_head(tip: Point, direction: Point) -> str:
    back_x, back_y = _step_back(tip, direction, _HEAD)
    dx, dy = direction
    # Half the width of the head, at a right angle to the direction.
    side_x, side_y = dy * 3.4, dx * 3.4
    one = _write_point((back_x + side_x, back_y + side_y))
    other = _write_point((back_x - side_x, back_y - side_y))
    return f'<path class="head" d="M{_write_point(tip)} L{one} L{other} z"/>'


def _write_point(point: Point) -> str:
    x, y = point
    return f"{x:.1f},{y:.1f}"


def _write_curve(points: Sequence[Point]) -> str:
    parts = [f"M{_write_point(points[0])}"]
    for start, end in itertools.pairwise(points):
        (x0, y0), (x1, y1) = start, end
        if abs(x0 - x1) < _STRAIGHT or abs(y0 - y1) < _STRAIGHT:
            parts.append(f"L{_write_point(end)}")
            continue
        middle = (y0 + y1) / 2
        controls = f"{_write_point((x0, middle))} {_write_point((x1, middle))}"
        parts.append(f"C{controls} {_write_point(end)}")
    return " ".join(parts)


def _write_elbow(points: Sequence[Point]) -> str:
    """Straight pieces with round corners."""
    parts = [f"M{_write_point(points[0])}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        curve_start = _write_point(_move_towards(corner, before))
        curve_end = _write_point(_move_towards(corner, after))
        parts.append(f"L{curve_start} Q{_write_point(corner)} {curve_end}")
    parts.append(f"L{_write_point(points[-1])}")
    return " ".join(parts)


def _move_towards(corner: Point, other: Point, radius: float = 8.0) -> Point:
    """Where a corner's curve begins: at most half the way to the next corner."""
    (x, y), (other_x, other_y) = corner, other
    dx, dy = other_x - x, other_y - y
    length = max(1e-6, (dx * dx + dy * dy) ** 0.5)
    part = min(radius, length / 2) / length
    return x + dx * part, y + dy * part
