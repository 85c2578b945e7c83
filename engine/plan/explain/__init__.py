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
from engine.plan.explain.layout import Line, laid, wrapped
from engine.plan.explain.nodes import cut, nodes, workers
from engine.plan.explain.summary import program, summary
from engine.plan.plan import Plan
from engine.plan.program_plan import ProgramPlan


def explain(
    plan: Plan | ProgramPlan, *, measured: Mapping[str, float] | None = None, width: int = WIDTH
) -> str:
    """The plan as text; a Program's phase by phase. measured: node -> seconds a Step, shown beside
    what was predicted; of a Program with the phase's number before it, as `2/rollout`. width: of
    its lines; words that are longer stay whole.
    """
    if isinstance(plan, Plan):
        return _explained(plan, measured, width)
    parts = [f"{one_line(plan.graph)}: {len(plan.phases)} phases; seed {plan.seed}\n"]
    own = _section("warnings (errors with --strict)", _texts(map(str, plan.own)), width)
    parts += ["\n".join(own) + "\n"] if own else []
    for number, phase in enumerate(plan.phases, start=1):
        times = measured and dict(_of_phase(measured, number))
        head = [plan.program.title(number), *beginnings(plan.program, number)]
        lines = "\n".join([head[0], *(f"  {line}" for line in head[1:])])
        parts.append(f"{lines}\n\n{_explained(phase, times, width)}")
    return printable("\n".join(parts))


def _of_phase(measured: Mapping[str, float], number: int) -> Iterator[tuple[str, float]]:
    for name, seconds in measured.items():
        phase, _, node = name.partition("/")
        if phase == str(number):
            yield node, seconds


def _explained(plan: Plan, measured: Mapping[str, float] | None, width: int) -> str:
    saved = "saved: of columns that stay, nobody there reads them"
    section = partial(_section, width=width)
    sections = [
        summary(plan, width),
        section("warnings (errors with --strict)", _texts(map(str, plan.warnings))),
        section("workers, each a process that does one thing after another", workers(plan)),
        section("nodes, in the order in which they can run", nodes(plan, measured)),
        section("where streaming ends", cut(plan)),
        section(f"edges: bytes a Step at the greatest lengths; {saved}", edges(plan)),
        section("weights", weights(plan)),
        section("conventions that peers do not share", _dialects(plan)),
        section("recorded of each Step", _recorded(plan)),
        section("notes", _texts(plan.notes)),
    ]
    return printable("\n\n".join("\n".join(lines) for lines in sections if lines) + "\n")


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
