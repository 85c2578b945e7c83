"""The picture of learning curves: a small panel for each algorithm, with GRPO's mean behind it.

Owns: the layout. Does not own: the numbers (curves.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

WIDTH, HEIGHT, GAP, COLUMNS = 210, 130, 34, 4
"""Of a panel, between panels, and panels in a row."""

_STYLE = 'font-family="Inter, Helvetica, Arial, sans-serif" font-size="12"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run: (samples, share of right answers), the first before training."""

    name: str
    points: tuple[tuple[float, float], ...]

    @property
    def gain(self) -> float:
        """What training added."""
        return self.points[-1][1] - self.points[0][1]


def picture(curves: Mapping[str, Sequence[Curve]], what: str) -> str:
    """An SVG; the first algorithm's mean is drawn in every panel, to compare with."""
    most = max(x for of in curves.values() for curve in of for x, _ in curve.points)
    rows = -(-len(curves) // COLUMNS)
    wide, high = COLUMNS * (WIDTH + GAP) + GAP, rows * (HEIGHT + GAP + 16) + 70
    unit = next(iter(curves))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" {_STYLE}>',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
        f'<text x="{GAP}" y="26" font-size="15">{escape(what)}</text>',
        f'<text x="{GAP}" y="44" fill="#667">by samples, 0 to {most:,.0f}; thin: each seed; '
        f"thick: their mean; grey: {escape(unit)}</text>",
    ]
    for i, (name, of) in enumerate(curves.items()):
        x = GAP + (i % COLUMNS) * (WIDTH + GAP)
        y = 70 + (i // COLUMNS) * (HEIGHT + GAP + 16)
        lines.append(f'<g transform="translate({x},{y})">')
        lines += _panel(name, of, curves[unit], most)
        lines.append("</g>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(name: str, of: Sequence[Curve], unit: Sequence[Curve], most: float) -> Iterator[str]:
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fafbfc" stroke="#d5dae2"/>'
    for share in (0.5, 1.0):
        y = HEIGHT * (1 - share)
        yield f'<line x2="{WIDTH}" y1="{y}" y2="{y}" stroke="#e6e9ef"/>'
        yield f'<text x="-4" y="{y + 4}" text-anchor="end" fill="#99a">{share}</text>'
    first, last = (fmean(curve.points[at][1] for curve in of) for at in (0, -1))
    yield f'<text y="-6">{escape(name)}: {first:.2f} to {last:.2f}</text>'
    yield _line(mean(unit), most, "#b4bac6", 3)
    for curve in of:
        yield _line(curve.points, most, "#8fb3e0", 1)
    yield _line(mean(of), most, "#2b62b5", 2)


def mean(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """The mean over seeds at the i-th evaluation, as far as all seeds have it."""
    both = zip(*(curve.points for curve in curves), strict=False)
    return [(sum(x for x, _ in at) / len(at), sum(y for _, y in at) / len(at)) for at in both]


def _line(points: Sequence[tuple[float, float]], most: float, colour: str, width: int) -> str:
    path = " ".join(f"{x / most * WIDTH:.1f},{HEIGHT * (1 - y):.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
