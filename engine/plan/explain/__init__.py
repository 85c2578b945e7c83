"""A plan in words: what runs where, what it should cost, and why.

Owns: the sections and their order, in ASCII, at most 120 columns wide. Does not own: any number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dataflow.dialect import spoken
from dataflow.program import beginnings
from dataflow.shown import one_line, printable
from engine.plan.explain.edges import edges, weights
from engine.plan.explain.layout import WIDTH as WIDTH
from engine.plan.explain.layout import wrapped
from engine.plan.explain.nodes import cut, nodes, workers
from engine.plan.explain.summary import program, summary
from engine.plan.plan import Plan
from engine.plan.program_plan import ProgramPlan


def explain(plan: Plan | ProgramPlan, *, measured: Mapping[str, float] | None = None) -> str:
    """The plan as text; a Program's phase by phase. measured: node -> seconds a Step, shown beside
    what was predicted; of a Program with the phase's number before it, as `2/rollout`.
    """
    if isinstance(plan, Plan):
        return _explained(plan, measured)
    parts = [f"{one_line(plan.graph)}: {len(plan.phases)} phases; seed {plan.seed}\n"]
    own = _section("warnings (errors with --strict)", _texts(map(str, plan.own)))
    parts += ["\n".join(own) + "\n"] if own else []
    for number, phase in enumerate(plan.phases, start=1):
        times = measured and dict(_of_phase(measured, number))
        head = [plan.program.title(number), *beginnings(plan.program, number)]
        lines = "\n".join([head[0], *(f"  {line}" for line in head[1:])])
        parts.append(f"{lines}\n\n{_explained(phase, times)}")
    return printable("\n".join(parts))


def _of_phase(measured: Mapping[str, float], number: int) -> Iterator[tuple[str, float]]:
    for name, seconds in measured.items():
        phase, _, node = name.partition("/")
        if phase == str(number):
            yield node, seconds


def _explained(plan: Plan, measured: Mapping[str, float] | None) -> str:
    saved = "saved: of columns that stay, nobody there reads them"
    sections = [
        summary(plan),
        _section("warnings (errors with --strict)", _texts(map(str, plan.warnings))),
        _section("workers, each a process that does one thing after another", workers(plan)),
        _section("nodes, in the order in which they can run", nodes(plan, measured)),
        _section("where streaming ends", cut(plan)),
        _section(f"edges: bytes a Step at the greatest lengths; {saved}", edges(plan)),
        _section("weights", weights(plan)),
        _section("conventions that peers do not share", _dialects(plan)),
        _section("recorded of each Step", _recorded(plan)),
        _section("notes", _texts(plan.notes)),
    ]
    return printable("\n\n".join("\n".join(lines) for lines in sections if lines) + "\n")


def _section(title: str, lines: Iterable[str]) -> list[str]:
    """A title and its lines, if there are any."""
    body = [f"  {line}".rstrip() for line in lines]
    return [title, *body] if body else []


def _dialects(plan: Plan) -> Iterator[str]:
    for use in spoken(program(plan)):
        way = f"{use.what} as {use.dialect} does it (dialect={use.dialect!r})"
        yield from wrapped(f"{use.where}: {way}{f': {use.says}' if use.says else ''}", after=2)
        for text in use.unanswered():
            yield from wrapped(f"  {text}", after=2)


def _recorded(plan: Plan) -> Iterator[str]:
    for i in plan.recorded:
        if len(plan.recorded) > 1:
            yield f"{i.name}:"
        for fetch in i.fetches:
            yield from wrapped(f"{fetch.producer}: {', '.join(fetch.columns)}", after=2)


def _texts(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from wrapped(text, after=2)
