"""SVG shapes as text: the few that a drawing needs, all words escaped.

Owns: SVG syntax and measuring text. Does not own: the places of things (svg.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape

from dataflow.draw.colours import INK, SOFT, STATE, WIRE
from dataflow.draw.layers import Size

Point = tuple[float, float]

_FONT = "font-family=\"Inter, 'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif\""
_MONO = (
    "font-family=\"'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace\""
)
_NAME, _LINE = 13.0, 10.0
_NAME_PITCH, _LINE_PITCH, _LINE_STEP = 7.9, 6.1, 14.0


def document(width: float, height: float, title: str, body: Sequence[str]) -> str:
    """A whole SVG file."""
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    head = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        "<!-- layout: our own layers (dataflow.draw); install Graphviz to have dot's -->",
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} {_FONT}>',
        f"<title>{escape(title)}</title>",
        f"<defs>{_arrow('wire', WIRE)}{_arrow('weight', STATE[1])}</defs>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def _arrow(name: str, colour: str) -> str:
    shape = f'<path d="M0,0.8 L8,4 L0,7.2 z" fill="{colour}"/>'
    size = (
        'markerWidth="8" markerHeight="8" refX="7.4" refY="4" markerUnits="userSpaceOnUse"'
        ' orient="auto"'
    )
    return f'<marker id="{name}" {size}>{shape}</marker>'


def size(name: str, lines: Sequence[str]) -> Size:
    """The box that a name and the lines below it need."""
    width = max([len(name) * _NAME_PITCH, *(len(line) * _LINE_PITCH for line in lines)])
    return Size(width=max(96.0, width + 26.0), height=30.0 + _LINE_STEP * len(lines))


def label(x: float, y: float, name: str, lines: Sequence[str], strong: int) -> str:
    """A name with lines below it, centred on (x, y); those after the first `strong` are lighter."""
    top = y - _LINE_STEP * len(lines) / 2 + 4
    parts = [_centred(x, top, name, f'font-size="{_NAME}" font-weight="600" fill="{INK}"')]
    for i, line in enumerate(lines):
        colour = INK if i < strong else SOFT
        style = f'{_MONO} font-size="{_LINE}" fill="{colour}" xml:space="preserve"'
        parts.append(_centred(x, top + 2 + _LINE_STEP * (i + 1), line.strip(), style))
    return "".join(parts)


def _centred(x: float, y: float, line: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" {style}>{escape(line)}</text>'


def words(
    x: float, y: float, line: str, *, size: float, fill: str = INK, bold: bool = False
) -> str:
    """Words that start at (x, y), legible above anything that they cross."""
    halo = 'paint-order="stroke" stroke="#ffffff" stroke-width="3" stroke-linejoin="round"'
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{weight} fill="{fill}"'
        f" {halo}>{escape(line)}</text>"
    )


def rectangle(
    x: float, y: float, width: float, height: float, *, fill: str, line: str, radius: float
) -> str:
    """A rounded rectangle by its upper left corner."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"'
    return f'<rect {place} fill="{fill}" stroke="{line}"/>'


def cylinder(x: float, y: float, width: float, height: float, fill: str, line: str) -> str:
    """A drum, the symbol of something stored."""
    rim, low = 6.0, y + height - 6.0
    body = (
        f"M{x:.1f},{y + rim:.1f} V{low:.1f} a{width / 2:.1f},{rim} 0 0 0 {width:.1f},0"
        f" V{y + rim:.1f}"
    )
    lid = f'cx="{x + width / 2:.1f}" cy="{y + rim:.1f}" rx="{width / 2:.1f}" ry="{rim}"'
    style = f'fill="{fill}" stroke="{line}"'
    return f'<path d="{body}" {style}/><ellipse {lid} {style}/>'


def curve(points: Sequence[Point], *, colour: str, dashed: bool) -> str:
    """A smooth line downwards with an arrow, vertical at every point."""
    parts = [f"M{points[0][0]:.1f},{points[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (y0 + y1) / 2
        parts.append(f"C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}")
    return _path(" ".join(parts), colour, dashed=dashed)


def elbow(points: Sequence[Point], *, colour: str) -> str:
    """A dashed line of straight pieces with round corners and an arrow."""
    parts = [f"M{points[0][0]:.1f},{points[0][1]:.1f}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        near, far = _towards(corner, before), _towards(corner, after)
        parts.append(
            f"L{near[0]:.1f},{near[1]:.1f} Q{corner[0]:.1f},{corner[1]:.1f}"
            f" {far[0]:.1f},{far[1]:.1f}"
        )
    parts.append(f"L{points[-1][0]:.1f},{points[-1][1]:.1f}")
    return _path(" ".join(parts), colour, dashed=True)


def _towards(corner: Point, other: Point, radius: float = 8.0) -> Point:
    dx, dy = other[0] - corner[0], other[1] - corner[1]
    length = max(1e-6, (dx * dx + dy * dy) ** 0.5)
    part = min(radius, length / 2) / length
    return corner[0] + dx * part, corner[1] + dy * part


def _path(data: str, colour: str, *, dashed: bool) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    arrow = "weight" if dashed else "wire"
    return (
        f'<path d="{data}" fill="none" stroke="{colour}" stroke-width="1.4"{dash}'
        f' marker-end="url(#{arrow})"/>'
    )
