"""A plan in words: what runs where, what it should cost, and why.

Owns: the sections and their order, in ASCII, at most 120 columns wide. Does not own: any number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dataflow.dialect import spoken
from dataflow.shown import printable
from engine.plan.explain.edges import edges, weights
from engine.plan.explain.layout import WIDTH as WIDTH
from engine.plan.explain.layout import wrapped
from engine.plan.explain.nodes import cut, nodes, workers
from engine.plan.explain.summary import program, summary
from engine.plan.plan import Plan


def explain(plan: Plan, *, measured: Mapping[str, float] | None = None) -> str:
    """The plan as text. measured: node -> seconds a Step, shown beside what was predicted."""
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
