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

from dataflow.errors import DataflowError
from engine.keep.flow.records import Flow
from engine.keep.flow.stretch import last_seconds, seconds_named, steps_named
from engine.keep.reader.flow_index import EVER, FlowIndex, read_live_flows
from engine.keep.reader.open_folder import FileMark, OpenFolder, open_run
from engine.keep.reader.plan_records import PLAN
from engine.keep.reader.run_summary import RunSummary, last_row, summarize
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

    def __init__(self, path: Path) -> None:
        self._path = path
        self._flows = FlowIndex()
        self._marks: dict[str, FileMark] | None = None
        self._steps: tuple[Flow | None, str] = (None, "")
        """All Steps, and the words for them, as long as the marks of their files stay."""
        self._planned: FileMark | None = None
        self._plans: Mapping[str, Any] = {}

    def look(self) -> SeenRun:
        """The run now. Raises OSError if its folder is gone."""
        with open_run(self._path) as folder:
            mark = folder.mark(PLAN)
            if mark != self._planned:  # also another one, as the run switched to another layout
                self._planned, self._plans = mark, _json(folder, PLAN)
            run = summarize(folder, self._path)
            row = last_row(folder)
            if run.state == "running":
                seconds = last_seconds(read_live_flows(folder))
            else:
                seconds = None
            if seconds is not None:
                flow, stretch = seconds, seconds_named(seconds)
            else:
                flow, stretch = self._all_steps(folder)
        if flow is not None:
            phase = flow.phase
        else:
            phase = run.phase or 0
        plan = self._of_phase(phase)
        if flow is not None and plan:
            waits = sentences(flow, plan, live=seconds is not None)
        else:
            waits = []
        title = str(self._plans.get("program") or self._plans.get("graph") or "")
        return SeenRun(
            run=run, title=title, plan=plan, row=row, flow=flow, stretch=stretch, waits=waits
        )

    def _of_phase(self, number: int) -> Mapping[str, Any]:
        """Look up the plan of a phase; a graph alone has one plan."""
        phases = self._plans.get("phases")
        if phases is None:
            if "nodes" in self._plans:
                return self._plans
            return {}
        if phases:
            return phases[max(0, min(number, len(phases)) - 1)]
        return {}

    def _all_steps(self, folder: OpenFolder) -> tuple[Flow | None, str]:
        """All Steps as one Flow; of a Program those of its last phase."""
        marks = self._flows.marks(folder)
        if marks != self._marks:
            flow = self._flows.total(folder, 0, EVER)
            self._marks, self._steps = marks, (flow, "")
            if flow is not None:
                steps = self._flows.between(folder, 0, EVER)
                first = next(each.step for each in steps if each.phase == flow.phase)
                self._steps = flow, steps_named(first, flow.step)
        return self._steps


def _json(folder: OpenFolder, name: str) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    try:
        document = json.loads(folder.read(name) or b"{}")
    except (DataflowError, OSError, ValueError, RecursionError):
        return {}
    if isinstance(document, dict):
        return document
    return {}
