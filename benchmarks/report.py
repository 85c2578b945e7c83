"""How a benchmark reports: a table, a JSON and a markdown file, and the machine that it ran on.

Owns: the format of all benchmarks' results. Does not own: measuring.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.plan.cost.machine import gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class SideResult:
    """One number. goal: its bound, None for none; least: whether it is a lower bound."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    least: bool = True

    @property
    def holds(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.least else self.value <= self.goal

    def as_json(self) -> dict[str, object]:
        """`{name, value, unit, goal, holds}`."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "goal": self.goal,
            "holds": self.holds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the numbers depend on besides the code."""

    processor: str
    cores: int
    memory_gib: float
    python: str
    torch: str
    load: float
    """All users' runnable processes over the last minute; above `cores`, do not quote times."""
    device: str
    """The first GPU with its driver; where there is none, the processor."""

    def __str__(self) -> str:
        host = f"{self.processor}, {self.cores} cores, {self.memory_gib:.0f} GiB"
        software = f"Python {self.python}, torch {self.torch}; load {self.load:.1f}"
        if self.device == self.processor:
            return f"{host}; {software}"
        return f"{self.device}; {host}; {software}"


def machine() -> Machine:
    """The machine as it is now (Linux)."""
    processor = _processor()
    return Machine(
        processor=processor,
        cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        python=platform.python_version(),
        torch=importlib.metadata.version("torch"),
        load=os.getloadavg()[0],
        device=next(iter(gpus()), processor),
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def show(title: str, results: Sequence[SideResult], where: Machine) -> None:
    """Print the results as a table, with the machine below."""
    table = Table(*_COLUMNS, title=title)
    for result in results:
        table.add_row(*_cells(result))
    console = Console()
    console.print(table)
    console.print(str(where), highlight=False)


def write_json(path: Path, results: Sequence[SideResult], where: Machine) -> None:
    """Write the numbers as JSON, the machine as `<name>.machine.json` and both as `<name>.md`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([result.as_json() for result in results], indent=2) + "\n")
    path.with_suffix(".machine.json").write_text(json.dumps(asdict(where), indent=2) + "\n")
    path.with_suffix(".md").write_text(_markdown(path.stem, results, where))


class SavedResults:
    """The results of a benchmark that may be killed: each is written as soon as it is there."""

    def __init__(self, path: Path | None) -> None:
        """path: of the JSON; None writes nothing."""
        self._path, self._machine = path, machine()
        self._results: list[SideResult] = []

    def add(self, *results: SideResult) -> None:
        """Write these, too."""
        self._results += results
        if self._path is not None:
            write_json(self._path, self._results, self._machine)

    def replace(self, *results: SideResult) -> None:
        """Write these in the place of all others."""
        self._results = []
        self.add(*results)

    def show(self, title: str) -> None:
        """Print all of them as a table."""
        show(title, self._results, self._machine)


_COLUMNS = ("what", "value", "unit", "goal", "holds")


def _markdown(name: str, results: Sequence[SideResult], where: Machine) -> str:
    rows = [_COLUMNS, ("---", "---:", "---", "---:", "---"), *map(_cells, results)]
    return f"# {name}\n\n{where}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(result: SideResult) -> tuple[str, ...]:
    held = {None: "", True: "yes", False: "NO"}[result.holds]
    return result.name, _number(result.value), result.unit, _goal(result), held


def _goal(result: SideResult) -> str:
    if result.goal is None:
        return ""
    return f"{'>=' if result.least else '<='} {_number(result.goal)}"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
