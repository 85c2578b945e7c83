"""A plan in words: what runs where, what it should cost, and why.

Owns: the sections and their order, in ASCII, 120 columns wide or fewer. Does not own: any number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dataflow.dialect import find_dialect_uses
from dataflow.program import beginnings
from dataflow.safe_text import one_line, printable
from dataflow.width import fold_lines
from engine.plan.explain.contexts import context_lines
from engine.plan.explain.edges import edge_lines, weight_lines
from engine.plan.explain.layout import WIDTH as WIDTH
from engine.plan.explain.layout import Line, count, lay_out, wrap_line
from engine.plan.explain.measurements import MeasuredRun, compare_with_run
from engine.plan.explain.nodes import cut_lines, node_lines, worker_lines
from engine.plan.explain.planned_graph import planned_graph
from engine.plan.explain.summary import summary_lines
from engine.plan.plan import Plan
from engine.plan.program_plan import AnyPlan, ProgramPlan


def explain(
    plan: AnyPlan,
    *,
    measured: Mapping[int, MeasuredRun] | None = None,
    why: bool = False,
    width: int = WIDTH,
) -> str:
    """Write the plan as text; a Program's phase by phase. measured: by phase, shown beside what was
    predicted; 0 is a graph alone. why: also which layouts were compared. width: of its lines; words
    that are longer stay whole.
    """
    texts: list[str] = []
    for phase in plan.phases:
        run = None if measured is None else measured.get(phase.phase_number, MeasuredRun())
        texts.append(_explain_graph(phase, run, width, why=why))
    if isinstance(plan, ProgramPlan):
        texts = list(_with_headings(plan, texts, width))
    return printable("\n".join(texts))


def _with_headings(plan: ProgramPlan, texts: Iterable[str], width: int) -> Iterator[str]:
    """What is above the phases' texts, then each below its heading and what it begins with."""
    yield f"{one_line(plan.graph)}: {len(plan.phases)} phases; seed {plan.seed}\n"
    warnings = _section(_WARNINGS, _text_lines(map(str, plan.program_warnings)), width)
    if warnings:
        yield "\n".join(warnings) + "\n"
    program = plan.program
    for number, text in zip(program.numbers, texts, strict=True):
        begins = "".join(f"\n  {line}" for line in beginnings(program, number))
        yield f"{program.title(number)}{begins}\n\n{text}"


_WARNINGS = "warnings (errors with --strict)"


def _explain_graph(plan: Plan, run: MeasuredRun | None, width: int, *, why: bool) -> str:
    sections = [summary_lines(plan, width)]
    if why:
        sections.append(_section("layouts that were compared", _text_lines(plan.considered), width))
    sections += [_section(title, lines, width) for title, lines in _sections(plan, run)]
    texts = ["\n".join(lines) for lines in sections if lines]
    return "\n\n".join(texts) + "\n"


def _sections(plan: Plan, run: MeasuredRun | None) -> Iterator[tuple[str, Iterable[Line]]]:
    """Each section's title and lines, those without lines, too."""
    yield _WARNINGS, _text_lines(map(str, plan.warnings))
    yield "workers, each a process that does one thing after another", worker_lines(plan)
    yield "nodes, in the order in which they can run", node_lines(plan)
    yield (
        "contexts: tokens of a node's longest row, with the others as planned",
        context_lines(plan),
    )
    yield "where streaming ends", cut_lines(plan)
    saved = "saved: of columns that stay, nobody there reads them"
    yield f"edges: bytes a Step at the greatest lengths; {saved}", edge_lines(plan)
    yield "weights", weight_lines(plan)
    if run is not None:
        title = f"measured in {count(run.steps, 'Step')}" if run.steps else "measured"
        yield title, compare_with_run(plan, run)
    yield "conventions that peers do not share", _dialect_lines(plan)
    yield "recorded of each Step", _recorded_lines(plan)
    yield "notes", _text_lines(plan.notes)


def _section(title: str, lines: Iterable[Line], width: int) -> list[str]:
    """A title and its lines; nothing without lines."""
    body: list[str] = []
    for line in lines:
        body += [f"  {text}".rstrip() for text in lay_out(line, width - 2)]
    if not body:
        return []
    return [*fold_lines(title, width).split("\n"), *body]


def _dialect_lines(plan: Plan) -> Iterator[Line]:
    for use in find_dialect_uses(planned_graph(plan)):
        text = f"{use.where}: {use.what} as {use.dialect} does it (dialect={use.dialect!r})"
        if use.says:
            text = f"{text}: {use.says}"
        yield from wrap_line(text, after=2)
        for question in use.describe_gaps():
            yield from wrap_line(f"  {question}", after=2)


def _recorded_lines(plan: Plan) -> Iterator[Line]:
    for intake in plan.recorded:
        if len(plan.recorded) > 1:
            yield f"{intake.name}:"
        for fetch in intake.fetches:
            yield from wrap_line(f"{fetch.producer}: {', '.join(fetch.columns)}", after=2)


def _text_lines(texts: Iterable[str]) -> Iterator[Line]:
    for text in texts:
        yield from wrap_line(text, after=2)
