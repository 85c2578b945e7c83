"""A run folder as it is now: its state, its plan, and the newest stretch of time.

Owns: which stretch that is, and reading only what has come since the last look. Does not own: the
files (engine/observe), the text (page.py).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.observe.flow.records import Flow
from engine.observe.flow.segments import framed, read_live, step_segments
from engine.observe.flow.waits import sentences, total
from engine.observe.runlist import RunSummary, newest_row, summary

_STALE = 5.0
"""Seconds by which the last second may be older than the last Step: else an earlier attempt left
it.
"""
SECONDS = 10.0
"""Of the newest stretch while a run goes on."""
STEPS = 10
"""Of the newest stretch of a run that has ended, or whose Steps are short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRun:
    """A run at one moment. plan: of the phase under way, as in plan.json; empty without one.
    row: the last Step's metrics. flow: the newest stretch, and `stretch` in words; None in a run
    that kept no `events/`. waits: who waits for whom, worst first.
    """

    run: RunSummary
    title: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    row: Mapping[str, Any] = field(default_factory=dict)
    flow: Flow | None = None
    stretch: str = ""
    waits: Sequence[str] = ()


class RunReader:
    """Looks at one run folder again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plans = _json(folder / "plan.json")
        self._steps: deque[Flow] = deque(maxlen=STEPS)
        self._segment: Path | None = None
        self._end = 0

    def look(self) -> SeenRun:
        """The run now. Raises OSError if its folder is gone."""
        run, row = summary(self._folder), newest_row(self._folder / "metrics.jsonl")
        self._follow(self._folder / "events")
        flow, stretch = self._newest(running=run.state == "running")
        phase = flow.phase if flow is not None else run.phase or 0
        plan = self._of_phase(phase)
        told = sentences(flow, plan) if flow is not None and plan else []
        title = str(self._plans.get("program") or self._plans.get("graph") or "")
        return SeenRun(
            run=run, title=title, plan=plan, row=row, flow=flow, stretch=stretch, waits=told
        )

    def _of_phase(self, number: int) -> Mapping[str, Any]:
        """Its plan; that of a graph alone."""
        phases = self._plans.get("phases")
        if phases is None:
            return self._plans if "nodes" in self._plans else {}
        return phases[max(0, min(number, len(phases)) - 1)] if phases else {}

    def _follow(self, events: Path) -> None:
        """Read the Steps that have come; a segment that shrank was cut by a resume."""
        segments = step_segments(events)
        if not segments:
            return
        newest = segments[-1]
        if newest != self._segment or newest.stat().st_size < self._end:
            before = segments[-2:-1] if self._segment is None else []
            self._steps.clear()
            for path in before:
                self._take(path, 0)
            self._segment, self._end = newest, 0
        self._end = self._take(newest, self._end)

    def _take(self, path: Path, begin: int) -> int:
        end = begin
        for each in framed(path, begin):
            end = each.end
            if isinstance(each.record, Flow):
                self._steps.append(each.record)
        return end

    def _newest(self, *, running: bool) -> tuple[Flow | None, str]:
        """The last seconds while it runs, else the last Steps, of one phase."""
        live = read_live(self._folder / "events") if running else []
        newest = self._steps[-1].wall if self._steps else 0.0
        if live and live[-1].wall > newest - _STALE:
            last = live[-1].wall
            flow = total([f for f in live if f.wall > last - SECONDS])
            return flow, f"the last {flow.end - flow.start:.0f} s"
        if not self._steps:
            return None, ""
        flows = [f for f in self._steps if f.phase == self._steps[-1].phase]
        first, last_step = flows[0].step, flows[-1].step
        named = f"Step {last_step}" if first == last_step else f"Steps {first} to {last_step}"
        return total(flows), named


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
