"""`dataflow explain TARGET`: the plan, in words.

Owns: printing, and the mean times of a measured run. Does not own: planning and its text
(engine.plan). It takes the flags of `run`, so that changing that one word is enough.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataflow.errors import DataError
from dataflow.width import screen_width
from engine.cli.flags import graph_and
from engine.cli.screen import say
from engine.options import RunOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions(RunOptions):
    """Options of run, which a plan may depend on, and what to print beside it."""

    measured: Path | None = None
    """A run folder: print the seconds that each node really took beside the prediction."""


def main(arguments: Sequence[str]) -> int:
    """Check, plan, print."""
    graph, options = graph_and(ExplainOptions, "explain", arguments)
    from engine.api import plan  # here: it imports what runs kernels
    from engine.plan.explain import WIDTH, explain

    measured = None if options.measured is None else node_seconds(options.measured)
    planned, width = plan(graph, options), screen_width(WIDTH)
    say(explain(planned, measured=measured, width=width), end="")
    return 0


def node_seconds(folder: Path) -> dict[str, float]:
    """Node -> mean seconds a Step, from a run folder's metrics; of a Program with the phase's
    number before it, as `2/rollout`. Raises DataError without any.
    """
    lines = folder / "metrics.jsonl"
    if not lines.is_file():
        problem = "expected a run folder with metrics.jsonl"
        raise DataError(f"{folder}: {problem}. Fix: --measured runs/NAME.")
    found: dict[str, list[float]] = {}
    try:
        text = lines.read_bytes()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise DataError(f"{lines}: {problem}. Fix: --measured runs/NAME.") from error
    for number, line in enumerate(text.splitlines(), 1):
        for name, value in _times(line, f"{lines}:{number}").items():
            found.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in found.items()}


def _times(line: bytes, where: str) -> dict[str, float]:
    try:
        row = json.loads(line)
        phase = f"{row['phase']}/" if "phase" in row else ""
        times = {k.removeprefix("time/"): v for k, v in row.items() if k.startswith("time/")}
        return {f"{phase}{k}": float(v) for k, v in times.items() if v is not None}
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        problem = f"expected an object of numbers, found {line[:40]!r}"
        raise DataError(f"{where}: {problem}. Fix: delete the line, if it is the last.") from error
