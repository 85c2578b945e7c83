"""Prints what a run of the continuous integration took: `scripts/ci-times FOLDER`.

Reads what `CI_TIMES=FOLDER .ci/run` wrote. Owns: adding up and printing. Does not own: measuring
tests (tests/kit/cost_records.py) and parts (ci_scheduler.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from ci_scheduler import CiTimes, times_table  # noqa: E402

from tests.kit.cost_records import TestCost  # noqa: E402

DEAREST_TESTS, DEAREST_FILES = 100, 40
HEAD = f"{'CPU s':>9} {'own':>9} {'children':>9} {'wall s':>9}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSum:
    """What several tests took together, in seconds."""

    name: str
    tests: int
    wall: float
    own: float
    children: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/ci-times", description=__doc__)
    parser.add_argument("folder", type=Path, help="what CI_TIMES named")
    folder: Path = parser.parse_args().folder
    print(report(read_costs(folder / "tests.jsonl"), CiTimes.load(folder / "parts.json")))


def read_costs(path: Path) -> list[TestCost]:
    return [TestCost(**json.loads(line)) for line in path.read_text().splitlines()]


def report(costs: list[TestCost], times: CiTimes) -> str:
    """All tables, the most detailed first: what is looked at most stands at the end."""
    by_file = cost_sums(costs, lambda cost: cost.test.partition("::")[0])
    by_suite = cost_sums(costs, lambda cost: cost.suite)
    idlest = sorted(times.parts, key=lambda part: part.idle, reverse=True)
    return "\n".join(
        [
            f"The {DEAREST_TESTS} dearest tests, by CPU seconds",
            *test_lines(costs),
            f"\nThe {DEAREST_FILES} dearest files",
            *sum_lines(by_file[:DEAREST_FILES]),
            "\nSuites",
            *sum_lines(by_suite),
            f"\nParts of turn {times.turn}, the idlest first",
            times_table([*idlest, times.whole]),
        ]
    )


def cpu_seconds(cost: TestCost | CostSum) -> float:
    return cost.own + cost.children


def cost_sums(costs: Iterable[TestCost], name_of: Callable[[TestCost], str]) -> list[CostSum]:
    """Add up those of one name; the dearest comes first. What pytest takes before and after its
    tests counts, but is no test.
    """
    groups: dict[str, list[TestCost]] = defaultdict(list)
    for cost in costs:
        groups[name_of(cost)].append(cost)
    sums = [
        CostSum(
            name=name,
            tests=sum("::" in cost.test for cost in group),
            wall=sum(cost.wall for cost in group),
            own=sum(cost.own for cost in group),
            children=sum(cost.children for cost in group),
        )
        for name, group in groups.items()
    ]
    return sorted(sums, key=cpu_seconds, reverse=True)


def test_lines(costs: Iterable[TestCost]) -> list[str]:
    dearest = sorted(costs, key=cpu_seconds, reverse=True)[:DEAREST_TESTS]
    lines = [f"{_seconds(cost)}  {cost.suite:12} {cost.test}" for cost in dearest]
    return [f"{HEAD}  {'suite':12} test", *lines]


def sum_lines(sums: Iterable[CostSum]) -> list[str]:
    return [f"{HEAD} {'tests':>6}"] + [
        f"{_seconds(each)} {each.tests:6}  {each.name}" for each in sums
    ]


def _seconds(cost: TestCost | CostSum) -> str:
    return f"{cpu_seconds(cost):9.1f} {cost.own:9.1f} {cost.children:9.1f} {cost.wall:9.1f}"


if __name__ == "__main__":
    main()
