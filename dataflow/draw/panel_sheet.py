"""A panel of a picture in the making.

Owns: what is known of a panel while it is arranged, and looking things up in it. Does not own: how
anything is decided (arrange.py, cut_marks.py, edge_marks.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dataflow.draw.boxes import Unit
from dataflow.draw.layers import Layers
from dataflow.draw.links import Links
from dataflow.draw.overlay import Overlay
from dataflow.draw.picture import Picture
from dataflow.draw.routes import Arrival, Lane, Levels
from dataflow.draw.scene import Rect
from dataflow.draw.worker_columns import FrameColumns

PAD = 24.0
"""Between a panel's rim and what is in it."""


@dataclass(slots=True, kw_only=True)
class PanelSheet:
    """Units and arrivals by id (`n3` of a node, `s1` of a State), the layers, then the places. cut:
    the first layer below it; 0 if the panel has none.
    """

    picture: Picture
    overlay: Overlay
    apart: bool
    links: Links
    units: dict[str, Unit]
    arrivals: dict[str, list[Arrival]]
    columns: FrameColumns
    layers: Layers
    cut: int = 0
    levels: Levels = field(default_factory=Levels)
    lanes: dict[int, Lane] = field(default_factory=dict)
    nodes: dict[str, Rect] = field(default_factory=dict)
    states: dict[int, Rect] = field(default_factory=dict)

    def holder(self, item: str) -> str:
        """The unit in which a node or a State is."""
        if item in self.units:
            return item
        state = int(item[1:])
        return f"n{self.links.holder[state]}"

    def row(self, item: str) -> int:
        """The layer in which a node or a State is."""
        return self.layers.layer[self.holder(item)]

    def is_last(self, state: int) -> bool:
        """Whether only lines are between a State and the right margin."""
        holder = self.holder(f"s{state}")
        row = self.layers.rows[self.layers.layer[holder]]
        units = [item for item in row if item in self.units]
        return units[-1] == holder

    def tracks(self) -> dict[int, list[int]]:
        """The States that have a line above each layer, the uppermost first."""
        states_by_row: dict[int, dict[int, None]] = {}
        for edge in self.links.far:
            state_row = self.row(f"s{edge.state}")
            target_row = self.row(edge.target)
            states_by_row.setdefault(target_row, {})[edge.state] = None
            # The last one reaches its lane without a line above its own layer.
            if target_row != state_row and not self.is_last(edge.state):
                states_by_row.setdefault(state_row, {})[edge.state] = None
        return {row: list(states) for row, states in states_by_row.items()}
