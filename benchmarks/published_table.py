"""Rows of published results: what a number rests on, and whether it reproduces the published one.

Owns: the rule, the order and the table. Does not own: which results there are (published.py), the
inputs (published.toml).

A number counts as reproduced if nothing that it rests on was fitted to a published result, the rows
and their lengths are known, and it is within the tolerance of what was published. A number that
rests on something fitted is called fitted, however near it is. A bound that was published says less
than a number: what keeps to it is in the published range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.report import SideResult

WITHIN = 0.25
"""Of the published number, which a reproduced one may be off."""
NOTHING = "nothing fitted"
REACHED = 0.9
"""Of what a system's own schedule gives, that our coordinator is to reach with the same prices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One result. published: None where there is only a range, from least to most, or nothing.
    within: see WITHIN; 0 for counts, which are all or not reproduced. fitted: what it rests on that
    was fitted to published results. assumed: whether no source gives the rows or their lengths.
    ours: what `dataflow simulate` gives with this project's coordinator, where that was run.
    """

    name: str
    published: float | None
    simulated: float
    unit: str = "x"
    least: float | None = None
    most: float | None = None
    within: float = WITHIN
    source: str = ""
    fitted: tuple[str, ...] = ()
    assumed: bool = False
    ours: float | None = None

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """Between which the number counts: the published range, or the tolerance."""
        if self.published is None:
            return self.least, self.most
        ends = [self.published * (1.0 - self.within), self.published * (1.0 + self.within)]
        return min(ends), max(ends)

    @property
    def holds(self) -> bool | None:
        """Whether it is between its bounds; None where nothing was published."""
        least, most = self.bounds
        if least is None and most is None:
            return None
        under = most is None or self.simulated <= most
        return under and (least is None or self.simulated >= least)

    @property
    def ratio(self) -> float | None:
        """To what was published: the number, or the end of the range that it is beyond."""
        if self.published is not None:
            return self.simulated / self.published
        least, most = self.bounds
        if self.holds is not False:
            return None
        beyond = most if most is not None and self.simulated > most else least
        return None if beyond is None else self.simulated / beyond

    @property
    def reached(self) -> float | None:
        """What our coordinator reaches of the system's own schedule, 1 or more where it is no
        slower; None where it was not run.
        """
        if self.ours is None:
            return None
        return self.simulated / self.ours if self.unit == "s" else self.ours / self.simulated

    @property
    def verdict(self) -> str:
        """In words; empty where nothing was published."""
        if self.holds is None:
            return ""
        if self.fitted:
            return "fitted"
        if not self.holds:
            return "not reproduced"
        if self.published is None:
            return "in the published range"
        return "rows assumed" if self.assumed else "reproduced"

    def results(self) -> Iterator[SideResult]:
        """One for each bound; one without, where nothing was published or something was fitted."""
        least, most = (None, None) if self.fitted else self.bounds
        if least is None and most is None:
            yield SideResult(name=self.name, value=self.simulated, unit=self.unit)
        for bound, lower, suffix in ((least, True, "least"), (most, False, "most")):
            if bound is not None:
                yield SideResult(
                    name=f"{self.name}/{suffix}",
                    value=self.simulated,
                    unit=self.unit,
                    goal=bound,
                    least=lower,
                )
        if self.reached is not None:
            name = f"{self.name}/with this coordinator"
            yield SideResult(name=f"{name}/of its own", value=self.reached, unit="x", goal=REACHED)
            yield SideResult(name=name, value=self.ours or 0.0, unit=self.unit)


def ordered(found: Sequence[Row]) -> list[Row]:
    """What is beyond its bounds first, the furthest first; what was not published last."""
    return sorted(found, key=lambda row: (row.holds is not False, row.holds is None, -_off(row)))


def _off(row: Row) -> float:
    """How far the ratio is from 1."""
    return 0.0 if row.ratio is None else abs(row.ratio - 1.0)


def table(found: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and cells, as text. The column of our own coordinator is there if any row has it."""
    head = ("what", "published", "simulated", "ratio", "fitted", "reproduced", "source")
    rows = ordered(found)
    cells = [_cells(row) for row in rows]
    if all(row.ours is None for row in found):
        return head, cells
    ours = [(_number(row.ours, row.unit), _number(row.reached, "x")) for row in rows]
    head = (*head[:3], "with this coordinator", "of its own", *head[3:])
    return head, [(*c[:3], *own, *c[3:]) for c, own in zip(cells, ours, strict=True)]


def summary(found: Sequence[Row]) -> str:
    """How many numbers that were published are reproduced."""
    numbers = [row for row in found if row.published is not None]
    reproduced = sum(row.verdict == "reproduced" for row in numbers)
    rest = f", {fitted} rest on something fitted" if (fitted := _fitted(numbers)) else ""
    return f"{reproduced} of {len(numbers)} published numbers are reproduced{rest}"


def _fitted(rows: Sequence[Row]) -> int:
    return sum(bool(row.fitted) for row in rows)


def _cells(row: Row) -> tuple[str, ...]:
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    fitted = ", ".join(row.fitted) or NOTHING
    numbers = (_published(row), _number(row.simulated, row.unit))
    return row.name, *numbers, ratio, fitted, row.verdict, row.source


def _published(row: Row) -> str:
    """The number, or the range."""
    if row.published is not None:
        return _number(row.published, row.unit)
    bounds = (("from", row.least), ("to", row.most))
    ends = " ".join(f"{word} {bound:.3g}" for word, bound in bounds if bound is not None)
    return f"{ends} {row.unit}" if ends else ""


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
