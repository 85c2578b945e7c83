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
from engine.session.background_run import RunHandle
from engine.session.run_result import Result

_CHARTS = {
    "reward": r"(rows/[^/]+/)?reward/(.*/)?mean",
    "evaluation": r"eval/(?!initial/|(.*/)?rows$).*",
    "loss": r"loss/.*",
}
"""Title -> the names of a chart's metrics. Losses have one where no reward is."""


def plan_page(plan: AnyPlan) -> str:
    """Show the drawing, the nodes as a table, warnings, and the whole plan behind a click."""
    parts: list[str] = []
    for phase in plan.phases:
        if phase.program is not None:
            parts.append(draw_image(phase.program))
        parts.append(_node_table(phase))
    warnings = "\n".join(map(str, plan.warnings))
    if warnings:
        parts.append(write_lines(warnings))
    parts.append(write_details("the whole plan", write_lines(explain(plan))))
    return "".join(parts)


def _node_table(plan: Plan) -> str:
    rows = [[node.name, *cells(plan, node)] for node in plan.nodes]
    return write_table(["node", *HEADS], rows)


def result_page(ended_run: Result) -> str:
    """Show how the run ended, charts of what it learned, and the last Step's metrics."""
    rows = [("run folder", ended_run.folder), *ended_run.trained.items()]
    for name, folders in ended_run.best.items():
        rows += [(f"best by {name}", folder) for folder in folders]
    end = write_table([ended_run.reason, f"step {ended_run.step}"], rows)
    return end + draw_metric_charts(ended_run.history) + _metric_table(ended_run.metrics)


def handle_page(handle: RunHandle) -> str:
    """Show where the run is just now, and charts of what it has learned so far."""
    state = write_table([handle.state, f"step {handle.step}"], [("run folder", handle.folder)])
    return state + draw_metric_charts(handle.history) + _metric_table(handle.metrics)


def _metric_table(metrics: Mapping[str, float]) -> str:
    rows: list[tuple[str, str]] = []
    for name, number in metrics.items():
        if number is not None:
            rows.append((name, shown_number(number, 4)))
    return write_details("metrics of the last step", write_table(["metric", "value"], rows))


def draw_metric_charts(history: pa.Table) -> str:
    """Draw a chart of each kind of metric that the table has."""
    steps = history.column("step").to_pylist()
    pictures: dict[str, str] = {}
    for title, pattern in _CHARTS.items():
        names = [name for name in history.column_names if re.fullmatch(pattern, name)]
        lines = _distinct({name: _points(history, name, steps) for name in names})
        if lines and not (title == "loss" and "reward" in pictures):
            pictures[title] = write_image(draw_chart(title, lines), f"{title} over the Steps")
    return "".join(pictures.values())


def _distinct(lines: Mapping[str, Points]) -> dict[str, Points]:
    """Leave out lines that are empty, or lie on another: a single function's mean is the
    reward's.
    """
    distinct_lines: dict[str, Points] = {}
    for name, points in lines.items():
        if points and points not in distinct_lines.values():
            distinct_lines[name] = points
    return distinct_lines


def _points(history: pa.Table, name: str, steps: Sequence[int]) -> Points:
    """List the Steps that have the metric, with its number."""
    points: list[tuple[float, float]] = []
    for step, number in zip(steps, history.column(name).to_pylist(), strict=True):
        if number is not None:
            points.append((step, number))
    return points
