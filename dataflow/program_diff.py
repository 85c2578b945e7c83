"""What changed between two Programs, or a graph and a Program: phase by phase.

Owns: pairing phases by their number, what a phase is besides its graph, the text. Does not own:
the comparison of two graphs (diff.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from dataflow.diff import Change, Difference, diff
from dataflow.graph import Graph, Phase
from dataflow.program import AnyGraph
from dataflow.safe_text import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseDifference:
    """One phase compared. graph: None where only one side has it; summary then says what it is."""

    number: int
    kind: str
    """`+` only after, `-` only before, `~` both have it."""
    summary: str
    changes: tuple[Change, ...] = ()
    graph: Difference | None = None

    def __bool__(self) -> bool:
        return self.graph is None or bool(self.graph or self.changes)

    def lines(self) -> Iterator[str]:
        """Its part of the text."""
        if self.graph is None:
            yield f"{self.kind} {self.summary}"
            return
        if not self:
            yield f"phase {self.number}: no difference"
            return
        yield f"phase {self.number}"
        yield from (f"  {one_line(str(change))}" for change in self.changes)
        if self.graph:
            yield from (f"  {line}".rstrip() for line in str(self.graph).splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramDifference:
    """Two Programs compared."""

    before: str
    after: str
    phases: tuple[PhaseDifference, ...]

    def __bool__(self) -> bool:
        return any(self.phases)

    def __str__(self) -> str:
        """The text that `dataflow diff` prints, ending in a newline."""
        names = self.before if self.before == self.after else f"{self.before} -> {self.after}"
        parts = ["\n".join(phase.lines()) for phase in self.phases]
        return "\n\n".join([one_line(names), *parts]) + "\n"


def compare(a: AnyGraph, b: AnyGraph) -> Difference | ProgramDifference:
    """Find what turns a into b. A graph is compared with a Program as one phase without an end."""
    if isinstance(a, Graph) and isinstance(b, Graph):  # two graphs alone have no headings
        return diff(a, b)
    pairs = enumerate(zip_longest(a.phases, b.phases), start=1)
    phases = tuple(_compare_phases(number, old, new) for number, (old, new) in pairs)
    return ProgramDifference(before=a.name, after=b.name, phases=phases)


def _compare_phases(number: int, old: Phase | None, new: Phase | None) -> PhaseDifference:
    if old is not None and new is not None:
        changes = tuple(_find_changes(old, new))
        graph = diff(old.graph, new.graph)
        return PhaseDifference(number=number, kind="~", summary="", changes=changes, graph=graph)
    if old is None:
        phase, kind = new, "+"
    else:
        phase, kind = old, "-"
    assert phase is not None, "one side has it"
    summary = one_line(f"phase {number}: {phase.graph.name}, {phase.length}")
    return PhaseDifference(number=number, kind=kind, summary=summary)


def _find_changes(old: Phase, new: Phase) -> Iterator[Change]:
    """What differs of two phases besides their graphs."""
    for field in ("steps", "until", "optimizers"):
        before, after = getattr(old, field), getattr(new, field)
        if before != after:
            yield Change(what=field, before=_write(before), after=_write(after))


def _write(setting: Any) -> str:
    if isinstance(setting, tuple):
        return ", ".join(setting)
    return "" if setting is None else str(setting)
