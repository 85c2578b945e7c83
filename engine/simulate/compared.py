"""Several plans of one graph, simulated with the same rows: a table, and a picture.

Owns: what is said of each plan, and how they are shown beside each other. Does not own: which plans
there are (engine/simulating.py), the figures (summed.py), axes and lines (dataflow/draw/chart.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.draw.chart import Points, charts
from dataflow.shown import one_line, printable, shown_bytes
from dataflow.width import folded
from engine.plan.checks.memory import rooms
from engine.plan.explain.layout import WIDTH, Line, duration, laid, side_by_side, wrapped
from engine.plan.plan import Plan
from engine.simulate.report import percent
from engine.simulate.summed import PredictionSummary, as_data


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """values: by what was changed. found: None where the plan cannot be, or cannot be simulated;
    `why` says why not.
    """

    values: Mapping[str, str]
    found: PredictionSummary | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Row:
    """Of the table."""

    cells: tuple[str, ...]
    why: str = ""


_HEADS = ("Step", "speedup", "tokens/s", "busy", "cost a Step", "fullest memory")


def table(plans: Sequence[ComparedPlan], *, width: int = WIDTH) -> str:
    """A line for each plan, and below it why it cannot be. At least one plan."""
    first = next((p.found for p in plans if p.found is not None), None)
    names = list(plans[0].values)
    rows = [_Row((*names, *_HEADS)), *(_row(plan, first) for plan in plans)]
    columns = zip(*(row.cells for row in rows if not row.why), strict=True)
    widths = [max(map(len, column)) for column in columns]
    for i, _ in enumerate(names):
        widths[i] = max(widths[i], *(len(row.cells[i]) for row in rows))
    lines = [text for row in rows for line in _lines(row, widths) for text in laid(line, width)]
    title = f"{_title(plans)}, each with the same rows"
    if first is not None:
        title += "; speedup over the first that fits"
    return printable("\n".join([*folded(title, width).split("\n"), *lines]) + "\n")


def _title(plans: Sequence[ComparedPlan]) -> str:
    name = next((one_line(p.found.plan.graph) for p in plans if p.found is not None), "")
    told = f"{len(plans)} plans" if len(plans) > 1 else "1 plan"
    return f"{name}: {told}" if name else told


def _row(plan: ComparedPlan, first: PredictionSummary | None) -> _Row:
    values, found = tuple(plan.values.values()), plan.found
    if found is None or first is None:
        return _Row(values, plan.why)
    speedup = first.step / found.step if found.step else 0.0
    busy = percent(found.busy) if found.busy is not None else "-"
    spent = "-" if found.cost.unpriced else f"{found.cost.step:,.3g}"
    cells = (duration(found.step), f"{speedup:.2f}", f"{found.rate:,.0f}", busy, spent)
    return _Row((*values, *cells, _memory(found.plan)))


def _lines(row: _Row, widths: Sequence[int]) -> Iterator[Line]:
    if not row.why:
        cells = [c.ljust(w) if c == row.cells[0] else c.rjust(w) for c, w in _fitted(row, widths)]
        yield side_by_side(cells, widths)
        return
    yield from wrapped(f"{side_by_side(row.cells, widths)}  {one_line(row.why)}", after=4)


def _fitted(row: _Row, widths: Sequence[int]) -> Iterator[tuple[str, int]]:
    yield from zip(row.cells, widths, strict=False)


def _memory(plan: Plan) -> str:
    """Of the GPU, or of the host without one, that has the least room left."""
    if plan.cluster is None or any(model.parameters is None for model in plan.models):
        return "not known"
    room = max(rooms(plan, plan.cluster), key=lambda room: room.need / room.bytes)
    return f"{shown_bytes(room.need)} of {shown_bytes(room.bytes)}"


def compared_data(plans: Sequence[ComparedPlan], given: Sequence[str] = ()) -> dict[str, Any]:
    """All of it as plain values: `plans`, each with `values`, and with `why` or its figures."""
    each = (
        {"values": dict(p.values)} | ({"why": p.why} if p.found is None else as_data(p.found, given))
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
    panels = {
        "seconds a Step": lambda found: found.step,
        "tokens/s": lambda found: found.rate,
        "busy devices, %": lambda found: 100 * found.busy if found.busy is not None else None,
        "cost a Step": lambda found: None if found.cost.unpriced else found.cost.step,
    }
    shown = {title: _series(plans, first, labels, of) for title, of in panels.items()}
    known = {title: lines for title, lines in shown.items() if any(lines.values())}
    return charts(f"{_title(plans)} over {first}", known, [f"{each}" for each in labels])


def _series(
    plans: Sequence[ComparedPlan], first: str, labels: Sequence[str], of: Any
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
