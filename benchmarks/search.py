"""The search for layouts: against exhaustion on the same prices, and how long it takes.

    python -m benchmarks.search [--quick] [--json FILE]

Owns: which random problems are tried, and the goals. Does not own: how each is made
(tests/kit/search_problems.py), how results are shown (report.py).

Exhaustion branches over all groupings and divisions, and leaves out only what cannot be shorter
than what is known. The large graphs have 998 nodes with Models, ten thousand devices, and prices of
the real cost model; CPU seconds count, so that others on the machine change little.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import tyro

from benchmarks.report import SideResult, machine, show, write_json
from engine.plan.search.choice import Findings, Limits, search
from engine.plan.search.division import Division
from engine.plan.search.groupings import arrange
from engine.plan.search.problem import Members
from tests.kit.search_problems import (
    KINDS,
    exhaust,
    let_sleep,
    make_large_problem,
    make_problem,
)

SMALL, LARGER, SLEEPING = 300, 100, 100
"""Feasible problems of 2 to 6 nodes, of 7 to 9 whose groupings are not all tried, and of 2 to 5 on
hosts with little memory.
"""
FIRST_SMALL, FIRST_LARGER, FIRST_SLEEPING = 0, 60_000, 70_000
"""Seeds from which problems are drawn. Nothing was chosen by what came of them."""
NEAR, MOST = 1.03, 1.06
MODEL_NODES, DEVICES = 998, 10_000
SEARCH_SECONDS = 10.0
PLACEMENTS_A_SECOND = 2000.0
_INFINITE = float("inf")


def compare(
    first: int, cases: int, counts: range, limits: Limits, *, sleeping: bool = False
) -> list[float]:
    """What the search finds over the least there is, of so many feasible problems. counts: of
    nodes; sleeping: where Workers take turns beside small hosts. Raises AssertionError where one of
    both finds what the other refuses.
    """
    ratios: list[float] = []
    seed = first
    while len(ratios) < cases:
        nodes = Random(seed).choice(counts)
        # Exhaustion of nine nodes on sixteen devices takes hours.
        problem = make_problem(seed, nodes, most_devices=16 if nodes < 5 else 8)
        if sleeping:
            problem = let_sleep(problem, seed)
        best = search(problem, limits).best
        seconds = best[0].seconds if best else _INFINITE
        least = exhaust(problem, seconds)
        assert (seconds == _INFINITE) == (least == _INFINITE), f"seed {seed}"
        if best:
            ratios.append(seconds / least)
        seed += 1
    return ratios


def show_ratios(name: str, ratios: list[float]) -> Iterator[SideResult]:
    near = sum(ratio <= NEAR for ratio in ratios) / len(ratios)
    yield SideResult(
        name=f"{name}/{len(ratios)} cases, share within 3 %", value=near, unit="", goal=0.95
    )
    yield SideResult(
        name=f"{name}/worst, over the best", value=max(ratios), unit="", goal=MOST, least=False
    )


def show_large(kinds: tuple[str, ...], lag: int) -> Iterator[SideResult]:
    """Seconds of a search for a large graph."""
    problem = make_large_problem(kinds, lag, MODEL_NODES, DEVICES)
    begun = time.process_time()
    findings: Findings = search(problem)
    seconds = time.process_time() - begun
    assert findings.best
    name = f"{MODEL_NODES} nodes, {DEVICES:,} devices of {len(kinds)} kinds, lag {lag}"
    yield SideResult(
        name=f"{name}/search", value=seconds, unit="s", goal=SEARCH_SECONDS, least=False
    )


def placements_a_second() -> SideResult:
    """Placements of a large graph whose Steps are timed: each has its nodes in some groups, on
    other numbers of devices than the one before.
    """
    problem = make_large_problem(KINDS[:1], 0, MODEL_NODES, DEVICES)
    placement = search(problem).best[0]
    grouping = arrange([Members(group.members, group.pool) for group in placement.groups])
    division = Division(problem)
    curves = [division.curve(members) for members in grouping]
    count, begun = 0, time.process_time()
    while time.process_time() - begun < 2.0:
        prices = [curve[count % len(curve)].price for curve in curves]
        division.times.seconds(grouping, prices)
        count += 1
    rate = count / (time.process_time() - begun)
    name = f"{MODEL_NODES} nodes in {len(grouping)} groups/placements priced"
    return SideResult(name=name, value=rate, unit="/s", goal=PLACEMENTS_A_SECOND)


def list_results(*, quick: bool) -> Iterator[SideResult]:
    share = 20 if quick else 1
    small = compare(FIRST_SMALL, SMALL // share, range(2, 7), Limits())
    yield from show_ratios("2 to 6 nodes", small)
    sleep = compare(FIRST_SLEEPING, SLEEPING // share, range(2, 6), Limits(), sleeping=True)
    yield from show_ratios("2 to 5 nodes, Workers that sleep on small hosts", sleep)
    limits = Limits(groupings=0)
    # Nine nodes take minutes by exhaustion.
    larger = compare(FIRST_LARGER, LARGER // share, range(7, 8 if quick else 10), limits)
    yield from show_ratios("7 to 9 nodes, by steps alone", larger)
    for kinds in (KINDS[:1], KINDS[:2], KINDS) if not quick else (KINDS[:1],):
        for lag in (0, 1):
            yield from show_large(kinds, lag)
    yield placements_a_second()


def main(*, quick: bool = False, json: Path | None = None) -> None:
    """Measure.

    Args:
        quick: a few cases of each; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    results, where = list(list_results(quick=quick)), machine()
    show("search", results, where)
    if json is not None:
        write_json(json, results, where)


if __name__ == "__main__":
    tyro.cli(main)
