"""A picture with every place decided: what svg.py writes, and tests measure.

Owns: these types. Does not own: how places are found (arrange.py, routes.py), any syntax.

Pixels, y downwards. What is in a panel is measured from the panel's upper left corner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dataflow.draw.picture import Box, StateBox

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rect:
    """A rectangle by its upper left corner."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Its right end."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """Its lower end."""
        return self.y + self.height

    @property
    def middle(self) -> Point:
        """Its centre."""
        return self.x + self.width / 2, self.y + self.height / 2

    def meets(self, other: Rect, slack: float = 0.0) -> bool:
        """Whether they overlap by more than the slack."""
        return (
            self.x < other.right - slack
            and other.x < self.right - slack
            and self.y < other.bottom - slack
            and other.y < self.bottom - slack
        )

    def has(self, point: Point, slack: float = 0.0) -> bool:
        """Whether the point is inside by more than the slack."""
        x, y = point
        inside = self.x + slack < x < self.right - slack
        return inside and self.y + slack < y < self.bottom - slack


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A line of text from (x, y), its baseline, on. kind: its class."""

    x: float
    y: float
    text: str
    kind: str
    width: float
    """As estimated."""
    size: float = 11.0

    @property
    def rect(self) -> Rect:
        """What it covers."""
        return Rect(x=self.x, y=self.y - self.size * 0.8, width=self.width, height=self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMark:
    """A node, or a folded chain of nodes. life: a strip that stays free."""

    box: Box
    rect: Rect
    words: tuple[Words, ...]
    life: Rect | None = None
    label: str = ""
    """In words, for those who cannot see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMark:
    """A State."""

    state: StateBox
    rect: Rect
    words: tuple[Words, ...]
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeMark:
    """An edge: through its points from the first to the last.

    source, target: what it joins, by name; of a weight edge one is a State. kind: `data`; `reads`,
    `writes` or `follows` of a State. round: corners; else curves between points of unequal x.
    queue: where a page may show what waits.
    """

    kind: Literal["data", "reads", "writes", "follows"]
    source: str
    target: str
    points: tuple[Point, ...]
    round: bool = False
    words: tuple[Words, ...] = ()
    queue: Point | None = None
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutMark:
    """What one source gives a Step. line: of the first alone."""

    source: str
    words: Words
    line: tuple[Point, Point] | None = None
    life: Rect | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMark:
    """The frame of a Worker, or of those that run the same nodes together."""

    workers: tuple[str, ...]
    hosts: tuple[str, ...]
    devices: tuple[int, ...]
    rect: Rect
    words: tuple[Words, ...]
    label: str = ""


@dataclass(slots=True, kw_only=True)
class Panel:
    """One frame of a picture. at: its upper left corner."""

    width: float
    height: float
    title: Words
    at: Point = (0.0, 0.0)
    workers: list[WorkerMark] = field(default_factory=list)
    nodes: list[NodeMark] = field(default_factory=list)
    states: list[StateMark] = field(default_factory=list)
    edges: list[EdgeMark] = field(default_factory=list)
    cuts: list[CutMark] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A whole picture."""

    name: str
    width: float
    height: float
    titles: tuple[Words, ...]
    panels: tuple[Panel, ...]
