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
from dataflow.draw.measure import measure_sans
from dataflow.draw.overlay import Overlay, list_devices
from dataflow.draw.scene import Rect, Words, WorkerMark

HEADER = 46.0
"""Room for titles above the first layer."""
_INSIDE, _OUTSIDE = 12.0, 12.0
_TITLE = 12.0
_SMALL = 11.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameColumns:
    """of: the number of each unit's column. groups: the Workers of each, none of one without.
    widths: the least of each, for its title. All empty where nothing is placed.
    """

    of: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    widths: Mapping[int, float] = field(default_factory=dict)


def assign_columns(units: Mapping[str, Unit], overlay: Overlay) -> FrameColumns:
    """Give each unit of a panel its column; a State that stands alone is with what is left out."""
    if overlay.placed is None:
        return FrameColumns()
    unit_workers: dict[str, tuple[str, ...]] = {}
    for item, unit in units.items():
        unit_workers[item] = overlay.workers_of(unit.box) if unit.box else ()
    groups = overlay.columns([unit.box for unit in units.values() if unit.box])
    if not set(unit_workers.values()) <= set(groups):
        groups.append(())  # of States that stand alone
    widths: dict[int, float] = {}
    for number, workers in enumerate(groups):
        words = _set_title(0, 0, overlay, workers)
        widths[number] = max(line.width for line in words)
    return FrameColumns(
        of={item: groups.index(workers) for item, workers in unit_workers.items()},
        groups=dict(enumerate(groups)),
        widths=widths,
    )


def frame_columns(
    columns: FrameColumns, layers: Layers, overlay: Overlay, left: float, top: float, bottom: float
) -> list[WorkerMark]:
    """Put a frame around each column of Workers, from left to right."""
    marks: list[WorkerMark] = []
    for number, names in columns.groups.items():
        if not names or overlay.placed is None:
            continue
        low, high = layers.columns[number]
        x = left + low - _OUTSIDE
        width = high - low + 2 * _OUTSIDE
        workers = [worker for worker in overlay.placed.workers if worker.name in names]
        rect = Rect(x=x, y=top, width=width, height=bottom - top)
        hosts = dict.fromkeys(worker.host for worker in workers)
        mark = WorkerMark(
            workers=names,
            hosts=tuple(hosts),
            devices=tuple(list_devices(workers)),
            rect=rect,
            words=_set_title(x + _INSIDE, top + 18.0, overlay, names),
            label=overlay.title(names),
        )
        marks.append(mark)
    return marks


def _set_title(x: float, y: float, overlay: Overlay, workers: tuple[str, ...]) -> tuple[Words, ...]:
    """The names of a column's Workers, and below them what is known of these."""
    names, facts = overlay.describe_workers(workers)
    width = measure_sans(names, _TITLE, bold=True)
    title = Words(x=x, y=y, text=names, kind="who", width=width, size=_TITLE)
    if not facts:
        return (title,)
    line = ", ".join(facts)
    width = measure_sans(line, _SMALL)
    return title, Words(x=x, y=y + 15.0, text=line, kind="soft", width=width)
