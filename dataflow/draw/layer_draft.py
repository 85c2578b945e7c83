"""What is laid out in layers: boxes and edges, with the waypoints of long ones.

Owns: these types. Does not own: how layers, orders and places are decided (layers.py,
layer_order.py, layer_places.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Edge = tuple[str, str]
Numbers = Mapping[str, int]
"""A layer, a column or a place, by box."""
Neighbours = Mapping[str, Sequence[str]]
"""The boxes at the other ends of edges or links, by box."""
GAP, TRUNKS, BESIDE = 28.0, 10.0, 18.0
"""Pixels between two boxes, two waypoints, and a box and a waypoint."""
POINT = 2.0
"""Width of a waypoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Width and height of a box in pixels. port: how far right of its middle its edges are."""

    width: float
    height: float
    port: float = 0.0


@dataclass(slots=True, kw_only=True)
class LayerDraft:
    """What is to be laid out, waypoints too. above, below: the neighbours of each box by links,
    which join boxes of neighbouring layers.
    """

    boxes: dict[str, Size]
    column: dict[str, int]
    layer: dict[str, int]
    above: dict[str, list[str]]
    below: dict[str, list[str]]
    links: list[Edge]

    def is_waypoint(self, box: str) -> bool:
        """Whether it is a place on an edge instead of a box."""
        return self.boxes[box].height == 0.0

    def gap(self, a: str, b: str) -> float:
        """Between two neighbours of a row."""
        waypoints = self.is_waypoint(a) + self.is_waypoint(b)
        return (GAP, BESIDE, TRUNKS)[waypoints]
