"""A plan in words: what runs where, what it should cost, and why.

Owns: the sections and their order, in ASCII, 120 columns wide or fewer. Does not own: any number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from dataflow.dialect import spoken
from dataflow.program import beginnings
from dataflow.shown import one_line, printable
from dataflow.width import folded
from engine.plan.explain.edges import edges, weights
from engine.plan.explain.layout import WIDTH as WIDTH
from engine.plan.explain.layout import Line, count, laid, wrapped
from engine.plan.explain.measurements import MeasuredRun, compared
from engine.plan.explain.nodes import cut, nodes, workers
from engine.plan.explain.summary import program, summary
from engine.plan.plan import Plan
from engine.plan.program_plan import AnyPlan, ProgramPlan


def explain(
    plan: AnyPlan,
    *,
    measured: Mapping[int, MeasuredRun] | None = None,
    width: int = WIDTH,
) -> str:
    """The plan as text; a Program's phase by phase. measured: by phase, shown beside what was
    predicted; 0 is a graph alone. width: of its lines; words that are longer stay whole.
    """
    texts: list[str] = []
    for phase in plan.phases:
        run = None if measured is None else measured.get(phase.phase_number, MeasuredRun())
        texts.append(_explained(phase, run, width))
    if isinstance(plan, ProgramPlan):
        texts = list(_with_headings(plan, texts, width))
    return printable("\n".join(texts))


def _with_headings(plan: ProgramPlan, texts: Iterable[str], width: int) -> Iterator[str]:
    """What is above the phases' texts, then each below its heading and what it begins with."""
    yield f"{one_line(plan.graph)}: {len(plan.phases)} phases; seed {plan.seed}\n"
    own = _section("warnings (errors with --strict)", _texts(map(str, plan.own)), width)
    if own:
        yield "\n".join(own) + "\n"
    program = plan.program
    for number, text in zip(program.numbers, texts, strict=True):
        begins = "".join(f"\n  {line}" for line in beginnings(program, number))
        yield f"{program.title(number)}{begins}\n\n{text}"


def _explained(plan: Plan, found: MeasuredRun | None, width: int) -> str:
    saved = "saved: of columns that stay, nobody there reads them"
    section = partial(_section, width=width)
    sections = [
        summary(plan, width),
        section("warnings (errors with --strict)", _texts(map(str, plan.warnings))),
        section("workers, each a process that does one thing after another", workers(plan)),
        section("nodes, in the order in which they can run", nodes(plan)),
        section("where streaming ends", cut(plan)),
        section(f"edges: bytes a Step at the greatest lengths; {saved}", edges(plan)),
        section("weights", weights(plan)),
        section(f"measured{_of(found)}", compared(plan, found) if found else ()),
        section("conventions that peers do not share", _dialects(plan)),
        section("recorded of each Step", _recorded(plan)),
        section("notes", _texts(plan.notes)),
    ]
    return printable("\n\n".join("\n".join(lines) for lines in sections if lines) + "\n")


def _of(found: MeasuredRun | None) -> str:
    return f" in {count(found.steps, 'Step')}" if found and found.steps else ""


def _section(title: str, lines: Iterable[Line], width: int) -> list[str]:
    """A title and its lines, if there are any."""
    body = [f"  {text}".rstrip() for line in lines for text in laid(line, width - 2)]
    return [*folded(title, width).split("\n"), *body] if body else []


def _dialects(plan: Plan) -> Iterator[Line]:
    for use in spoken(program(plan)):
        way = f"{use.what} as {use.dialect} does it (dialect={use.dialect!r})"
        yield from wrapped(f"{use.where}: {way}{f': {use.says}' if use.says else ''}", after=2)
        for text in use.unanswered():
            yield from wrapped(f"  {text}", after=2)


def _recorded(plan: Plan) -> Iterator[Line]:
    for i in plan.recorded:
        if len(plan.recorded) > 1:
            yield f"{i.name}:"
        for fetch in i.fetches:
            yield from wrapped(f"{fetch.producer}: {', '.join(fetch.columns)}", after=2)


def _texts(texts: Iterable[str]) -> Iterator[Line]:
    for text in texts:
        yield from wrapped(text, after=2)
