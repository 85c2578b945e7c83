"""Several plans of one graph, simulated with the same rows: a table, and a picture.

Owns: what is said of each plan, and how they are shown beside each other. Does not own: which plans
there are (engine/predict/simulations.py), the figures (summary.py), axes and lines
(dataflow/draw/chart.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.draw.chart import Points, charts
from dataflow.safe_text import one_line, printable, shown_bytes, shown_number
from dataflow.width import folded
from engine.plan.checks.memory import find_memory_rooms
from engine.plan.explain.layout import WIDTH, Line, count, lay_out, wrap_line
from engine.plan.plan import Plan
from engine.predict.simulation.report import exact, percent
from engine.predict.simulation.summary import PredictionSummary, as_data


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """values: by what was changed. found: None where the plan cannot be, or cannot be simulated;
    `why` says why not.
    """

    values: Mapping[str, str]
    found: PredictionSummary | None = None
    why: str = ""


_HEADS = ("Step", "speedup", "tokens/s", "busy", "cost a Step", "fullest memory")


def table(plans: Sequence[ComparedPlan], *, width: int = WIDTH) -> str:
    """A line for each plan; of one that cannot be, why not. At least one plan."""
    first = next((plan.found for plan in plans if plan.found is not None), None)
    heads = (*plans[0].values, *_HEADS)
    rows = [(plan, _cells(plan, first)) for plan in plans]
    widths = [len(head) for head in heads]
    for _, cells in rows:
        widths[: len(cells)] = map(max, widths, map(len, cells))
    lines: list[Line] = [_line(heads, widths)]
    before = ""
    for plan, cells in rows:
        found, why = _line(cells, widths), one_line(plan.why)
        told = "the same" if why == before else why
        lines += wrap_line(f"{found}  {told}", after=4) if why else [found]
        before = why
    if first is not None and not first.load.quiet:
        lines += wrap_line(first.load.note, after=2)
    same = "" if "seed" in plans[0].values else ", all with the same rows"
    title = f"{_title(plans)}{same}; speedup over the first that fits"
    body = [f"  {text}" for line in lines for text in lay_out(line, width - 2)]
    return printable("\n".join([*folded(title, width).split("\n"), *body]) + "\n")


def _title(plans: Sequence[ComparedPlan]) -> str:
    name = next((one_line(p.found.plan.graph) for p in plans if p.found is not None), "")
    told = count(len(plans), "plan")
    return f"{name}: {told}" if name else told


def _cells(plan: ComparedPlan, first: PredictionSummary | None) -> tuple[str, ...]:
    values, found = tuple(plan.values.values()), plan.found
    if found is None or first is None:
        return values
    speedup = first.step / found.step if found.step else 0.0
    busy = percent(found.busy) if found.busy is not None else "-"
    spent = "-" if found.cost.unpriced else shown_number(found.cost.step)
    told = (exact(found.step), f"{speedup:.2f}", f"{found.rate:,.0f}", busy, spent)
    return (*values, *told, _memory(found.plan))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Numbers end below each other."""
    return "  ".join(cell.rjust(wide) for cell, wide in zip(cells, widths, strict=False))


def _memory(plan: Plan) -> str:
    """Of the GPU, or of the host without one, that has the least room left."""
    if plan.cluster is None or any(model.parameters is None for model in plan.models):
        return "not known"
    room = max(find_memory_rooms(plan, plan.cluster), key=lambda room: room.need / room.bytes)
    return f"{shown_bytes(room.need)} of {shown_bytes(room.bytes)}"


def compared_data(
    plans: Sequence[ComparedPlan], told: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """All of it as plain values: `plans`, each with `values`, and with `why` or its figures."""
    each = (
        {"values": dict(p.values)}
        | ({"why": p.why} if p.found is None else as_data(p.found, told or {}))
        for p in plans
    )
    return {"plans": list(each)}


# --- the picture ----------------------------------------------------------------------------------


def picture(plans: Sequence[ComparedPlan]) -> str:
    """An SVG: seconds a Step, tokens/s, busy devices and cost over the first values, a line for
    each of the others. At least one plan fits.
    """
    first = next(iter(plans[0].values))
    labels = list(dict.fromkeys(plan.values[first] for plan in plans))
    panels: dict[str, Callable[[PredictionSummary], float | None]] = {
        "seconds a Step": lambda found: found.step,
        "tokens/s": lambda found: found.rate,
        "busy devices, %": lambda found: 100 * found.busy if found.busy is not None else None,
        "cost a Step": lambda found: None if found.cost.unpriced else found.cost.step,
    }
    shown = {title: _series(plans, first, labels, of) for title, of in panels.items()}
    known = {title: lines for title, lines in shown.items() if any(lines.values())}
    return charts(f"{_title(plans)} over {first}", known, labels)


def _series(
    plans: Sequence[ComparedPlan],
    first: str,
    labels: Sequence[str],
    of: Callable[[PredictionSummary], float | None],
) -> dict[str, Points]:
    """Points of each line, at the numbers of their labels."""
    found: dict[str, list[tuple[float, float]]] = {}
    for plan in plans:
        rest = ", ".join(f"{k}={v}" for k, v in plan.values.items() if k != first)
        line = found.setdefault(rest or first, [])
        value = None if plan.found is None else of(plan.found)
        if value is not None:
            line.append((float(labels.index(plan.values[first])), value))
    return dict(found)
