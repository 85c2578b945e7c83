"""What plans and runs show in a notebook.

Owns: a page for each, and which metrics get a chart. Does not own: charts and HTML (dataflow/draw),
the pages of graphs and batches (dataflow/draw/pages.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pyarrow as pa

from dataflow.draw.chart import Points, draw_chart
from dataflow.draw.html import write_details, write_image, write_lines, write_table
from dataflow.draw.pages import draw_image
from dataflow.safe_text import shown_number
from engine.plan.explain import explain
from engine.plan.explain.nodes import HEADS, cells
from engine.plan.plan import Plan
from engine.plan.program_plan import AnyPlan
from engine.session.attempts import Result
from engine.session.background_run import RunHandle

_CHARTS = {
    "reward": r"(rows/[^/]+/)?reward/(.*/)?mean",
    "evaluation": r"eval/(?!initial/|(.*/)?rows$).*",
    "loss": r"loss/.*",
}
"""Title -> the names of a chart's metrics. Losses have one where no reward is."""


def plan_page(plan: AnyPlan) -> str:
    """The drawing, the nodes as a table, warnings, and the whole plan behind a click."""
    parts = [_nodes(phase) for phase in plan.phases]
    warnings = "\n".join(map(str, plan.warnings))
    parts += [write_lines(warnings)] if warnings else []
    return "".join([*parts, write_details("the whole plan", write_lines(explain(plan)))])


def _nodes(plan: Plan) -> str:
    shown = draw_image(plan.program) if plan.program is not None else ""
    return shown + write_table(["node", *HEADS], ([n.name, *cells(plan, n)] for n in plan.nodes))


def result_page(result: Result) -> str:
    """How the run ended, charts of what it learned, and the last Step's metrics."""
    rows = [("run folder", result.folder), *result.trained.items()]
    for name, folders in result.best.items():
        rows += [(f"best by {name}", folder) for folder in folders]
    ended = write_table([result.reason, f"step {result.step}"], rows)
    return ended + charts(result.history) + _last(result.metrics)


def handle_page(handle: RunHandle) -> str:
    """Where the run is just now, and charts of what it has learned so far."""
    state = write_table([handle.state, f"step {handle.step}"], [("run folder", handle.folder)])
    return state + charts(handle.history) + _last(handle.metrics)


def _last(metrics: Mapping[str, float]) -> str:
    rows = [(name, shown_number(value, 4)) for name, value in metrics.items() if value is not None]
    return write_details("metrics of the last step", write_table(["metric", "value"], rows))


def charts(history: pa.Table) -> str:
    """A chart of each kind of metric that the table has."""
    steps = history.column("step").to_pylist()
    found = {}
    for title, named in _CHARTS.items():
        names = [name for name in history.column_names if re.fullmatch(named, name)]
        lines = _distinct({name: _points(history, name, steps) for name in names})
        if lines and not (title == "loss" and "reward" in found):
            found[title] = write_image(draw_chart(title, lines), f"{title} over the Steps")
    return "".join(found.values())


def _distinct(lines: Mapping[str, Points]) -> dict[str, Points]:
    """Without those that are empty, or lie on another: a single function's mean is the reward's."""
    found: dict[str, Points] = {}
    for name, points in lines.items():
        if points and points not in found.values():
            found[name] = points
    return found


def _points(history: pa.Table, name: str, steps: Sequence[int]) -> Points:
    """The Steps that have the metric, with its value."""
    values = history.column(name).to_pylist()
    return [(step, v) for step, v in zip(steps, values, strict=True) if v is not None]
