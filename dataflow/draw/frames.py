"""Columns of Workers: each is a column of the layout, with a frame around its nodes.

Owns: which column a node is in, and frames. Does not own: where nodes run and how that reads
(overlay.py), the layout (layers.py).

The Workers that run a node together, its replicas and ranks, have one column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dataflow.draw.boxes import Unit
from dataflow.draw.layers import Layers
from dataflow.draw.measure import sans
from dataflow.draw.overlay import Overlay
from dataflow.draw.scene import Rect, Words, WorkerMark

HEADER = 46.0
"""Room for titles above the first layer."""
_INSIDE, _OUTSIDE = 12.0, 12.0
_TITLE = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameColumns:
    """of: the number of each unit's column. groups: the Workers of each, none of one without.
    widths: the least of each, for its title. All empty where nothing is placed.
    """

    of: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    widths: Mapping[int, float] = field(default_factory=dict)


def columns_of(units: Mapping[str, Unit], overlay: Overlay) -> FrameColumns:
    """The columns of a panel; a State that stands alone is with what is left out."""
    if overlay.placed is None:
        return FrameColumns()
    where = {i: overlay.workers_of(u.box) if u.box else () for i, u in units.items()}
    groups = overlay.columns([u.box for u in units.values() if u.box])
    groups = groups if set(where.values()) <= set(groups) else [*groups, ()]
    return FrameColumns(
        of={item: groups.index(group) for item, group in where.items()},
        groups=dict(enumerate(groups)),
        widths={at: max(w.width for w in _words(0, 0, overlay, g)) for at, g in enumerate(groups)},
    )


def frames(
    columns: FrameColumns, layers: Layers, overlay: Overlay, left: float, top: float, bottom: float
) -> list[WorkerMark]:
    """A frame around each column of Workers, from left to right."""
    found = []
    for number, group in columns.groups.items():
        if not group or overlay.placed is None:
            continue
        low, high = layers.columns[number]
        x, width = left + low - _OUTSIDE, high - low + 2 * _OUTSIDE
        workers = [w for w in overlay.placed.workers if w.name in group]
        found.append(
            WorkerMark(
                workers=group,
                hosts=tuple(dict.fromkeys(w.host for w in workers)),
                devices=tuple(dict.fromkeys(d for w in workers for d in w.devices)),
                rect=Rect(x=x, y=top, width=width, height=bottom - top),
                words=_words(x + _INSIDE, top + 18.0, overlay, group),
                label=overlay.title(group),
            )
        )
    return found


def _words(x: float, y: float, overlay: Overlay, group: tuple[str, ...]) -> tuple[Words, ...]:
    title, facts = overlay.group(group)
    below = ", ".join(facts)
    wide, small = sans(title, _TITLE, bold=True), sans(below, 11.0)
    first = Words(x=x, y=y, text=title, kind="who", width=wide, size=_TITLE)
    second = Words(x=x, y=y + 15.0, text=below, kind="soft", width=small)
    return (first, second) if below else (first,)
