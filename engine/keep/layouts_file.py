"""layouts.json: the layouts that a run may have, which it has now, and each switch.

    {"present": 1, "switch_seconds": 4.2, "begins": 0, "layouts": [{text, changes, most}, ...],
     "buckets": [{start, best, seconds}, ...], "switches": [{step, before, layout, reason}, ...]}

Owns: the file's form. Does not own: the table (engine/plan/layout_table.py), when it is written
(engine/session/layouts.py). Infinite numbers are null.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from dataflow.errors import RunError
from engine.plan.layout_table import LayoutBucket, LayoutTable, RunLayout
from engine.plan.options import RunOptions

LAYOUTS = "layouts.json"


class KeptSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """From the Step after `step` on, `layout` took the place of `before`."""

    step: int
    before: int
    layout: int
    reason: str
    forced: bool = False


class _KeptLayout(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    changes: dict[str, Any]
    most: float | None = None
    closed: str = ""


class _KeptBucket(msgspec.Struct, frozen=True, kw_only=True):
    start: int
    best: int
    seconds: tuple[float | None, ...] = ()


class KeptLayouts(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says; `table` makes the table of it."""

    present: int
    switch_seconds: float
    layouts: tuple[_KeptLayout, ...]
    buckets: tuple[_KeptBucket, ...]
    switches: tuple[KeptSwitch, ...] = ()
    begins: float = 0.0

    def table(self) -> LayoutTable:
        """The table. Raises msgspec.ValidationError for options that are none."""
        layouts: list[RunLayout] = []
        for layout in self.layouts:
            most = math.inf if layout.most is None else layout.most
            changes = _read_changes(layout.changes)
            layouts.append(
                RunLayout(text=layout.text, changes=changes, most=most, closed=layout.closed)
            )
        buckets: list[LayoutBucket] = []
        for bucket in self.buckets:
            seconds = tuple(math.inf if time is None else time for time in bucket.seconds)
            buckets.append(LayoutBucket(start=bucket.start, best=bucket.best, seconds=seconds))
        return LayoutTable(
            layouts=tuple(layouts),
            buckets=tuple(buckets),
            switch_seconds=self.switch_seconds,
            begins=self.begins,
        )


def _read_changes(changes: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(RunOptions)
    options: dict[str, Any] = {}
    for name, setting in changes.items():
        if name not in hints:
            raise msgspec.ValidationError(f"{name!r} is no option")
        options[name] = msgspec.convert(setting, hints[name])
    return options


def encode_layouts(table: LayoutTable, present: int, switches: tuple[KeptSwitch, ...]) -> str:
    """Write the file's text."""
    layouts = KeptLayouts(
        present=present,
        switch_seconds=table.switch_seconds,
        layouts=tuple(_keep_layout(layout) for layout in table.layouts),
        buckets=tuple(_keep_bucket(bucket) for bucket in table.buckets),
        switches=switches,
        begins=table.begins,
    )
    return msgspec.json.format(msgspec.json.encode(layouts)).decode()


def _keep_layout(layout: RunLayout) -> _KeptLayout:
    most = layout.most if math.isfinite(layout.most) else None
    return _KeptLayout(
        text=layout.text, changes=dict(layout.changes), most=most, closed=layout.closed
    )


def _keep_bucket(bucket: LayoutBucket) -> _KeptBucket:
    seconds = tuple(time if math.isfinite(time) else None for time in bucket.seconds)
    return _KeptBucket(start=bucket.start, best=bucket.best, seconds=seconds)


def read_layouts(folder: Path) -> KeptLayouts | None:
    """Read a run folder's file; None where the run has one layout. Raises RunError."""
    path = folder / LAYOUTS
    if not path.is_file():
        return None
    try:
        layouts = msgspec.json.decode(path.read_bytes(), type=KeptLayouts)
        layouts.table()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        fix = "restore it; or delete it, and the run goes on with its own options"
        problem = f"expected the layouts of the run, found {error}"
        raise RunError(f"{path}: {problem}. Fix: {fix}.") from error
    numbers = [layouts.present, *(bucket.best for bucket in layouts.buckets)]
    if not layouts.buckets or not all(0 <= n < len(layouts.layouts) for n in numbers):
        problem = f"expected numbers of its {len(layouts.layouts)} layouts, found others"
        raise RunError(f"{path}: {problem}. Fix: restore it, or delete it.")
    return layouts
