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


def document(
    width: float, height: float, title: str, body: Sequence[str], *, role: str = "img"
) -> str:
    """A whole SVG file. role: `img`, or `group` where what is inside can be reached by itself."""
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    label = f'role="{role}" aria-label="{escape(title)}"'
    name = [f"<title>{escape(title)}</title>"] if role == "img" else []
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="dataflow" {box} {label}>',
        *name,
        sheet(),
        '<rect class="paper" width="100%" height="100%"/>',
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def group(kind: str, inside: Sequence[str], **attributes: str) -> str:
    """A group of a class; `data_node="a"` becomes `data-node="a"`."""
    return f'<g class="{escape(kind)}"{_written(attributes)}>{"".join(inside)}</g>'


def _written(attributes: Mapping[str, str]) -> str:
    pairs = ((name.replace("_", "-"), escape(value)) for name, value in attributes.items())
    return "".join(f' {name}="{value}"' for name, value in pairs)


def text(words: Words) -> str:
    """A line of text in its class."""
    return words_at(words.x, words.y, words.text, words.kind)


def words_at(x: float, y: float, line: str, kind: str) -> str:
    """Words of a class that start at (x, y)."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(line)}</text>'


def rectangle(rect: Rect, kind: str, radius: float) -> str:
    """A rounded rectangle of a class."""
    place = f'x="{rect.x:.1f}" y="{rect.y:.1f}" width="{rect.width:.1f}" height="{rect.height:.1f}"'
    return f'<rect class="{kind}" {place} rx="{radius:g}"/>'


def strip(rect: Rect, kind: str) -> str:
    """An empty group that says where a page may draw."""
    place = f'data-x="{rect.x:.1f}" data-y="{rect.y:.1f}"'
    size = f'data-width="{rect.width:.1f}" data-height="{rect.height:.1f}"'
    return f'<g class="{kind}" {place} {size}></g>'


def drum(rect: Rect) -> str:
    """A cylinder, the symbol of something stored."""
    rim, low, half = 6.0, rect.bottom - 6.0, rect.width / 2
    body = (
        f"M{rect.x:.1f},{rect.y + rim:.1f} V{low:.1f} a{half:.1f},{rim} 0 0 0 {rect.width:.1f},0"
        f" V{rect.y + rim:.1f}"
    )
    lid = f'cx="{rect.x + half:.1f}" cy="{rect.y + rim:.1f}" rx="{half:.1f}" ry="{rim}"'
    return f'<path class="drum" d="{body}"/><ellipse class="drum" {lid}/>'


def arrow(points: Sequence[Point], *, round_corners: bool) -> str:
    """A line through its points and the head of an arrow at its end. Between points of unequal x
    and y it is a curve, vertical at both; or, with round corners, it is straight everywhere.
    """
    (x, y), before = points[-1], points[-2]
    along = (
        (_sign(x - before[0]), 0.0) if abs(y - before[1]) < 0.05 else (0.0, _sign(y - before[1]))
    )
    short = (x - along[0] * (_HEAD - 2), y - along[1] * (_HEAD - 2))
    drawn = [*points[:-1], short]
    data = _elbow(drawn) if round_corners else _curve(drawn)
    return f'<path class="hit" d="{data}"/><path class="wire" d="{data}"/>{_head((x, y), along)}'


def _sign(value: float) -> float:
    return 1.0 if value >= 0 else -1.0


def _head(tip: Point, along: Point) -> str:
    (x, y), (dx, dy) = tip, along
    back = (x - dx * _HEAD, y - dy * _HEAD)
    side = (dy * 3.4, dx * 3.4)
    a = f"{back[0] + side[0]:.1f},{back[1] + side[1]:.1f}"
    b = f"{back[0] - side[0]:.1f},{back[1] - side[1]:.1f}"
    return f'<path class="head" d="M{x:.1f},{y:.1f} L{a} L{b} z"/>'


def _curve(points: Sequence[Point]) -> str:
    parts = [f"M{points[0][0]:.1f},{points[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if abs(x0 - x1) < 0.05 or abs(y0 - y1) < 0.05:
            parts.append(f"L{x1:.1f},{y1:.1f}")
        else:
            middle = (y0 + y1) / 2
            parts.append(f"C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}")
    return " ".join(parts)


def _elbow(points: Sequence[Point]) -> str:
    """Straight pieces with round corners."""
    parts = [f"M{points[0][0]:.1f},{points[0][1]:.1f}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        near, far = _towards(corner, before), _towards(corner, after)
        parts.append(
            f"L{near[0]:.1f},{near[1]:.1f} Q{corner[0]:.1f},{corner[1]:.1f}"
            f" {far[0]:.1f},{far[1]:.1f}"
        )
    parts.append(f"L{points[-1][0]:.1f},{points[-1][1]:.1f}")
    return " ".join(parts)


def _towards(corner: Point, other: Point, radius: float = 8.0) -> Point:
    dx, dy = other[0] - corner[0], other[1] - corner[1]
    length = max(1e-6, (dx * dx + dy * dy) ** 0.5)
    part = min(radius, length / 2) / length
    return corner[0] + dx * part, corner[1] + dy * part
