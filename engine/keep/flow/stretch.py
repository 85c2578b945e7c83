"""The stretch of time that stands for a run: its last seconds while it goes on, else all its Steps.

Owns: this choice, which the page, `top` and the report share, so that they say the same of a run.
Does not own: the files (segments.py), what is said of a stretch (engine/watch/waits.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.keep.flow.flow_sums import total
from engine.keep.flow.records import Flow
from engine.keep.flow.segments import framed, step_segments

SECONDS = 10.0
"""Of the stretch while a run goes on: of a shorter one most Steps have only a part."""
_AT_ONCE = 256
"""Flows that are added at a time."""


def last_seconds(flows: Sequence[Flow]) -> Flow | None:
    """The last SECONDS of these, in order, as one; None without any. A stretch that took longer
    stands alone: a run in one process writes none while its kernel holds the interpreter's lock.
    """
    if not flows:
        return None
    end = flows[-1].wall
    return total(flow for flow in flows if flow.wall > end - SECONDS)


def seconds_named(flow: Flow) -> str:
    """The words for last seconds."""
    return f"the last {flow.end - flow.start:.0f} s"


class StepSum:
    """All Steps of an `events/` folder as one Flow; of a Program those of its last phase."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends: dict[Path, int] = {}
        """Up to where each segment has been read."""
        self._flow: Flow | None = None
        self._first = 0

    def read(self) -> tuple[Flow | None, str]:
        """Add the Steps that have come since the last call; the sum, and the words for it."""
        segments = step_segments(self._folder)
        if any(path not in segments or _size(path) < end for path, end in self._ends.items()):
            self.forget()  # a resume cut them
        for path in segments:
            if _size(path) > self._ends.get(path, 0):
                self._read(path)
        if self._flow is None:
            return None, ""
        last = self._flow.step
        if self._first == last:
            return self._flow, f"Step {last}"
        return self._flow, f"Steps {self._first} to {last}"

    def forget(self) -> None:
        """Read everything anew at the next call."""
        self._ends, self._flow = {}, None

    def _read(self, path: Path) -> None:
        flows: list[Flow] = []
        for each in framed(path, self._ends.get(path, 0)):
            self._ends[path] = each.end
            if isinstance(each.record, Flow):
                flows.append(each.record)
            if len(flows) == _AT_ONCE:
                self._add(flows)
                flows = []
        self._add(flows)

    def _add(self, flows: list[Flow]) -> None:
        if not flows:
            return
        phase = flows[-1].phase
        if self._flow is None or self._flow.phase != phase:
            self._first = next(flow.step for flow in flows if flow.phase == phase)
        before = [] if self._flow is None else [self._flow]
        self._flow = total([*before, *flows])


def _size(path: Path) -> int:
    return path.stat().st_size
