"""Several plans of one graph, simulated with the same rows: a table, and a picture.

Owns: what is said of each plan, and how they are shown beside each other. Does not own: which plans
there are (engine/predict/simulations.py), the figures (summary.py), axes and lines
(dataflow/draw/chart.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.draw.chart import Points, draw_charts
from dataflow.safe_text import one_line, printable, shown_bytes, shown_number
from dataflow.width import fold_lines
from engine.plan.checks.memory import find_memory_rooms
from engine.plan.explain.layout import WIDTH, Line, count, lay_out, wrap_line
from engine.plan.plan import Plan
from engine.simulation.report import format_percent, format_seconds
from engine.simulation.summary import PredictionSummary, as_data


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """values: by what was changed. summary: None where the plan cannot be, or cannot be simulated;
    `why` says why not.
    """

    values: Mapping[str, str]
    summary: PredictionSummary | None = None
    why: str = ""


_HEADS = ("Step", "speedup", "tokens/s", "busy", "cost a Step", "fullest memory")


def format_plan_table(plans: Sequence[ComparedPlan], *, width: int = WIDTH) -> str:
    """Write a line for each plan; of one that cannot be, why not. At least one plan."""
    first = _first_summary(plans)
    heads = (*plans[0].values, *_HEADS)
    rows = [_cells(plan, first) for plan in plans]
    widths = _column_widths(heads, rows)
    lines: list[Line] = [_line(heads, widths)]
    reason_above = ""
    for plan, cells in zip(plans, rows, strict=True):
        line, reason = _line(cells, widths), one_line(plan.why)
        if not reason:
            lines.append(line)
        elif reason == reason_above:
            lines += wrap_line(f"{line}  the same", after=4)
        else:
            lines += wrap_line(f"{line}  {reason}", after=4)
        reason_above = reason
    if first is not None and not first.load.quiet:
        lines += wrap_line(first.load.note, after=2)
    texts = [fold_lines(_table_title(plans), width)]
    for line in lines:
        texts += (f"  {text}" for text in lay_out(line, width - 2))
    return printable("\n".join(texts) + "\n")


def _first_summary(plans: Sequence[ComparedPlan]) -> PredictionSummary | None:
    """The figures of the first plan that fits: the others' speedup is over it."""
    return next((plan.summary for plan in plans if plan.summary is not None), None)


def _column_widths(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """The widest cell of each column; a plan that cannot be has only the first cells."""
    widths = [len(head) for head in heads]
    for cells in rows:
        widths[: len(cells)] = map(max, widths, map(len, cells))
    return widths


def _table_title(plans: Sequence[ComparedPlan]) -> str:
    title = _title(plans)
    if "seed" not in plans[0].values:  # rows are drawn with the seed
        title += ", all with the same rows"
    return f"{title}; speedup over the first that fits"


def _title(plans: Sequence[ComparedPlan]) -> str:
    """`GRAPH: 3 plans`; where no plan fits, nobody says what graph it is."""
    plan_count, first = count(len(plans), "plan"), _first_summary(plans)
    name = "" if first is None else one_line(first.plan.graph)
    if not name:
        return plan_count
    return f"{name}: {plan_count}"


def _cells(plan: ComparedPlan, first: PredictionSummary | None) -> tuple[str, ...]:
    """The values, and the figures of a plan that has some."""
    values, summary = tuple(plan.values.values()), plan.summary
    if summary is None or first is None:
        return values
    speedup = first.step / summary.step if summary.step else 0.0
    busy = "-" if summary.busy is None else format_percent(summary.busy)
    cost = "-" if summary.cost.unpriced else shown_number(summary.cost.step)
    return (
        *values,
        format_seconds(summary.step),
        f"{speedup:.2f}",
        f"{summary.rate:,.0f}",
        busy,
        cost,
        _fullest_memory(summary.plan),
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Numbers end below each other."""
    return "  ".join(cell.rjust(wide) for cell, wide in zip(cells, widths, strict=False))


def _fullest_memory(plan: Plan) -> str:
    """Bytes on the GPU, or on the host without one, that has the least room left."""
    if plan.cluster is None or any(model.parameters is None for model in plan.models):
        return "not known"
    room = max(find_memory_rooms(plan, plan.cluster), key=lambda room: room.need / room.bytes)
    return f"{shown_bytes(room.need)} of {shown_bytes(room.bytes)}"


def export_comparison(
    plans: Sequence[ComparedPlan], seconds_origins: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """All of it as plain values: `plans`, each with `values`, and with `why` or its figures."""
    entries: list[dict[str, Any]] = []
    for plan in plans:
        entry: dict[str, Any] = {"values": dict(plan.values)}
        if plan.summary is None:
            entry["why"] = plan.why
        else:
            entry |= as_data(plan.summary, seconds_origins or {})
        entries.append(entry)
    return {"plans": entries}


# --- the picture ----------------------------------------------------------------------------------


def draw_comparison(plans: Sequence[ComparedPlan]) -> str:
    """Draw seconds a Step, tokens/s, busy devices and cost over the first values as an SVG, a line
    for each of the others. At least one plan fits.
    """
    first_key = next(iter(plans[0].values))
    labels = list(dict.fromkeys(plan.values[first_key] for plan in plans))
    panels: dict[str, Callable[[PredictionSummary], float | None]] = {
        "seconds a Step": lambda summary: summary.step,
        "tokens/s": lambda summary: summary.rate,
        "busy devices, %": _busy_percent,
        "cost a Step": _known_cost,
    }
    known_panels: dict[str, dict[str, Points]] = {}
    for title, figure in panels.items():
        lines = _lines(plans, first_key, labels, figure)
        if any(lines.values()):
            known_panels[title] = lines
    return draw_charts(f"{_title(plans)} over {first_key}", known_panels, labels)


def _busy_percent(summary: PredictionSummary) -> float | None:
    if summary.busy is None:
        return None
    return 100 * summary.busy


def _known_cost(summary: PredictionSummary) -> float | None:
    if summary.cost.unpriced:
        return None
    return summary.cost.step


def _lines(
    plans: Sequence[ComparedPlan],
    first_key: str,
    labels: Sequence[str],
    figure: Callable[[PredictionSummary], float | None],
) -> dict[str, Points]:
    """Points of each line, at the numbers of their labels. A plan without the figure has none."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for plan in plans:
        others = {key: text for key, text in plan.values.items() if key != first_key}
        name = ", ".join(f"{key}={text}" for key, text in others.items())
        points = lines.setdefault(name or first_key, [])
        height = None if plan.summary is None else figure(plan.summary)
        if height is not None:
            place = labels.index(plan.values[first_key])
            points.append((float(place), height))
    return dict(lines)
