"""What seeing a run costs it, and how the page keeps up with large runs and graphs.

    python -m benchmarks.watch [--quick] [--json FILE]

Owns: the comparisons, their goals. Does not own: the run that is measured (watch_cost.py), the page
and its runs (watch_page.py), how results are shown (report.py).

Two ways of going on are compared by two processes at the same time, each with a core of its own,
which they exchange after each block: what slows the machine down slows both. A round is two blocks,
one on each core. Of the ratios of all rounds a fifth is left out at both ends, and the mean of the
rest is the result. Two equal ways show how far that can be trusted.
"""

from __future__ import annotations

import json as json_
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import tyro

from benchmarks.report import SideResult, machine, show, write_json
from benchmarks.watch_page import of_long_run, of_wide_run
from dataflow.draw import draw
from dataflow.draw.overlay import Overlay
from dataflow.draw.picture import make_picture
from dataflow.draw.svg import make_scene
from tests.kit.drawn_graphs import DrawnShape, drawn_graph

EVENTS, WATCHED = 1.01, 1.02
"""Seconds of a Step with events, and watched, by those of the same without."""


@contextmanager
def blocks(way: str, folder: Path, steps: int) -> Iterator[subprocess.Popen[str]]:
    """A process that makes blocks of Steps in one way."""
    command = [sys.executable, "-m", "benchmarks.watch_cost", way, str(folder), str(steps)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, **pipes, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    """The next line that a benchmark, not a reward function or a log, wrote."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{") or line == "ready\n":
            return line
    raise RuntimeError(f"{process.args}: expected the seconds of a block, found its end")


def compared(ways: tuple[str, str], rounds: int, steps: int) -> tuple[list[float], float]:
    """Of each round the ratio of a Step's seconds, first by second, and what share of the first's
    time the events' own code took.
    """
    ratios: list[float] = []
    shares: list[float] = []
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        sides = [
            stack.enter_context(blocks(way, Path(made) / str(i), steps))
            for i, way in enumerate(ways)
        ]
        for side in sides:
            _line(side)
        for turn in range(-1, 2 * rounds):  # the first warms up
            for i, side in enumerate(sides):
                assert side.stdin is not None
                side.stdin.write(f"{(turn + i) % 2}\n")
                side.stdin.flush()
            found = [json_.loads(_line(side)) for side in sides]
            if turn >= 0:
                ratios.append(found[0]["step"] / found[1]["step"])
                shares.append(sum(found[0]["share"].values()))
    pairs = zip(ratios[::2], ratios[1::2], strict=True)
    return [math.sqrt(a * b) for a, b in pairs], statistics.median(shares)


def middle(ratios: list[float]) -> float:
    """The mean without a fifth of the values at both ends."""
    cut = len(ratios) // 5
    return statistics.fmean(sorted(ratios)[cut : len(ratios) - cut])


def of_costs(rounds: int, steps: int) -> Iterator[SideResult]:
    """What events and watching cost."""
    events, share = compared(("events", "bare"), rounds, steps)
    watched, _ = compared(("watched", "bare"), rounds, steps)
    equal, _ = compared(("bare", "bare"), rounds, steps)
    name = "the events' own code / a Step"
    yield SideResult(name=name, value=share, unit="share", goal=EVENTS - 1, least=False)
    name = "a Step with events / without"
    yield SideResult(name=name, value=middle(events), unit="x", goal=EVENTS, least=False)
    name = "a Step watched / without events"
    yield SideResult(name=name, value=middle(watched), unit="x", goal=WATCHED, least=False)
    yield SideResult(name="two equal ways", value=middle(equal), unit="x")
    spread = statistics.stdev(events) / math.sqrt(len(events))
    yield SideResult(name="standard error of such a ratio", value=spread, unit="x")


def of_layouts() -> Iterator[SideResult]:
    """Seconds to lay out and write an SVG with life, and a width."""
    for nodes in (5, 50, 500):
        graph = drawn_graph(DrawnShape(nodes=nodes))
        draw(graph, "svg", life=True)
        begin = time.perf_counter()
        draw(graph, "svg", life=True)
        took = time.perf_counter() - begin
        name = f"layout of {nodes} nodes"
        yield SideResult(name=name, value=took, unit="s", goal=2.0, least=False)
    pictures = [make_picture(drawn_graph(DrawnShape(nodes=40, seed=seed))) for seed in range(20)]
    widths = [make_scene(picture, Overlay(life=True)).width for picture in pictures]
    name = "widest of 20 graphs of 40 nodes"
    yield SideResult(name=name, value=max(widths), unit="px", goal=2000, least=False)


def main(*, quick: bool = False, json: Path | None = None) -> None:
    """Measure.

    Args:
        quick: fewer rounds, and a shorter run on the page; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    found = [*of_layouts()]
    with tempfile.TemporaryDirectory() as made:
        sizes = (2_000, 2_000) if quick else (100_000, 100_000)
        found += of_long_run(Path(made), *sizes, rounds=2 if quick else 10)
        found += of_wide_run(Path(made), seconds=10.0 if quick else 30.0, rounds=2 if quick else 10)
    found += of_costs(*((2, 8) if quick else (12, 25)))
    where = machine()
    show("Watching: what it costs a run, and how the page keeps up", found, where)
    if json:
        write_json(json, found, where)


if __name__ == "__main__":
    tyro.cli(main)
