"""A run folder as it is now: its state, its plan, and the stretch of time that stands for it.

Owns: what is read of a run folder at a look. Does not own: the files and which stretch that is
(engine/keep), the text (page.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.keep.flow.records import Flow
from engine.keep.flow.segments import read_live
from engine.keep.flow.stretch import StepSum, last_seconds, seconds_named
from engine.keep.run_list import RunSummary, newest_row, summary
from engine.watch.waits import sentences


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRun:
    """A run at one moment. plan: of the phase under way, as in plan.json; empty without one.
    row: the last Step's metrics. flow: its last seconds or, once it has ended, its Steps; `stretch`
    says which. None in a run that kept no `events/`. waits: who waits for whom, greatest first.
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
        self._steps = StepSum(folder / "events")

    def look(self) -> SeenRun:
        """The run now. Raises OSError if its folder is gone."""
        run, row = summary(self._folder), newest_row(self._folder / "metrics.jsonl")
        seconds = (
            last_seconds(read_live(self._folder / "events")) if run.state == "running" else None
        )
        flow, stretch = self._newest(seconds)
        phase = flow.phase if flow is not None else run.phase or 0
        plan = self._of_phase(phase)
        waits = sentences(flow, plan, live=seconds is not None) if flow is not None and plan else []
        title = str(self._plans.get("program") or self._plans.get("graph") or "")
        return SeenRun(
            run=run, title=title, plan=plan, row=row, flow=flow, stretch=stretch, waits=waits
        )

    def _of_phase(self, number: int) -> Mapping[str, Any]:
        """Its plan; that of a graph alone."""
        phases = self._plans.get("phases")
        if phases is None:
            return self._plans if "nodes" in self._plans else {}
        return phases[max(0, min(number, len(phases)) - 1)] if phases else {}

    def _newest(self, seconds: Flow | None) -> tuple[Flow | None, str]:
        """The last seconds while it runs, else all Steps."""
        if seconds is None:
            return self._steps.read()
        self._steps.forget()  # it may have been resumed, and made Steps anew
        return seconds, seconds_named(seconds)


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
